// SPDX-License-Identifier: Apache-2.0
//! Tests the life cycle of the cgroup programs: they outlive the agent, do not replace programs of other software, and
//! are removed completely.

use std::path::{Path, PathBuf};
use std::time::Duration;

use npl_agent::core::cleanup::{Removal, RemovalKind};
use npl_agent::core::model::Protocol as MappingProtocol;
use npl_agent::datapath::cleanup::remove_everything;
use npl_agent::datapath::inspect::Inspection;
use npl_agent::datapath::{CgroupSelection, ClientScope, Datapath, Pins};
use npl_common::names::SOCKET_PROGRAMS;
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::traffic::{Load, Request};

use super::scene::Scene;
use crate::lab::mapping;
use crate::links::programs::{pinned, rename_build};
use crate::world::{NODE_PORT, POD_PORT, load_rate, replacements, set_addresses};

/// Time limit for a few requests, long enough for an emulated processor.
const LIMIT: Duration = Duration::from_secs(20);

/// Waits until the host rejects connections to the first Pod's node port, because the kernel detaches unpinned programs
/// with a delay.
#[track_caller]
fn wait_until_refused(scene: &Scene) {
    let is_refused = || scene.ask(scene.world.node(), Protocol::Tcp, scene.world.frontend()).is_err().then_some(());
    poll::until("the detachment of the programs", LIMIT, is_refused).unwrap();
}

fn links(scene: &Scene) -> Vec<PathBuf> {
    let pins = Pins::new(scene.world.bpffs.path());
    let links = pins.socket_links().unwrap().into_iter();
    links.map(|(cgroup, hook)| pins.socket_link(cgroup, hook)).collect()
}

#[test]
fn local_clients_are_served_without_an_agent_and_by_the_next_one() {
    let mut scene = Scene::fresh(1);
    scene.world.datapath = None;
    scene.assert_answers(scene.world.node(), scene.world.frontend(), "web-0");
    let before = links(&scene);
    assert_eq!(before.len(), SOCKET_PROGRAMS.len());
    let programs = pinned(scene.world.bpffs.path());
    let mut next = scene.world.open();
    scene.serve(&mut next);
    drop(next);
    assert_eq!(links(&scene), before);
    assert_eq!(pinned(scene.world.bpffs.path()), programs, "the next agent must load no program again");
    scene.assert_answers(scene.world.node(), scene.world.frontend(), "web-0");
    let shown = Inspection::read(scene.world.bpffs.path()).unwrap().socket_hooks;
    assert_eq!(shown, SOCKET_PROGRAMS.iter().map(|program| program.hook).collect::<Vec<_>>());
}

#[test]
fn local_clients_lose_no_request_while_programs_are_replaced() {
    let mut scene = Scene::fresh(1);
    scene.world.datapath = None;
    let request = |protocol| Request {
        protocol,
        server: scene.world.frontend(),
        pod: scene.world.pod().name.clone(),
        client: scene.world.node_ip().into(),
    };
    let requests = vec![request(Protocol::Tcp), request(Protocol::Udp)];
    let load = scene.cgroup.run(|| Load::start(scene.world.node(), load_rate(), requests)).unwrap();
    for replacement in 1..=replacements() {
        rename_build(scene.world.bpffs.path());
        let mut next = scene.world.open();
        scene.serve(&mut next);
        // This call also removes programs that no device uses. It must not remove the programs of the cgroup.
        scene.world.attach(&mut next);
        let answered =
            || (load.report().total() >= 10 * replacement || !load.report().failures.is_empty()).then_some(());
        poll::until("ten more requests", LIMIT, answered).unwrap();
    }
    assert_eq!(load.stop().failures, []);
}

#[test]
fn programs_move_to_another_cgroup() {
    let scene = Scene::fresh(1);
    let other = scene.world.run.client_cgroup("others").unwrap();
    let selection = CgroupSelection::Directory(other.path().to_owned());
    let mut next = scene.world.open();
    let served = scene.world.node().run(|| next.serve_local_clients(&selection, ClientScope::All)).unwrap().unwrap();
    assert_eq!(served.unwrap().cgroup, other.path());
    wait_until_refused(&scene);
    assert_eq!(links(&scene).len(), SOCKET_PROGRAMS.len());
    let ask = || npl_testkit::traffic::request(scene.world.node(), Protocol::Tcp, scene.world.frontend(), "you?");
    assert_eq!(other.run(ask).unwrap().unwrap().pod, "web-0");
}

#[test]
fn recreated_cgroup_is_served_again() {
    let mut scene = Scene::fresh(1);
    let name = "anew";
    let old = scene.world.run.client_cgroup(name).unwrap();
    let selection = CgroupSelection::Directory(old.path().to_owned());
    let mut datapath = scene.world.datapath.take().unwrap();
    let node = scene.world.node();
    node.run(|| datapath.serve_local_clients(&selection, ClientScope::All)).unwrap().unwrap();
    drop(old);
    let new = scene.world.run.client_cgroup(name).unwrap();
    node.run(|| datapath.serve_local_clients(&selection, ClientScope::All)).unwrap().unwrap();
    let ask = || npl_testkit::traffic::request(node, Protocol::Udp, scene.world.frontend(), "you?");
    assert_eq!(new.run(ask).unwrap().unwrap().pod, "web-0");
}

#[test]
fn no_local_client_is_served_when_no_cgroup_is_selected() {
    let mut scene = Scene::fresh(1);
    let served = scene.world.datapath().serve_local_clients(&CgroupSelection::None, ClientScope::All).unwrap();
    assert_eq!(served, None);
    assert!(links(&scene).is_empty(), "{:?}", links(&scene));
    wait_until_refused(&scene);
}

#[test]
fn directory_outside_of_a_cgroup_hierarchy_is_refused() {
    let mut scene = Scene::unserved(1);
    let selection = CgroupSelection::Directory(Path::new("/proc/self").to_owned());
    let error = scene.world.datapath().serve_local_clients(&selection, ClientScope::All).unwrap_err().to_string();
    assert!(error.starts_with("/proc/self is not in a cgroup v2 hierarchy: ") && error.contains("--cgroup"), "{error}");
    scene.world.assert_answers();
}

#[test]
fn another_instance_on_the_same_cgroup_keeps_serving() {
    let scene = Scene::fresh(2);
    let bpffs = scene.world.run.bpffs("other").unwrap();
    let open = || Datapath::open(bpffs.path());
    let mut other_instance = scene.world.node().run(open).unwrap().unwrap();
    other_instance.configure("62000-62100".parse().unwrap(), || 1).unwrap();
    set_addresses(&mut other_instance, &scene.world.node_ips());
    let pod_ip = scene.world.pods[1].0.ip();
    for protocol in [MappingProtocol::Tcp, MappingProtocol::Udp] {
        let (frontend, backend) = mapping(protocol, 62_000, (pod_ip, POD_PORT).into(), 1);
        other_instance.upsert_mapping(frontend, backend).unwrap();
    }
    scene.serve(&mut other_instance);
    let server = |port| (scene.world.node_ip(), port).into();
    scene.assert_answers(scene.world.node(), server(62_000), "web-1");
    scene.assert_answers(scene.world.node(), server(NODE_PORT), "web-0");
    scene
        .world
        .node()
        .run(|| other_instance.serve_local_clients(&CgroupSelection::None, ClientScope::All))
        .unwrap()
        .unwrap();
    scene.assert_answers(scene.world.node(), server(NODE_PORT), "web-0");
}

#[test]
fn cleanup_removes_all_cgroup_programs() {
    let mut scene = Scene::fresh(1);
    scene.assert_answers(scene.world.node(), scene.world.frontend(), "web-0");
    scene.world.datapath = None;
    let (removed, errors) = scene.world.node().block_on(remove_everything(scene.world.bpffs.path())).unwrap();
    assert!(errors.is_empty(), "{errors:?}");
    for kind in [RemovalKind::CgroupLink, RemovalKind::Program] {
        let is_of_hook = |it: &&Removal| it.kind == kind && it.name.ends_with("connect4");
        assert_eq!(removed.iter().filter(is_of_hook).count(), 1, "{removed:?}");
    }
    wait_until_refused(&scene);
}
