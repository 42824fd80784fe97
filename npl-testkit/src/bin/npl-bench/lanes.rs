// SPDX-License-Identifier: Apache-2.0
//! Measures how much the rate of one processor falls while another processor does the same work for another Pod of the
//! Node. Both processors share the Node's uplink, programs and maps. The figures of routing show how much of the loss is
//! not caused by NPL: the processors of a virtual machine may share one core and its caches.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use npl_testkit::interrupt;
use npl_testkit::run::Run;

use crate::Effort;
use crate::cases::{Case, Mode, Workload};
use crate::figures::{Aim, Figure, Samples, Stage, figure, say};
use crate::testbed::Testbed;

const CASES: [(Figure, Case); 10] = [
    (lane("lanes/established-routing", &[]), case(Workload::Established, Mode::Routing)),
    (lane("lanes/established-stack", KEPT), case(Workload::Established, Mode::Ours)),
    (lane("lanes/established-offload", KEPT), case(Workload::Established, Mode::OursOffload)),
    (lane("lanes/established-redirect", KEPT), case(Workload::Established, Mode::OursRedirect)),
    (lane("lanes/replies-routing", &[]), case(Workload::Replies, Mode::Routing)),
    (lane("lanes/replies-stack", KEPT), case(Workload::Replies, Mode::Ours)),
    (lane("lanes/replies-redirect", KEPT), case(Workload::Replies, Mode::OursRedirect)),
    (lane("lanes/new-flows-routing", &[]), case(Workload::NewFlows, Mode::Routing)),
    (lane("lanes/new-flows-stack", KEPT), case(Workload::NewFlows, Mode::Ours)),
    (lane("lanes/new-flows-redirect", &[Aim::LeastRatio(0.97)]), case(Workload::NewFlows, Mode::OursRedirect)),
];

/// The goal of most figures.
const KEPT: &[Aim] = &[Aim::LeastRatio(0.98)];

/// All figures.
pub(crate) const FIGURES: [&Figure; CASES.len()] = {
    let mut figures = [&CASES[0].0; CASES.len()];
    let mut at = 0;
    while at < CASES.len() {
        figures[at] = &CASES[at].0;
        at += 1;
    }
    figures
};

const fn lane(name: &'static str, aims: &'static [Aim]) -> Figure {
    figure(name, "Mpps", Stage::Lanes, aims).beside("one processor alone")
}

const fn case(workload: Workload, mode: Mode) -> Case {
    Case { workload, mode }
}

/// Measures the elements of `figures` that belong to this stage. Each round measures each case twice: with one
/// processor, and with two.
pub(crate) fn measure(figures: &[&Figure], object: &Path, effort: Effort, samples: &mut Samples) -> Result<()> {
    let is_wanted = |(figure, _): &&(Figure, Case)| figures.iter().any(|it| it.name == figure.name);
    let wanted: Vec<&(Figure, Case)> = CASES.iter().filter(is_wanted).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let run = Run::start()?;
    say("measuring one and two processors");
    let mut lanes = Vec::new();
    for (number, (figure, case)) in wanted.into_iter().enumerate() {
        let prepare = || {
            let mut testbed = Testbed::new(&run, number, &[*case], object)?;
            let second = testbed.second_lane(&run, *case, object)?;
            Ok::<_, anyhow::Error>((testbed, second))
        };
        let (testbed, second) = prepare().with_context(|| format!("prepare {}", figure.name))?;
        lanes.push((figure, *case, testbed, second));
    }
    for _round in 0..effort.rounds {
        for (figure, case, testbed, second) in &mut lanes {
            ensure!(!interrupt::is_requested(), "interrupted");
            let alone = testbed.sample(*case, effort)?;
            let beside = testbed.sample_beside(*case, effort, second)?;
            samples.add(figure, &[beside], &[alone]);
        }
    }
    Ok(())
}
