// SPDX-License-Identifier: Apache-2.0
//! Tests properties that hold after every step of a device plan, for any programs that were attached before and for any
//! steps that fail.

use std::collections::{BTreeMap, BTreeSet};

use npl_common::names::{PROG_EGRESS_L3, PROG_INGRESS_L3, PROG_PODS_OFFLOAD, PROG_PODS_REDIRECT};
use proptest::{prelude::*, sample::select};

use super::{AttachedHooks, DevicePlan, DeviceStep};
use crate::core::devices::{
    Device, DeviceKind, Direction, LinkLayer,
    redirect::{HopKind, PodNextHop, ProgramSet},
};

const DEVICES: std::ops::Range<u32> = 2..6;

fn device(ifindex: u32, link_layer: LinkLayer) -> Device {
    Device { link_layer, ..Device::new(ifindex, &format!("dev{ifindex}"), DeviceKind::Physical) }
}

fn devices() -> Vec<Device> {
    DEVICES.map(|ifindex| device(ifindex, LinkLayer::Ethernet)).collect()
}

/// A model of the kernel: the programs on each hook, the next hops, and the devices with the XDP program.
#[derive(Debug, Clone, Default)]
struct Kernel {
    programs: BTreeMap<(u32, Direction), &'static str>,
    next_hops: BTreeMap<std::net::IpAddr, PodNextHop>,
    xdp: BTreeSet<u32>,
}

impl Kernel {
    /// Creates the kernel's state after an earlier plan has run.
    fn after(plan: &DevicePlan) -> Self {
        let mut kernel = Self::default();
        kernel.run(plan, &BTreeSet::new());
        kernel
    }

    fn attached(&self) -> AttachedHooks {
        self.programs.keys().copied().collect()
    }

    /// Runs both halves of a plan. Attaching a program to a hook in `failing` fails. Returns the devices that have all
    /// their programs attached.
    fn run(&mut self, plan: &DevicePlan, failing: &BTreeSet<(u32, Direction)>) -> BTreeSet<u32> {
        let mut failed = BTreeSet::new();
        for step in plan.attach_steps(&devices(), &self.attached()) {
            if step.device().is_some_and(|ifindex| failed.contains(&ifindex)) {
                continue;
            }
            if let DeviceStep::Attach { ifindex, direction, .. } = step
                && failing.contains(&(ifindex, direction))
            {
                failed.insert(ifindex);
                continue;
            }
            self.step(plan, &step);
        }
        let served = plan.programs.keys().copied().filter(|ifindex| !failed.contains(ifindex)).collect();
        let plan = plan.restricted_to(&served);
        for step in plan.completion_steps() {
            self.step(&plan, &step);
        }
        served
    }

    fn step(&mut self, plan: &DevicePlan, step: &DeviceStep) {
        match step {
            DeviceStep::RetainXdp(devices) => self.xdp.retain(|ifindex| devices.contains(ifindex)),
            DeviceStep::RetainNextHops => self.next_hops.retain(|addr, hop| plan.next_hops.get(addr) == Some(hop)),
            DeviceStep::Attach { ifindex, direction, program } => {
                self.programs.insert((*ifindex, *direction), program);
            }
            DeviceStep::Detach { ifindex, direction } => drop(self.programs.remove(&(*ifindex, *direction))),
            DeviceStep::AddNextHops => self.next_hops.extend(&plan.next_hops),
            DeviceStep::MoveToHead { ifindex, direction, .. } => {
                assert!(self.programs.contains_key(&(*ifindex, *direction)), "moved before it was attached: {step:?}");
            }
            DeviceStep::AttachXdp { ifindex } => drop(self.xdp.insert(*ifindex)),
        }
        self.check(step);
    }

    /// Asserts that each device that translates requests also translates replies.
    fn check(&self, step: &DeviceStep) {
        let has_replies = |ifindex: u32| self.programs.contains_key(&(ifindex, Direction::Egress));
        for ifindex in &self.xdp {
            assert!(
                has_replies(*ifindex),
                "device {ifindex} translates requests by XDP, but no replies, after {step:?}"
            );
        }
        for ((ifindex, direction), program) in &self.programs {
            let is_of_pods = [PROG_PODS_REDIRECT, PROG_PODS_OFFLOAD].contains(program);
            let translates_requests = *direction == Direction::Ingress && !is_of_pods;
            assert!(
                !translates_requests || has_replies(*ifindex),
                "device {ifindex} translates requests, but no replies, after {step:?}"
            );
        }
    }
}

fn program_set() -> impl Strategy<Value = ProgramSet> {
    use ProgramSet::{OffloadPods, OffloadUplink, Pods, RedirectUplink, Uplink};
    select(vec![Uplink, RedirectUplink, OffloadUplink, Pods, OffloadPods])
}

fn plan() -> impl Strategy<Value = DevicePlan> {
    let programs = prop::collection::btree_map(DEVICES, program_set(), 0..4);
    (programs, any::<u8>()).prop_map(|(programs, choice)| {
        let is_of_pods = |set: &ProgramSet| matches!(set, ProgramSet::Pods | ProgramSet::OffloadPods);
        let hop = |ifindex: u32| PodNextHop { ifindex, kind: HopKind::Peer, mtu: 1500 };
        let pods = programs.iter().filter(|(_, set)| is_of_pods(set)).map(|(ifindex, _)| *ifindex);
        let uplinks = programs.iter().filter(|(_, set)| !is_of_pods(set)).map(|(ifindex, _)| *ifindex);
        DevicePlan {
            next_hops: pods.map(|ifindex| ([10, 0, choice % 2, 1].into(), hop(ifindex))).collect(),
            xdp: uplinks.filter(|ifindex| choice >> (ifindex % 8) & 1 == 1).collect(),
            moves: moves(&programs, choice),
            programs,
        }
    })
}

/// Chooses some of the hooks that have a program. On these hooks, the plan moves NPL's filter ahead of the filters of
/// other software.
fn moves(programs: &BTreeMap<u32, ProgramSet>, choice: u8) -> BTreeSet<(u32, Direction)> {
    let hooks = programs.iter().flat_map(|(ifindex, set)| set.directions().iter().map(|side| (*ifindex, *side)));
    hooks.filter(|(ifindex, _)| choice >> ((ifindex + 3) % 8) & 1 == 1).collect()
}

fn failures() -> impl Strategy<Value = BTreeSet<(u32, Direction)>> {
    let direction = select(vec![Direction::Ingress, Direction::Egress, Direction::ToPods]);
    prop::collection::btree_set((DEVICES, direction), 0..3)
}

proptest! {
    #[test]
    fn requests_are_never_translated_without_replies(former in plan(), next in plan(), failing in failures()) {
        Kernel::after(&former).run(&next, &failing);
    }

    #[test]
    fn programs_are_detached_after_all_others_are_attached(former in plan(), next in plan()) {
        let steps = next.attach_steps(&devices(), &Kernel::after(&former).attached());
        let first_detached = steps.iter().position(|step| matches!(step, DeviceStep::Detach { .. }));
        let last_attached = steps.iter().rposition(|step| matches!(step, DeviceStep::Attach { .. }));
        if let (Some(detached), Some(attached)) = (first_detached, last_attached) {
            prop_assert!(attached < detached, "{:?}", steps);
        }
        prop_assert!(steps.is_sorted_by_key(DeviceStep::rank));
        prop_assert!(next.completion_steps().is_sorted_by_key(DeviceStep::rank));
    }

    #[test]
    fn devices_without_a_failure_end_as_planned(former in plan(), next in plan(), failing in failures()) {
        let mut kernel = Kernel::after(&former);
        let served = kernel.run(&next, &failing);
        let planned = next.restricted_to(&served);
        prop_assert_eq!(&kernel.xdp, &planned.xdp);
        prop_assert_eq!(&kernel.next_hops, &planned.next_hops);
        prop_assert!(planned.attached_devices(&kernel.attached()).is_superset(&served));
        let has_failed = |ifindex: &u32| next.programs.contains_key(ifindex) && !served.contains(ifindex);
        let stays = |(ifindex, direction): &(u32, Direction)| {
            has_failed(ifindex) || next.has_program(*ifindex, *direction)
        };
        prop_assert!(kernel.programs.keys().all(stays), "{:?}", kernel.programs);
    }

    #[test]
    fn running_a_plan_twice_changes_nothing(next in plan()) {
        let mut kernel = Kernel::after(&next);
        let before = kernel.clone();
        kernel.run(&next, &BTreeSet::new());
        prop_assert_eq!((kernel.programs, kernel.next_hops, kernel.xdp), (before.programs, before.next_hops, before.xdp));
    }
}

#[test]
fn a_device_without_ethernet_headers_gets_programs_for_plain_ip_packets() {
    let plan = DevicePlan { programs: [(7, ProgramSet::Uplink)].into(), ..DevicePlan::default() };
    let steps = plan.attach_steps(&[device(7, LinkLayer::None)], &AttachedHooks::new());
    let attach = |direction, program| DeviceStep::Attach { ifindex: 7, direction, program };
    let expected = [
        DeviceStep::RetainXdp([].into()),
        DeviceStep::RetainNextHops,
        attach(Direction::Egress, PROG_EGRESS_L3),
        attach(Direction::Ingress, PROG_INGRESS_L3),
    ];
    assert_eq!(steps, expected);
}

#[test]
fn programs_of_a_removed_device_are_detached() {
    let attached = [(99, Direction::Egress), (99, Direction::Ingress)].into();
    let steps = DevicePlan::default().attach_steps(&devices(), &attached);
    let detach = |direction| DeviceStep::Detach { ifindex: 99, direction };
    assert_eq!(steps[2..], [detach(Direction::Ingress), detach(Direction::Egress)]);
}
