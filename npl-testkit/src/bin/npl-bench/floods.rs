// SPDX-License-Identifier: Apache-2.0
//! Measures the rate of an established flow while another processor sends a flood to the Pod's mappings of the flood's
//! protocol. A flood of UDP datagrams or fragments also uses the mapping of the established flow.

use std::path::Path;

use anyhow::{Result, ensure};
use npl_testkit::interrupt;
use npl_testkit::run::Run;

use crate::Effort;
use crate::cases::{Case, Mode, Workload};
use crate::figures::{Figure, Samples, Stage, figure, say};
use crate::testbed::Testbed;

/// All figures, one for each flood of [`Workload::FLOODS`].
pub(crate) const FIGURES: [&Figure; Workload::FLOODS.len()] = [
    &beside_flood("flood/established-beside-syn"),
    &beside_flood("flood/established-beside-ack"),
    &beside_flood("flood/established-beside-rst"),
    &beside_flood("flood/established-beside-null"),
    &beside_flood("flood/established-beside-syn-ack"),
    &beside_flood("flood/established-beside-udp"),
    &beside_flood("flood/established-beside-fragment"),
    &beside_flood("flood/established-beside-sctp-init"),
    &beside_flood("flood/established-beside-sctp-data"),
];

const ESTABLISHED: Case = Case { workload: Workload::Established, mode: Mode::Ours };

const fn beside_flood(name: &'static str) -> Figure {
    figure(name, "Mpps", Stage::Flood, &[]).beside("without a flood")
}

/// Measures the elements of `figures` that belong to this stage. Each round measures the established flow twice per
/// figure: without a flood, and during the figure's flood.
pub(crate) fn measure(figures: &[&Figure], object: &Path, effort: Effort, samples: &mut Samples) -> Result<()> {
    let wanted = FIGURES.into_iter().zip(Workload::FLOODS);
    let wanted: Vec<_> = wanted.filter(|(figure, _)| figures.iter().any(|it| it.name == figure.name)).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let run = Run::start()?;
    say("measuring an established flow beside floods");
    let mut testbed = Testbed::new(&run, 0, &[ESTABLISHED], object)?;
    let mut floods = Vec::new();
    for (figure, workload) in wanted {
        floods.push((figure, testbed.flood(workload, object)?));
    }
    for _round in 0..effort.rounds {
        for (figure, flood) in &mut floods {
            ensure!(!interrupt::is_requested(), "interrupted");
            let alone = testbed.sample(ESTABLISHED, effort)?;
            let beside = testbed.sample_beside(ESTABLISHED, effort, flood)?;
            samples.add(figure, &[beside], &[alone]);
        }
    }
    Ok(())
}
