// SPDX-License-Identifier: Apache-2.0
//! Tests that other programs on the same hooks process every packet, before or after NPL's programs.

use std::net::Ipv4Addr;

use aya::programs::TcAttachType;
use aya::programs::tc::{self, NlOptions, TcAttachOptions};
use npl_agent::datapath::Datapath;
use npl_common::names::PROG_INGRESS;
use npl_common::reason::Reason;
use npl_testkit::mounts::BpfFs;
use npl_testkit::topology::Options;

use crate::world::{World, set_addresses};

/// Another program on a hook: NPL's own program with maps that contain no mapping. This program counts packets to
/// `address` and a port in `ports` as `no_mapping`, and passes them.
pub(super) struct OtherProgram {
    pub(super) datapath: Datapath,
    _bpffs: BpfFs,
}

impl OtherProgram {
    fn attach(world: &World, address: Ipv4Addr, ports: &str) -> Self {
        let mut other = Self::load(world, address, ports);
        world.attach(&mut other.datapath);
        other
    }

    pub(super) fn load(world: &World, address: Ipv4Addr, ports: &str) -> Self {
        let bpffs = world.run.bpffs("other").unwrap();
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
fn program_before_npls_sees_untranslated_requests() {
    let world = World::new(1);
    if world.datapath.as_ref().unwrap().hooks.mechanism() != "tcx" {
        // The test needs TCX: before Linux 6.6, both programs are filters with the same priority and handle, so one
        // would replace the other.
        return;
    }
    let other = OtherProgram::attach(&world, world.node_ip(), "61000-61100");
    world.assert_answers();
    assert!(other.seen() >= 2, "a SYN and a datagram must be counted: {}", other.seen());
}

#[test]
fn program_after_npls_sees_translated_requests() {
    let mut world = World::bare(1, Options::default());
    let other = OtherProgram::attach(&world, world.pod().ip(), "8000-8100");
    if other.datapath.hooks.mechanism() != "tcx" {
        // The test needs TCX: before Linux 6.6, both programs are filters with the same priority and handle, so one
        // would replace the other.
        return;
    }
    world.install();
    world.assert_answers();
    assert!(other.seen() >= 2, "a SYN and a datagram must be counted: {}", other.seen());
}

#[test]
fn filter_after_npls_sees_translated_requests() {
    let world = World::new(1);
    let mut other = OtherProgram::load(&world, world.pod().ip(), "8000-8100");
    let program = other.datapath.hooks.load_program(PROG_INGRESS).unwrap();
    let options = NlOptions { priority: 10, ..NlOptions::default() };
    let attach = || {
        // An error means that the qdisc already exists, because NPL's programs are filters.
        drop(tc::qdisc_add_clsact("eth0"));
        program.attach_with_options("eth0", TcAttachType::Ingress, TcAttachOptions::Netlink(options)).unwrap()
    };
    world.node().run(attach).unwrap();
    world.assert_answers();
    assert!(other.seen() >= 2, "a SYN and a datagram must be counted: {}", other.seen());
}
