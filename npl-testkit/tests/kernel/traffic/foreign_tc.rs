// SPDX-License-Identifier: Apache-2.0
//! Tests that packets do not bypass qdiscs, filters and programs of other software on devices. If a redirect would
//! bypass them, the kernel stack forwards the packets.

use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use aya::programs::TcAttachType;
use npl_agent::core::devices::plan::DevicePlan;
use npl_agent::core::devices::redirect::{Forwarding, HopKind, PodNextHop, ProgramSet};
use npl_agent::devices::apply::apply;
use npl_testkit::echo::Answer;
use npl_testkit::echo::pattern::Digest;
use npl_testkit::foreign::{BOTH, DROPS, ENDS_THE_CHAIN, Foreign, HANDS_ON, Place};
use npl_testkit::topology::Device;
use npl_testkit::{poll, traffic};

use super::redirect::{DROP_FORWARDED, redirected, redirected_over_a_bridge};
use crate::world::World;

/// A rate limit as the CNI's `bandwidth` plug-in sets it.
const RATE_LIMIT: &str = "qdisc add dev DEVICE root tbf rate 100mbit burst 256kb latency 400ms";
/// Counts packets that the kernel stack forwards, and those that it forwards to the Pod's server.
const COUNT_FORWARDED: &str = "
table inet npl_test {
  counter forwarded { }
  counter to_server { }
  chain forward {
    type filter hook forward priority filter; policy accept;
    counter name forwarded
    udp dport 8080 counter name to_server
  }
}";

/// Number of addresses of both Pods.
const ADDRESSES: usize = 4;

/// Time limit of waits: far above their usual duration, and above the interval after which an offloaded flow returns to
/// the kernel stack.
const LIMIT: Duration = Duration::from_secs(30);

fn tc(device: &Device, line: &str) {
    device.netns().tc(&line.replace("DEVICE", device.name())).unwrap();
}

/// Surveys the devices and attaches the programs for a forwarding mode. Returns the number of Pod addresses to which
/// packets are redirected.
#[track_caller]
fn redirected_after(world: &mut World, forwarding: Forwarding) -> usize {
    world.follow(forwarding);
    world.assert_answers();
    world.datapath().redirected().unwrap().len()
}

/// Asserts that packets to the first Pod are not redirected while the object that `put` creates exists, in redirect and
/// offload mode.
#[track_caller]
fn assert_not_redirected_while<T>(world: &mut World, put: impl Fn(&World) -> T, take: impl Fn(&World, T)) {
    world.node().set_liberal_tracking(true).unwrap();
    for forwarding in [Forwarding::Redirect, Forwarding::Offload] {
        let there = put(world);
        assert_eq!(
            redirected_after(world, forwarding),
            ADDRESSES / 2,
            "packets must be redirected only to the other Pod's two addresses"
        );
        take(world, there);
        assert_eq!(redirected_after(world, forwarding), ADDRESSES);
    }
    world.follow(Forwarding::Redirect);
    world.node().nft(DROP_FORWARDED).unwrap();
    world.assert_answers();
}

#[test]
fn rate_limit_of_a_pods_device_is_not_bypassed() {
    let mut world = redirected();
    let device = world.pod().host_device.clone();
    assert_not_redirected_while(
        &mut world,
        |_| tc(&device, RATE_LIMIT),
        |_, ()| tc(&device, "qdisc del dev DEVICE root"),
    );
}

#[test]
fn third_party_filters_on_a_pods_device_are_not_bypassed() {
    let mut world = redirected();
    let device = world.pod().host_device.clone();
    for direction in ["ingress", "egress"] {
        let line = format!("filter add dev DEVICE {direction} protocol all prio 7 u32 match u32 0 0 flowid 1:1");
        let put = |_: &World| {
            // An error means that the qdisc already exists, because NPL's programs are filters.
            drop(device.netns().tc(&format!("qdisc add dev {} clsact", device.name())));
            tc(&device, &line);
        };
        let delete = format!("filter del dev DEVICE {direction} protocol all prio 7 u32");
        assert_not_redirected_while(&mut world, put, |_, ()| tc(&device, &delete));
        world.node().nft("delete table inet npl_test").unwrap();
    }
}

#[test]
fn third_party_programs_on_a_pods_device_are_not_bypassed() {
    let mut world = redirected();
    let device = world.pod().host_device.clone();
    for hook in BOTH {
        for place in [Place::Ahead, Place::Behind] {
            let put = |world: &World| Foreign::attach(&world.run, "other", &device, HANDS_ON, place, &[hook]).unwrap();
            assert_not_redirected_while(&mut world, put, |_, program| drop(program));
            world.node().nft("delete table inet npl_test").unwrap();
        }
    }
}

/// Redirected requests traverse the egress hook and qdisc of a bridge, like the host's packets. Redirected replies
/// would bypass a program at the bridge's ingress hook, so the agent redirects no packets of Pods behind a bridge with
/// such a program.
#[test]
fn third_party_programs_on_a_bridge_are_not_bypassed() {
    let mut world = redirected_over_a_bridge();
    let bridge = world.topology.node_device("cni0");
    tc(&bridge, RATE_LIMIT);
    let egress = Foreign::attach(&world.run, "egress", &bridge, HANDS_ON, Place::Behind, &[TcAttachType::Egress]);
    assert_eq!(redirected_after(&mut world, Forwarding::Redirect), ADDRESSES);
    let mut egress = egress.unwrap();
    egress.change(DROPS).unwrap();
    assert!(traffic::tcp_connect(world.client(), world.frontend()).is_err(), "the program must drop requests");
    egress.change(HANDS_ON).unwrap();
    let ingress =
        Foreign::attach(&world.run, "ingress", &bridge, ENDS_THE_CHAIN, Place::Behind, &[TcAttachType::Ingress]);
    assert_eq!(redirected_after(&mut world, Forwarding::Redirect), 0);
    drop(ingress.unwrap());
    assert_eq!(redirected_after(&mut world, Forwarding::Redirect), ADDRESSES);
}

/// A redirected reply traverses the uplink's qdisc and egress programs, like a packet of the host. Redirected requests
/// would bypass a program that runs after NPL's at the uplink's ingress hook, so the agent redirects no packets while
/// such a program is attached.
#[test]
fn third_party_programs_after_npls_on_an_uplink_are_not_bypassed() {
    let mut world = redirected();
    let uplink = world.topology.client().uplink.clone();
    tc(&uplink, RATE_LIMIT);
    let _egress = Foreign::attach(&world.run, "egress", &uplink, HANDS_ON, Place::Behind, &[TcAttachType::Egress]);
    let before = Foreign::attach(&world.run, "before", &uplink, HANDS_ON, Place::Ahead, &[TcAttachType::Ingress]);
    assert_eq!(redirected_after(&mut world, Forwarding::Redirect), ADDRESSES);
    drop(before.unwrap());
    let after = Foreign::attach(&world.run, "after", &uplink, ENDS_THE_CHAIN, Place::Behind, &[TcAttachType::Ingress]);
    assert_eq!(redirected_after(&mut world, Forwarding::Redirect), 0);
    drop(after.unwrap());
    assert_eq!(redirected_after(&mut world, Forwarding::Redirect), ADDRESSES);
    world.node().nft(DROP_FORWARDED).unwrap();
    world.assert_answers();
}

/// Sends a question with a number, so that a late answer to an earlier question does not count.
fn send(socket: &UdpSocket) -> Vec<u8> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let question = format!("still connected, {}?", NUMBER.fetch_add(1, Ordering::Relaxed)).into_bytes();
    assert_eq!(socket.send(&question).unwrap(), question.len());
    question
}

/// Whether a datagram is answered within a time limit that is long enough for a slow machine.
fn is_answered(socket: &UdpSocket) -> bool {
    traffic::udp_receive(socket, &send(socket), poll::extended(LIMIT)).unwrap().is_some()
}

/// Sends a question, and returns whether the stack forwards it to the Pod's server. A question that bypasses the stack
/// is answered instead.
fn is_forwarded(world: &World, socket: &UdpSocket) -> bool {
    let to_server = || world.node().packets_counted("inet npl_test to_server").unwrap();
    let (before, question) = (to_server(), send(socket));
    // The stack forwards a question before the Pod answers, so the count is read after each look for an answer.
    let outcome = || {
        let is_answered = traffic::udp_receive(socket, &question, Duration::from_millis(1)).unwrap().is_some();
        let is_forwarded = to_server() > before;
        (is_answered || is_forwarded).then_some(is_forwarded)
    };
    poll::until("a question to be answered or forwarded", LIMIT, outcome).unwrap().0
}

/// Asserts that no answer to an earlier question arrives before the answer to a new one.
#[track_caller]
fn assert_next_answer_is_to_a_new_question(socket: &UdpSocket) {
    let digest = Digest::of(&send(socket)).to_string();
    let mut buffer = [0; 512];
    socket.set_read_timeout(Some(poll::extended(LIMIT))).unwrap();
    let length = poll::uninterrupted(|| socket.recv(&mut buffer)).unwrap();
    let answer: Answer = serde_json::from_slice(&buffer[..length]).unwrap();
    assert_eq!(answer.digest, digest, "an earlier question has bypassed the program");
}

/// NPL's program is the last one at the egress hook of a Pod's device. If a third-party program drops a packet there,
/// NPL's program does not run, and the packet does not count as forwarded by the stack.
///
/// The agent would not redirect to such a Pod. The test covers the time until the agent has listed the device.
#[test]
fn packet_that_a_third_party_program_drops_is_no_stack_observation() {
    let mut world = World::new(1);
    world.node().set_liberal_tracking(true).unwrap();
    let (device, uplink) = (world.pod().host_device.clone(), world.topology.client().uplink.clone());
    let mut program =
        Foreign::attach(&world.run, "policy", &device, HANDS_ON, Place::Behind, &[TcAttachType::Egress]).unwrap();
    let (ifindex, pod_ips) = (device.ifindex().unwrap(), world.pod().ips());
    let hop = PodNextHop { ifindex, kind: HopKind::Peer, mtu: 1500 };
    let programs = [(uplink.ifindex().unwrap(), ProgramSet::OffloadUplink), (ifindex, ProgramSet::OffloadPods)];
    let plan = DevicePlan {
        programs: BTreeMap::from(programs),
        next_hops: pod_ips.into_iter().map(|pod_ip| (pod_ip, hop)).collect(),
        ..DevicePlan::default()
    };
    let devices = world.devices();
    let mut datapath = world.datapath.take().unwrap();
    let attached = datapath.hooks.attached_hooks().unwrap();
    let errors = world.node().run(|| apply(&mut datapath, &devices, &attached, &plan)).unwrap().errors;
    assert!(errors.is_empty(), "{errors:?}");
    world.datapath = Some(datapath);

    let socket = traffic::udp_socket(world.client(), world.frontend(), true).unwrap();
    world.node().nft(COUNT_FORWARDED).unwrap();
    let forwarded = || world.node().packets_counted("inet npl_test forwarded").unwrap();
    // Several questions follow each other without a read of the counter: on a slow machine, the read takes longer than
    // a stack observation is valid. Without offload, the stack forwards two packets for each question; with offload of
    // one direction only, at least one.
    let is_offloaded = || {
        let before = forwarded();
        (0..5).for_each(|_| assert!(is_answered(&socket)));
        (forwarded() - before < 5).then_some(())
    };
    poll::until("an offloaded flow", LIMIT, is_offloaded).unwrap();
    program.change(DROPS).unwrap();
    poll::until("the end of the offloaded flow", LIMIT, || is_forwarded(&world, &socket).then_some(())).unwrap();
    for question in 0..5 {
        assert!(is_forwarded(&world, &socket), "question {question} has bypassed the program");
    }
    // The program has dropped the forwarded questions. Otherwise, their answers would arrive before the answer to the
    // next question.
    program.change(HANDS_ON).unwrap();
    assert_next_answer_is_to_a_new_question(&socket);
}
