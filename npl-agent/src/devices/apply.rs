// SPDX-License-Identifier: Apache-2.0
//! Applies a device plan. [`crate::core::devices::plan`] determines the order of the steps.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    core::devices::{
        Device,
        plan::{AttachedHooks, DevicePlan, DeviceStep},
    },
    datapath::{Datapath, DatapathError},
};

/// The result of applying a device plan.
#[derive(Debug, Default)]
pub struct Applied {
    /// The ifindexes of those devices of the plan whose TC programs are all attached.
    pub attached: BTreeSet<u32>,
    /// The errors of those devices of the plan to which the XDP program could not be attached, by ifindex.
    pub xdp_errors: BTreeMap<u32, DatapathError>,
    /// All failures of the plan's steps except those in `xdp_errors`.
    pub errors: Vec<DatapathError>,
}

/// Applies a device plan to the devices. `before` lists the hooks to which programs are attached before the plan is
/// applied. If a step fails on one device, the steps for the remaining devices are still applied.
pub fn apply(datapath: &mut Datapath, devices: &[Device], before: &AttachedHooks, plan: &DevicePlan) -> Applied {
    let mut applied = Applied::default();
    attach(datapath, devices, before, plan, &mut applied);
    complete(datapath, devices, &plan.restricted_to(&applied.attached), &mut applied);
    applied
}

/// Applies the first half of a plan: removes XDP programs and next hops that are not in the plan, then attaches and
/// detaches TC programs.
fn attach(
    datapath: &mut Datapath,
    devices: &[Device],
    before: &AttachedHooks,
    plan: &DevicePlan,
    applied: &mut Applied,
) {
    let mut failures = Vec::new();
    let mut failed = BTreeSet::new();
    for step in plan.attach_steps(devices, before) {
        if step.device().is_some_and(|ifindex| failed.contains(&ifindex)) {
            continue;
        }
        let result = match step {
            DeviceStep::RetainXdp(wanted) => {
                applied.errors.extend(datapath.retain_xdp(&wanted));
                continue;
            }
            DeviceStep::RetainNextHops => match datapath.retain_next_hops(plan) {
                Ok(()) => continue,
                // The remaining steps are not applied, because they detach programs from devices to which packets may
                // still be redirected.
                Err(error) => {
                    applied.errors.push(error);
                    applied.attached = plan.attached_devices(before);
                    return;
                }
            },
            DeviceStep::Attach { ifindex, direction, program } => match find(devices, ifindex) {
                Some(device) => datapath.attach(device, direction, program),
                None => continue,
            },
            DeviceStep::MoveToHead { ifindex, direction, program } => match find(devices, ifindex) {
                Some(device) => datapath.move_to_head(device, direction, program),
                None => continue,
            },
            DeviceStep::Detach { ifindex, direction } => {
                datapath.hooks.detach(ifindex, direction, find(devices, ifindex))
            }
            DeviceStep::AddNextHops | DeviceStep::AttachXdp { .. } => continue,
        };
        if let Err(error) = result {
            failed.extend(step.device());
            failures.push(error);
        }
    }
    // If a step failed, the programs of other builds stay pinned, because they may still be attached to the device of
    // this step.
    failures.extend(datapath.hooks.release_unused_programs(!failures.is_empty()).err());
    applied.errors.extend(failures);
    let is_attached = |ifindex: &u32| find(devices, *ifindex).is_some() && !failed.contains(ifindex);
    applied.attached = plan.programs.keys().copied().filter(is_attached).collect();
}

/// Applies the second half of a plan: adds next hops and attaches XDP programs. `plan` contains only the devices whose
/// TC programs are attached; XDP programs and next hops of all other devices are removed first.
fn complete(datapath: &mut Datapath, devices: &[Device], plan: &DevicePlan, applied: &mut Applied) {
    let mut may_redirect = true;
    for step in plan.completion_steps() {
        match step {
            DeviceStep::RetainXdp(wanted) => applied.errors.extend(datapath.retain_xdp(&wanted)),
            DeviceStep::RetainNextHops => {
                let result = datapath.retain_next_hops(plan);
                may_redirect = result.is_ok();
                applied.errors.extend(result.err());
            }
            DeviceStep::AddNextHops if may_redirect => applied.errors.extend(datapath.add_next_hops(plan)),
            DeviceStep::AttachXdp { ifindex } => {
                let result = find(devices, ifindex).map_or(Ok(()), |device| datapath.attach_xdp(device));
                applied.xdp_errors.extend(result.err().map(|error| (ifindex, error)));
            }
            DeviceStep::AddNextHops
            | DeviceStep::Attach { .. }
            | DeviceStep::MoveToHead { .. }
            | DeviceStep::Detach { .. } => {}
        }
    }
}

fn find(devices: &[Device], ifindex: u32) -> Option<&Device> {
    devices.iter().find(|device| device.ifindex == ifindex)
}
