// SPDX-License-Identifier: Apache-2.0
//! Tests the replacement of the cluster's CA. The agent uses the service account of its Pod, as in a cluster.

use std::fs;
use std::time::Duration;

use npl_testkit::agent::{Agent, Options};
use npl_testkit::cluster::Cluster;
use npl_testkit::control_plane::SERVICE_ACCOUNT;

use crate::world::{NAMESPACE, World};

/// Creates a new client for the test itself, because the API server has a new certificate.
fn reconnect(world: &mut World) {
    world.cluster = Cluster::new(&world.plane).unwrap();
    world.annotations = world.cluster.watch_mappings(NAMESPACE, Duration::from_mins(10)).unwrap();
}

#[test]
fn a_rotated_ca_is_trusted_without_a_restart_of_the_agent() {
    let mut world = World::with_own_plane().through_proxy();
    let var_run = world.run.file("var-run");
    let mut account = world.plane.agent_service_account(&var_run).unwrap();
    account.server.set_port(world.proxy().port());
    world.agent = Some(Agent::start(Options { service_account: Some(account), ..world.agent_options(&[]) }).unwrap());
    world.serve(&["web-0"]);
    let authority = var_run.join(SERVICE_ACCOUNT).join("ca.crt");
    let old = fs::read(&authority).unwrap();

    world.own_plane().replace_certificate().unwrap();
    let new = fs::read(world.plane.certificate()).unwrap();
    assert_ne!(old, new);
    fs::write(&authority, [old, new.clone()].concat()).unwrap();
    reconnect(&mut world);
    world.create_pod("web-1");
    world.assert_served("web-1");

    fs::write(&authority, new).unwrap();
    // After all connections are closed, the agent connects again, and must verify the API server's certificate with the
    // new CA.
    world.proxy().cut();
    world.create_pod("web-2");
    world.assert_served("web-2");
    assert!(world.agent().process().exit_status().is_none(), "the agent has exited");
}
