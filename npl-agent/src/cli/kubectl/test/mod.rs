// SPDX-License-Identifier: Apache-2.0
//! `kubectl npl test`: creates echo Pods, tests every path to their node ports, and removes the Pods again.

mod clients;
mod drain;
mod report;
mod scene;
mod site;

use std::{collections::BTreeSet, process::ExitCode, time::Duration};

use self::{
    report::Report,
    scene::{NAMESPACE, PUBLICATION, START, Scene},
};
use super::{Kubectl, interrupt::Interrupt, temporary::name_leftovers};
use crate::{
    cli::note,
    config::kubectl_args::TestArgs,
    core::{
        path_test::{Outcome, PathFacts, Row, Server, judge, plan, publication},
        verdict::HealthVerdict,
    },
};

/// The time limit for the whole test except the removal of its objects: more than the sum of the steps' time limits.
const LIMIT: Duration = Duration::from_mins(8);

/// Prints the result of every path. The exit code is 1 if a path fails; otherwise 2 if a result is unknown or objects
/// of the test are left behind; otherwise 0.
pub(super) fn run(kubectl: Kubectl<'_>, args: &TestArgs) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::watch(LIMIT)?;
    let kubectl = kubectl.within(&interrupt);
    name_leftovers(kubectl, &NAMESPACE)?;
    let sites = site::choose(kubectl, args)?;
    let names: Vec<&str> = sites.iter().map(|site| site.node.as_str()).collect();
    note(&format!("testing the paths to {}", names.join(" and ")));
    let scene = Scene::new(kubectl, &sites)?;
    let verdict = test(args, &scene, &interrupt);
    let is_removed = scene.namespace.remove(&interrupt);
    Ok(ExitCode::from(exit_code(verdict?, is_removed)))
}

fn test(args: &TestArgs, scene: &Scene<'_>, interrupt: &Interrupt) -> anyhow::Result<HealthVerdict> {
    scene.create(args.image.as_deref())?;
    let report = Report::new(scene.kubectl, scene.sites, all_rows(scene, interrupt)?);
    report.print(args.output)?;
    Ok(report.verdict())
}

/// Returns the exit code of a test. `is_removed` states whether all objects of the test were removed.
fn exit_code(verdict: HealthVerdict, is_removed: bool) -> u8 {
    let verdict = if verdict == HealthVerdict::Healthy && !is_removed { HealthVerdict::CannotTell } else { verdict };
    verdict.exit_code()
}

fn all_rows(scene: &Scene<'_>, interrupt: &Interrupt) -> anyhow::Result<Vec<Row>> {
    scene.namespace.wait_for_pods(interrupt, START)?;
    let (servers, mut rows) = published(scene, interrupt)?;
    let (paths, not_tried) = plan(&servers);
    let observed = clients::observe(scene, &paths);
    interrupt.check()?;
    let unreachable = clients::unreachable(&paths, &observed);
    let facts = PathFacts { servers: &servers, unreachable: &unreachable };
    let judged: Vec<Row> = paths.iter().zip(&observed).map(|(path, it)| judge(facts, path, it)).collect();
    let has_passed = paths.iter().zip(&judged).filter(|(_path, row)| row.result == Outcome::Passed);
    let working = has_passed.map(|(path, _row)| path).find(|path| drain::can_follow(path)).cloned();
    rows.extend(judged);
    rows.extend(not_tried);
    rows.extend(drain::rows(drain::Test { scene, interrupt }, &servers, working.as_ref()));
    Ok(rows)
}

/// Waits until all node ports are published. The returned rows name the node ports that were not published in time.
fn published(scene: &Scene<'_>, interrupt: &Interrupt) -> anyhow::Result<(Vec<Server>, Vec<Row>)> {
    let mut last = (Vec::new(), BTreeSet::new());
    interrupt.until(PUBLICATION, || {
        last = scene.servers()?;
        let (servers, families) = &last;
        let is_complete = |server: &Server| server.wanted(families).is_subset(&server.published());
        Ok(servers.iter().all(is_complete).then_some(()))
    })?;
    let (servers, families) = last;
    let waited = format!("{} s", PUBLICATION.as_secs());
    let rows = servers.iter().map(|server| publication(server, &server.wanted(&families), &waited)).collect();
    Ok((servers, rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_that_are_left_change_the_exit_code_of_a_healthy_cluster() {
        assert_eq!([true, false].map(|is_removed| exit_code(HealthVerdict::Healthy, is_removed)), [0, 2]);
        assert_eq!([true, false].map(|is_removed| exit_code(HealthVerdict::AtRisk, is_removed)), [1, 1]);
    }
}
