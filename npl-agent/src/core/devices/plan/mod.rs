// SPDX-License-Identifier: Apache-2.0
//! Plans which programs to attach to each device, and the order in which to attach and detach the programs.
//!
//! Two rules decide the order:
//!
//! 1. No device translates requests unless it also translates replies. So the egress program is attached before the
//!    ingress program, and detached after the ingress program. The XDP program in the driver translates requests before
//!    TC, so the XDP program is detached first and attached last.
//! 2. All attach steps precede all detach steps of TC programs, so that a Pod or a client that moves to another device
//!    is served without interruption.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter,
    net::IpAddr,
};

use npl_common::names::{
    PROG_EGRESS, PROG_EGRESS_L3, PROG_EGRESS_OFFLOAD, PROG_INGRESS, PROG_INGRESS_L3, PROG_INGRESS_OFFLOAD,
    PROG_INGRESS_REDIRECT, PROG_PODS_OFFLOAD, PROG_PODS_REDIRECT, PROG_TO_PODS,
};

use super::{
    Device, Direction, LinkLayer,
    redirect::{PodNextHop, ProgramSet},
};

/// The plan for all devices: the programs to attach to each device, and the Pods to which packets are redirected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DevicePlan {
    /// The set of TC programs of each device, by the device's ifindex.
    pub programs: BTreeMap<u32, ProgramSet>,
    /// The next hop of each redirected Pod, by the Pod's address. [`Self::programs`] has an entry for the device of
    /// each next hop.
    pub next_hops: BTreeMap<IpAddr, PodNextHop>,
    /// The ifindexes of the devices whose driver runs the XDP program. Each of these devices is an uplink in
    /// [`Self::programs`].
    pub xdp: BTreeSet<u32>,
    /// The hooks on which NPL's filter is moved ahead of filters of other software.
    pub moves: BTreeSet<(u32, Direction)>,
}

/// The TC hooks that have a program of NPL: ifindex of the device, and direction.
pub type AttachedHooks = BTreeSet<(u32, Direction)>;

/// One step that establishes a [`DevicePlan`]. Every step is idempotent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceStep {
    /// Detach the XDP program from all devices except these.
    RetainXdp(BTreeSet<u32>),
    /// Remove the next hops of Pods for which the plan has no next hop, or a different one. The host's stack then
    /// forwards packets to the affected Pods.
    RetainNextHops,
    /// Attach a TC program to a hook. An NPL program on the same hook is replaced.
    Attach {
        /// The ifindex of the device.
        ifindex: u32,
        /// The direction of the TC hook.
        direction: Direction,
        /// The name of the TC program.
        program: &'static str,
    },
    /// Move NPL's filter on a hook ahead of the filters of other software.
    MoveToHead {
        /// The ifindex of the device.
        ifindex: u32,
        /// The direction of the TC hook.
        direction: Direction,
        /// The name of the TC program.
        program: &'static str,
    },
    /// Detach NPL's program from a TC hook.
    Detach {
        /// The ifindex of the device, which may have been removed.
        ifindex: u32,
        /// The direction of the TC hook.
        direction: Direction,
    },
    /// Add the next hops of the plan to the kernel.
    AddNextHops,
    /// Attach the XDP program in a device's driver.
    AttachXdp {
        /// The ifindex of the device.
        ifindex: u32,
    },
}

impl DeviceStep {
    /// The position of the step in the order of steps; steps of equal rank keep their relative order.
    const fn rank(&self) -> u8 {
        match self {
            Self::RetainXdp(_) => 0,
            Self::RetainNextHops => 1,
            Self::Attach { .. } | Self::MoveToHead { .. } => 2,
            Self::Detach { direction: Direction::Ingress, .. } => 3,
            Self::Detach { direction: Direction::Egress | Direction::ToPods, .. } => 4,
            Self::AddNextHops => 5,
            Self::AttachXdp { .. } => 6,
        }
    }

    /// The ifindex of the device whose TC programs the step changes; `None` for steps that change no TC program.
    pub const fn device(&self) -> Option<u32> {
        match self {
            Self::Attach { ifindex, .. } | Self::MoveToHead { ifindex, .. } | Self::Detach { ifindex, .. } => {
                Some(*ifindex)
            }
            Self::RetainXdp(_) | Self::RetainNextHops | Self::AddNextHops | Self::AttachXdp { .. } => None,
        }
    }
}

impl DevicePlan {
    /// The steps of the first half of the plan, which removes unwanted XDP programs and next hops, and then attaches
    /// and detaches TC programs. If a step fails on a device, the caller skips the remaining steps for this device in
    /// both halves.
    pub fn attach_steps(&self, devices: &[Device], attached: &AttachedHooks) -> Vec<DeviceStep> {
        let mut steps = vec![DeviceStep::RetainXdp(self.xdp.clone()), DeviceStep::RetainNextHops];
        for device in devices {
            let set = self.programs.get(&device.ifindex);
            steps.extend(set.into_iter().flat_map(|set| self.attach_all(*set, device)));
        }
        let unwanted = attached.iter().filter(|(ifindex, direction)| !self.has_program(*ifindex, *direction));
        steps.extend(
            unwanted.map(|(ifindex, direction)| DeviceStep::Detach { ifindex: *ifindex, direction: *direction }),
        );
        steps.sort_by_key(DeviceStep::rank);
        steps
    }

    /// The steps of the second half of the plan, which adds next hops and XDP programs. A next hop and an XDP program
    /// need the TC programs of their device. The caller therefore restricts the plan to the devices whose TC programs
    /// are attached ([`Self::restricted_to`]); the steps first remove the XDP programs and next hops of all other
    /// devices.
    pub fn completion_steps(&self) -> Vec<DeviceStep> {
        let retained = [DeviceStep::RetainXdp(self.xdp.clone()), DeviceStep::RetainNextHops, DeviceStep::AddNextHops];
        let xdp = self.xdp.iter().map(|ifindex| DeviceStep::AttachXdp { ifindex: *ifindex });
        retained.into_iter().chain(xdp).collect()
    }

    /// The part of the plan that concerns `devices`.
    #[must_use]
    pub fn restricted_to(&self, devices: &BTreeSet<u32>) -> Self {
        let programs = self.programs.iter().filter(|(ifindex, _)| devices.contains(ifindex));
        let next_hops = self.next_hops.iter().filter(|(_, hop)| devices.contains(&hop.ifindex));
        Self {
            programs: programs.map(|(ifindex, set)| (*ifindex, *set)).collect(),
            next_hops: next_hops.map(|(addr, hop)| (*addr, *hop)).collect(),
            xdp: &self.xdp & devices,
            moves: self.moves.iter().copied().filter(|(ifindex, _)| devices.contains(ifindex)).collect(),
        }
    }

    /// Returns the devices on which every hook that the plan names has a program.
    pub fn attached_devices(&self, attached: &AttachedHooks) -> BTreeSet<u32> {
        let has_all = |(ifindex, set): &(&u32, &ProgramSet)| {
            set.directions().iter().all(|direction| attached.contains(&(**ifindex, *direction)))
        };
        self.programs.iter().filter(has_all).map(|(ifindex, _)| *ifindex).collect()
    }

    fn has_program(&self, ifindex: u32, direction: Direction) -> bool {
        self.programs.get(&ifindex).is_some_and(|set| set.directions().contains(&direction))
    }

    fn attach_all(&self, set: ProgramSet, device: &Device) -> impl Iterator<Item = DeviceStep> {
        let ifindex = device.ifindex;
        let has_ethernet = device.link_layer == LinkLayer::Ethernet;
        let attach = move |direction: &Direction| {
            let (direction, program) = (*direction, program(set, *direction, has_ethernet));
            let is_moved = self.moves.contains(&(ifindex, direction));
            let moved = is_moved.then_some(DeviceStep::MoveToHead { ifindex, direction, program });
            iter::once(DeviceStep::Attach { ifindex, direction, program }).chain(moved)
        };
        set.directions().iter().flat_map(attach)
    }
}

impl ProgramSet {
    /// The hooks of this set of programs, in the order in which the programs are attached.
    pub const fn directions(self) -> &'static [Direction] {
        match self {
            Self::Uplink | Self::RedirectUplink | Self::OffloadUplink => &[Direction::Egress, Direction::Ingress],
            Self::Pods => &[Direction::Ingress],
            Self::OffloadPods => &[Direction::ToPods, Direction::Ingress],
        }
    }
}

/// Returns the name of the program to attach for a direction, on a device that gets the program set `set`.
const fn program(set: ProgramSet, direction: Direction, has_ethernet: bool) -> &'static str {
    match (direction, set, has_ethernet) {
        (Direction::Ingress, ProgramSet::Pods, _) => PROG_PODS_REDIRECT,
        (Direction::Ingress, ProgramSet::OffloadPods, _) => PROG_PODS_OFFLOAD,
        (Direction::ToPods, _, _) => PROG_TO_PODS,
        (Direction::Ingress, ProgramSet::RedirectUplink, true) => PROG_INGRESS_REDIRECT,
        (Direction::Ingress, ProgramSet::OffloadUplink, true) => PROG_INGRESS_OFFLOAD,
        (Direction::Ingress, _, true) => PROG_INGRESS,
        (Direction::Ingress, _, false) => PROG_INGRESS_L3,
        (Direction::Egress, ProgramSet::OffloadUplink, true) => PROG_EGRESS_OFFLOAD,
        (Direction::Egress, _, true) => PROG_EGRESS,
        (Direction::Egress, _, false) => PROG_EGRESS_L3,
    }
}

#[cfg(test)]
mod tests;
