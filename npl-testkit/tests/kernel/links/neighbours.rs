// SPDX-License-Identifier: Apache-2.0
//! Programs of others on the same hooks see every packet, before us or after us.

use std::net::Ipv4Addr;

use aya::programs::TcAttachType;
use aya::programs::tc::{self, NlOptions, TcAttachOptions};
use npl_agent::datapath::Datapath;
use npl_common::names::PROG_INGRESS;
use npl_common::reason::Reason;
use npl_testkit::mounts::BpfFs;
use npl_testkit::topology::Options;

use crate::world::{World, set_addresses};

/// Somebody else's program: our own, over maps of its own that hold no mapping, so that it counts what comes to
/// `address` within `ports` and passes it on.
pub(super) struct Neighbour {
    pub(super) datapath: Datapath,
    _bpffs: BpfFs,
}

impl Neighbour {
    fn attach(world: &World, address: Ipv4Addr, ports: &str) -> Self {
        let mut neighbour = Self::load(world, address, ports);
        world.attach(&mut neighbour.datapath);
        neighbour
    }

    pub(super) fn load(world: &World, address: Ipv4Addr, ports: &str) -> Self {
        let bpffs = world.run.bpffs("neighbour").unwrap();
        let mut datapath = world.node().run(|| Datapath::open(bpffs.path())).unwrap().unwrap();
        datapath.configure(ports.parse().unwrap(), || 1).unwrap();
        set_addresses(&mut datapath, &[address.into()]);
        Self { datapath, _bpffs: bpffs }
    }

    fn seen(&self) -> u64 {
        let reasons = self.datapath.tables.reasons().unwrap();
        reasons.iter().filter(|(reason, _)| *reason == Reason::NoMapping).map(|(_, count)| count).sum()
    }
}

#[test]
fn program_ahead_of_ours_sees_requests_as_the_client_sent_them() {
    let world = World::new(1);
    if world.datapath.as_ref().unwrap().hooks.mechanism() != "tcx" {
        // Filters of one priority and handle are one filter: before 6.6 two of us cannot be on one device.
        return;
    }
    let neighbour = Neighbour::attach(&world, world.node_ip(), "61000-61100");
    world.assert_answers();
    assert!(neighbour.seen() >= 2, "a SYN and a datagram at least: {}", neighbour.seen());
}

#[test]
fn program_behind_ours_sees_requests_as_the_pod_gets_them() {
    let mut world = World::bare(1, Options::default());
    let neighbour = Neighbour::attach(&world, world.pod().ip(), "8000-8100");
    if neighbour.datapath.hooks.mechanism() != "tcx" {
        // As above.
        return;
    }
    world.install();
    world.assert_answers();
    assert!(neighbour.seen() >= 2, "a SYN and a datagram at least: {}", neighbour.seen());
}

#[test]
fn filter_behind_ours_sees_requests_as_the_pod_gets_them() {
    let world = World::new(1);
    let mut neighbour = Neighbour::load(&world, world.pod().ip(), "8000-8100");
    let program = neighbour.datapath.hooks.load_program(PROG_INGRESS).unwrap();
    let options = NlOptions { priority: 10, ..NlOptions::default() };
    let attach = || {
        // Where we are filters ourselves, the qdisc is there already.
        drop(tc::qdisc_add_clsact("eth0"));
        program.attach_with_options("eth0", TcAttachType::Ingress, TcAttachOptions::Netlink(options)).unwrap()
    };
    world.node().run(attach).unwrap();
    world.assert_answers();
    assert!(neighbour.seen() >= 2, "a SYN and a datagram at least: {}", neighbour.seen());
}
