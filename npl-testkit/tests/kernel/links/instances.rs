// SPDX-License-Identifier: Apache-2.0
//! Tests two NPL instances on one uplink, each with its own pins, port range and mapping. A lock prevents two agents in
//! one network namespace; these tests show how the kernel programs behave without the lock.

use std::net::SocketAddr;
use std::time::Duration;

use npl_agent::core::model::Protocol;
use npl_agent::datapath::Datapath;
use npl_agent::datapath::cleanup::remove_everything;
use npl_testkit::echo::EchoServer;
use npl_testkit::mounts::BpfFs;
use npl_testkit::poll;
use npl_testkit::traffic::{UdpOptions, tcp_connect, tcp_request, udp_request};

use crate::lab::{SEED, mapping};
use crate::world::{NODE_PORT, POD_PORT, World, set_addresses};

/// A node port of the second instance.
const OTHER_NODE_PORT: u16 = 62_000;

/// Time limit for the kernel to detach a program, far above the usual duration.
const LIMIT: Duration = Duration::from_secs(10);

/// A second datapath on the same uplink, with its own Pod.
struct Second {
    datapath: Datapath,
    _server: EchoServer,
    bpffs: BpfFs,
}

fn add_instance(world: &mut World) -> Second {
    let pod = world.topology.add_pod(&world.run, "other").unwrap();
    let server = EchoServer::start_in(&pod.netns, &pod.name, &[POD_PORT]).unwrap();
    let bpffs = world.run.bpffs("second").unwrap();
    let mut datapath = world.node().run(|| Datapath::open(bpffs.path())).unwrap().unwrap();
    datapath.configure("62000-62100".parse().unwrap(), || SEED).unwrap();
    set_addresses(&mut datapath, &world.node_ips());
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        for pod_ip in pod.ips() {
            let (frontend, backend) = mapping(protocol, OTHER_NODE_PORT, (pod_ip, POD_PORT).into(), 1);
            datapath.upsert_mapping(frontend, backend).unwrap();
        }
    }
    world.attach(&mut datapath);
    Second { datapath, _server: server, bpffs }
}

/// Asserts that a Pod answers at a node port over TCP and UDP in both families, and sees the client's address.
#[track_caller]
fn assert_serves(world: &World, node_port: u16, pod: &str) {
    for (node_ip, client_ip) in world.node_ips().into_iter().zip(world.client_ips()) {
        let server = (node_ip, node_port).into();
        let tcp = tcp_request(world.client(), server, "who are you?").unwrap();
        assert_eq!((tcp.pod.as_str(), tcp.client.ip()), (pod, client_ip));
        let udp = udp_request(world.client(), server, b"and you?", UdpOptions::default()).unwrap().answer;
        assert_eq!((udp.pod.as_str(), udp.client.ip()), (pod, client_ip));
    }
}

/// Removes all pins of one instance, as `npl-agent cleanup` does.
#[track_caller]
fn clean_up(world: &World, bpffs: &BpfFs, node_port: u16) {
    let (removed, errors) = world.node().block_on(remove_everything(bpffs.path())).unwrap();
    assert!(errors.is_empty() && !removed.is_empty(), "{errors:?} {removed:?}");
    let server: SocketAddr = (world.node_ip(), node_port).into();
    let is_refused = || tcp_connect(world.client(), server).is_err().then_some(());
    poll::until("the detachment of the programs", LIMIT, is_refused).unwrap();
}

#[test]
fn two_instances_on_one_uplink_serve_and_survive_each_others_cleanup() {
    for first_is_removed in [false, true] {
        let mut world = World::fresh(1);
        let second = add_instance(&mut world);
        assert_serves(&world, OTHER_NODE_PORT, "other");
        if second.datapath.hooks.mechanism() != "tcx" {
            // Before Linux 6.6, both instances' programs are filters with the same priority and handle, so the later
            // instance replaces the earlier one, which then serves no client.
            tcp_connect(world.client(), world.frontend()).unwrap_err();
            return;
        }
        assert_serves(&world, NODE_PORT, "web-0");
        let Second { datapath, _server, bpffs } = second;
        if first_is_removed {
            world.datapath = None;
            clean_up(&world, &world.bpffs, NODE_PORT);
            assert_serves(&world, OTHER_NODE_PORT, "other");
        } else {
            drop(datapath);
            clean_up(&world, &bpffs, OTHER_NODE_PORT);
            assert_serves(&world, NODE_PORT, "web-0");
        }
    }
}
