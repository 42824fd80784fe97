// SPDX-License-Identifier: Apache-2.0
//! `kubectl npl test`: tries every path to node ports with echo Pods, and removes the Pods again.

mod clients;
mod drain;
mod interrupt;
mod report;
mod scene;
mod site;

use std::{collections::BTreeSet, process::ExitCode};

use self::{
    interrupt::Interrupt,
    report::Report,
    scene::{PUBLICATION, Scene},
};
use super::Kubectl;
use crate::{
    cli::note,
    config::kubectl_args::TestArgs,
    core::path_test::{Outcome, PathFacts, Row, Server, judge, plan, publication},
};

/// Prints the result of every path. The exit code is 1 if a path fails, else 2 if a result is unknown.
pub(super) fn run(kubectl: Kubectl<'_>, args: &TestArgs) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::watch()?;
    scene::name_leftovers(kubectl)?;
    let sites = site::choose(kubectl, args)?;
    let names: Vec<&str> = sites.iter().map(|site| site.node.as_str()).collect();
    note(&format!("testing the paths to {}", names.join(" and ")));
    let scene = Scene::create(kubectl, &sites, args.image.as_deref())?;
    let rows = all_rows(kubectl, &scene, &interrupt)?;
    let report = Report::new(kubectl, &sites, rows);
    report.print(args.output)?;
    note(&format!("removing Namespace {}", scene.namespace));
    drop(scene);
    Ok(ExitCode::from(report.verdict().exit_code()))
}

fn all_rows(kubectl: Kubectl<'_>, scene: &Scene<'_>, interrupt: &Interrupt) -> anyhow::Result<Vec<Row>> {
    scene.wait_for_pods(interrupt)?;
    let (servers, mut rows) = published(scene, interrupt)?;
    let (paths, not_tried) = plan(&servers);
    let observed = clients::observe(kubectl, scene, &paths);
    interrupt.check()?;
    let unreachable = clients::unreachable(&paths, &observed);
    let facts = PathFacts { servers: &servers, unreachable: &unreachable };
    let judged: Vec<Row> = paths.iter().zip(&observed).map(|(path, it)| judge(facts, path, it)).collect();
    let has_passed = paths.iter().zip(&judged).filter(|(_path, row)| row.result == Outcome::Passed);
    let working = has_passed.map(|(path, _row)| path).find(|path| drain::can_follow(path)).cloned();
    rows.extend(judged);
    rows.extend(not_tried);
    rows.extend(drain::rows(kubectl, scene, interrupt, working.as_ref())?);
    Ok(rows)
}

/// Waits until all node ports are published; the rows name those that are not.
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
