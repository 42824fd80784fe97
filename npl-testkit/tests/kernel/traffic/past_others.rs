// SPDX-License-Identifier: Apache-2.0
//! What others have on devices is not passed by: packets take the host's stack there, and meet it.

use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::time::Duration;

use aya::programs::TcAttachType;
use npl_agent::core::devices::plan::DevicePlan;
use npl_agent::core::devices::redirect::{Forwarding, HopKind, PodNextHop, ProgramSet};
use npl_agent::devices::apply::apply;
use npl_testkit::foreign::{BOTH, DROPS, ENDS_THE_CHAIN, Foreign, HANDS_ON, Place};
use npl_testkit::topology::Device;
use npl_testkit::{poll, traffic};

use super::redirect::{NOTHING_IS_FORWARDED, redirected, redirected_over_a_bridge};
use crate::world::World;

/// As a CNI's `bandwidth` plug-in does it.
const LIMIT_OF_RATE: &str = "qdisc add dev DEVICE root tbf rate 100mbit burst 256kb latency 400ms";
/// Packets that take the host's stack from one device to another.
const FORWARDED_IS_COUNTED: &str = "
table inet npl_test {
  counter forwarded { }
  chain forward {
    type filter hook forward priority filter; policy accept;
    counter name forwarded
  }
}";

/// The addresses of both Pods.
const TWO_PODS: usize = 4;

/// Far longer than a moment of offload, and than the kernel needs.
const LIMIT: Duration = Duration::from_secs(30);
/// Longer than an answer takes.
const SOON: Duration = Duration::from_millis(500);

fn tc(device: &Device, line: &str) {
    device.netns().tc(&line.replace("DEVICE", device.name())).unwrap();
}

/// Follows, and counts the addresses that packets are redirected to.
#[track_caller]
fn redirected_after(world: &mut World, forwarding: Forwarding) -> usize {
    world.follow(forwarding);
    world.assert_answers();
    world.datapath().redirected().unwrap().len()
}

/// The first Pod is refused while `put` is there, in both ways of passing by the stack, and no longer.
#[track_caller]
fn assert_refused_while<T>(world: &mut World, put: impl Fn(&World) -> T, take: impl Fn(&World, T)) {
    world.node().set_liberal_tracking(true).unwrap();
    for forwarding in [Forwarding::Redirect, Forwarding::Offload] {
        let there = put(world);
        assert_eq!(redirected_after(world, forwarding), TWO_PODS / 2, "the other Pod's two addresses");
        take(world, there);
        assert_eq!(redirected_after(world, forwarding), TWO_PODS);
    }
    world.follow(Forwarding::Redirect);
    world.node().nft(NOTHING_IS_FORWARDED).unwrap();
    world.assert_answers();
}

#[test]
fn a_limit_of_a_pods_device_is_not_passed_by() {
    let mut world = redirected();
    let device = world.pod().host_device.clone();
    assert_refused_while(&mut world, |_| tc(&device, LIMIT_OF_RATE), |_, ()| tc(&device, "qdisc del dev DEVICE root"));
}

#[test]
fn filters_of_others_on_a_pods_device_are_not_passed_by() {
    let mut world = redirected();
    let device = world.pod().host_device.clone();
    for side in ["ingress", "egress"] {
        let line = format!("filter add dev DEVICE {side} protocol all prio 7 u32 match u32 0 0 flowid 1:1");
        let put = |_: &World| {
            // Where ours are filters, it is there already.
            drop(device.netns().tc(&format!("qdisc add dev {} clsact", device.name())));
            tc(&device, &line);
        };
        let forget = format!("filter del dev DEVICE {side} protocol all prio 7 u32");
        assert_refused_while(&mut world, put, |_, ()| tc(&device, &forget));
        world.node().nft("delete table inet npl_test").unwrap();
    }
}

#[test]
fn programs_of_others_on_a_pods_device_are_not_passed_by() {
    let mut world = redirected();
    let device = world.pod().host_device.clone();
    for hook in BOTH {
        for place in [Place::Ahead, Place::Behind] {
            let put = |world: &World| Foreign::attach(&world.run, "other", &device, HANDS_ON, place, &[hook]).unwrap();
            assert_refused_while(&mut world, put, |_, program| drop(program));
            world.node().nft("delete table inet npl_test").unwrap();
        }
    }
}

/// Requests leave a bridge as the host's do, and meet all that is there; replies leave it where they come in.
#[test]
fn what_others_have_on_a_bridge_is_met_but_for_replies_behind_ours() {
    let mut world = redirected_over_a_bridge();
    let bridge = world.topology.node_device("cni0");
    tc(&bridge, LIMIT_OF_RATE);
    let egress = Foreign::attach(&world.run, "egress", &bridge, HANDS_ON, Place::Behind, &[TcAttachType::Egress]);
    assert_eq!(redirected_after(&mut world, Forwarding::Redirect), TWO_PODS);
    let mut egress = egress.unwrap();
    egress.change(DROPS).unwrap();
    assert!(traffic::tcp_connect(world.client(), world.frontend()).is_err(), "requests meet it");
    egress.change(HANDS_ON).unwrap();
    let ingress =
        Foreign::attach(&world.run, "ingress", &bridge, ENDS_THE_CHAIN, Place::Behind, &[TcAttachType::Ingress]);
    assert_eq!(redirected_after(&mut world, Forwarding::Redirect), 0);
    drop(ingress.unwrap());
    assert_eq!(redirected_after(&mut world, Forwarding::Redirect), TWO_PODS);
}

/// Replies leave an uplink as the host's do, and meet all that is there.
#[test]
fn what_others_have_behind_ours_on_an_uplink_is_not_passed_by() {
    let mut world = redirected();
    let uplink = world.topology.client().uplink.clone();
    tc(&uplink, LIMIT_OF_RATE);
    let _egress = Foreign::attach(&world.run, "egress", &uplink, HANDS_ON, Place::Behind, &[TcAttachType::Egress]);
    let ahead = Foreign::attach(&world.run, "ahead", &uplink, HANDS_ON, Place::Ahead, &[TcAttachType::Ingress]);
    assert_eq!(redirected_after(&mut world, Forwarding::Redirect), TWO_PODS);
    drop(ahead.unwrap());
    let behind =
        Foreign::attach(&world.run, "behind", &uplink, ENDS_THE_CHAIN, Place::Behind, &[TcAttachType::Ingress]);
    assert_eq!(redirected_after(&mut world, Forwarding::Redirect), 0);
    drop(behind.unwrap());
    assert_eq!(redirected_after(&mut world, Forwarding::Redirect), TWO_PODS);
    world.node().nft(NOTHING_IS_FORWARDED).unwrap();
    world.assert_answers();
}

/// Whether a datagram is answered soon.
fn is_reply_translated(socket: &UdpSocket) -> bool {
    let question = b"still there?";
    socket.send(question).is_ok() && traffic::udp_receive(socket, question, SOON).unwrap().is_some()
}

/// Our program looks last at what leaves for Pods: what others drop there was not let through.
///
/// The agent would refuse the Pod for their program; this is what holds until it has looked.
#[test]
fn what_others_drop_on_a_pods_device_is_not_taken_as_let_through() {
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
    let errors = world.node().run(|| apply(&mut datapath, &devices, &plan)).unwrap().errors;
    assert!(errors.is_empty(), "{errors:?}");
    world.datapath = Some(datapath);

    let socket = traffic::udp_socket(world.client(), world.frontend(), true).unwrap();
    world.node().nft(FORWARDED_IS_COUNTED).unwrap();
    let forwarded = || world.node().packets_counted("inet npl_test forwarded").unwrap();
    let is_offloaded = || {
        let before = forwarded();
        assert!(is_reply_translated(&socket));
        (forwarded() == before).then_some(())
    };
    poll::until("the flow past the stack", LIMIT, is_offloaded).unwrap();
    program.change(DROPS).unwrap();
    poll::until("the end of the flow", LIMIT, || (!is_reply_translated(&socket)).then_some(())).unwrap();
    for question in 0..5 {
        assert!(!is_reply_translated(&socket), "question {question} has passed it by");
    }
    program.change(HANDS_ON).unwrap();
    assert!(is_reply_translated(&socket));
}
