// SPDX-License-Identifier: Apache-2.0
//! Tests changes of NPL's kernel objects by other software while clients use the node ports: the agent notices each
//! change, restores the object, and counts and logs the repair once. Programs of other software stay.

mod cases;
pub(crate) mod maps;
mod scene;

use std::fs;

use nix::sys::signal::Signal;
use npl_common::names;
use npl_testkit::echo::Protocol;
use npl_testkit::topology::{MASQUERADE, Offload};
use npl_testkit::{poll, traffic};

use self::cases::{LINKS_AND_PINS, MAPS, NEXT_HOPS, NFT, NOT_REPAIRED, XDP};
use self::maps::replace_by_map;
use self::scene::{Case, PODS, Scene};
use crate::redirect::wait_for_redirected_pods;
use crate::world::{LIMIT, World};

fn verify(mut scene: Scene, cases: &[Case]) {
    for case in cases {
        scene.verify(case);
    }
    scene.end();
}

#[test]
fn foreign_changes_of_links_and_pins_are_repaired_counted_and_logged_once() {
    verify(Scene::new(&[]), LINKS_AND_PINS);
}

#[test]
fn foreign_changes_of_map_entries_are_repaired_counted_and_logged_once() {
    verify(Scene::new(&[]), MAPS);
}

#[test]
fn foreign_changes_of_the_nftables_table_are_repaired_counted_and_logged_once() {
    let mut scene = Scene::new(&[]);
    scene.world.topology.node().nft(MASQUERADE).unwrap();
    scene.world.wait_for_log("exempts replies of mapped endpoints from masquerading");
    verify(scene, NFT);
}

#[test]
fn foreign_changes_of_the_xdp_link_are_repaired_counted_and_logged_once() {
    let scene = Scene::with_client_offload(&["--attach", "xdp"]);
    verify(scene, XDP);
}

#[test]
fn foreign_changes_of_next_hops_are_repaired_counted_and_logged_once() {
    // Redirect is refused on an uplink with a program of other software behind NPL's.
    let mut scene = Scene::without_foreign_program(&["--forwarding", "redirect"]);
    wait_for_redirected_pods(&scene.world, PODS.len());
    for case in NEXT_HOPS {
        scene.verify(case);
        wait_for_redirected_pods(&scene.world, PODS.len());
    }
    scene.end();
}

/// Changes of the Node's network that the agent follows are no repairs.
#[test]
fn foreign_changes_of_addresses_and_devices_are_followed_without_a_repair() {
    verify(Scene::new(&[]), NOT_REPAIRED);
}

/// If another map is pinned in place of NPL's, the agent cannot know whether another agent pinned that map. The agent
/// exits, and the next agent replaces the map.
#[test]
fn foreign_map_in_place_of_a_pinned_map_is_replaced_by_the_next_agent() {
    let mut world = World::with_agent(&["--resync", "1s"]);
    world.serve(&["web-0"]);
    let port = world.address("web-0", Protocol::Tcp);
    let pin = world.pins().join(names::MAP_MAPPING_V4);
    replace_by_map(&world, &pin);
    let agent = world.agent();
    let status = poll::until("the agent to exit", LIMIT, || agent.process().exit_status()).unwrap();
    assert_eq!(status.0.code(), Some(1));
    let log = world.agent_log();
    assert!(log.contains("was removed or replaced while this agent was running"), "{log}");
    // Without an agent, the attached programs still use NPL's own map.
    world.assert_answers(Protocol::Tcp, port, "web-0");
    world.agent().restart().unwrap();
    world.wait_for_kernel_mappings(2);
    world.assert_answers(Protocol::Tcp, port, "web-0");
}

/// An object of another type at the path of a link is replaced; a directory with content cannot be replaced, and is
/// reported until it is removed.
#[test]
fn foreign_directory_in_place_of_a_link_is_reported_until_it_is_removed() {
    let mut world = World::with_agent(&["--resync", "1s"]);
    world.serve(&["web-0"]);
    let ifindex = world.topology.client().uplink.ifindex().unwrap();
    let link = world.pins().join(names::LINK_DIR).join(format!("{ifindex}_in"));
    // The agent is stopped, because it may otherwise attach the program again before the directory exists.
    world.agent().signal(Signal::SIGSTOP).unwrap();
    fs::remove_file(&link).unwrap();
    fs::create_dir_all(link.join("content")).unwrap();
    world.agent().signal(Signal::SIGCONT).unwrap();
    world.wait_for_metric(r#"npl_devices{state="failed"} 1"#);
    world.wait_for_log("programs cannot be attached to a device");
    assert_eq!(world.agent_log().matches("programs cannot be attached to a device").count(), 1);
    fs::remove_dir(link.join("content")).unwrap();
    fs::remove_dir(&link).unwrap();
    world.wait_for_metric(r#"npl_devices{state="failed"} 0"#);
    world.wait_for_metric(r#"npl_repairs_total{object="tcx_link"} 1"#);
    let (client, server) = (world.topology.client().netns.clone(), world.address("web-0", Protocol::Tcp));
    poll::until("an answer", LIMIT, || traffic::tcp_request(&client, server, "who?").ok()).unwrap();
}

impl Scene {
    /// Creates a scene as [`Self::new`] does, with a client that computes complete checksums, as XDP requires.
    fn with_client_offload(flags: &[&str]) -> Self {
        Self::prepared(flags, true, |world| {
            world.topology.client().device.set_offloads(&[Offload::TxChecksum], false).unwrap();
        })
    }

    fn without_foreign_program(flags: &[&str]) -> Self {
        Self::prepared(flags, false, |_world| {})
    }
}
