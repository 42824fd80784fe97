// SPDX-License-Identifier: Apache-2.0
//! Checks of the Node's devices.

use super::{Facts, Finding, kernel::ASK_AS_ROOT};
use crate::core::devices::{Device, DeviceSelection, HAS_INGRESS_QUEUE, choose};

/// Devices by which clients may come, and on which programs cannot stand.
pub(super) fn devices(facts: &Facts) -> Finding {
    let key = "devices";
    let devices = match &facts.devices {
        Ok(devices) => devices,
        Err(reason) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    let refusing = devices.iter().filter_map(|device| Some(format!("{}: {}", device.name, refusal(facts, device)?)));
    let refusing: Vec<String> = refusing.collect();
    if refusing.is_empty() {
        return Finding::ok(key, "none refuses the programs");
    }
    Finding::warning(
        key,
        refusing.join("; "),
        "clients who come by such a device are not served, all others are: set it right, or have --devices name the others",
    )
}

fn refusal(facts: &Facts, device: &Device) -> Option<&'static str> {
    match choose(device, &DeviceSelection::Auto, &[], facts.is_carrying(device)) {
        Ok(_) if device.link.has_ingress_queue && !facts.kernel.has_tcx => Some(HAS_INGRESS_QUEUE),
        Err(reason) if reason.is_refusal() => Some(reason.as_str()),
        Ok(_) | Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        State,
        tests::{check, first_device},
    };
    use crate::core::devices::LinkLayer;

    const KEY: &str = "devices";

    #[test]
    fn devices_that_programs_cannot_stand_on_are_told_with_what_to_do() {
        check(&[
            (
                |it| first_device(it).link_layer = LinkLayer::Tagged,
                KEY,
                State::Warning,
                "eth0: leaves VLAN tags in frames: set it to `reorder_hdr on`",
                "--devices",
            ),
            (|it| first_device(it).link_layer = LinkLayer::Other, KEY, State::Warning, "neither Ethernet nor none", ""),
            (
                |it| {
                    it.kernel.has_tcx = false;
                    first_device(it).link.has_ingress_queue = true;
                },
                KEY,
                State::Warning,
                "eth0: has an ingress qdisc",
                "--devices",
            ),
            // Links stand beside it.
            (|it| first_device(it).link.has_ingress_queue = true, KEY, State::Ok, "none refuses", ""),
            (|it| it.devices = Err("EPERM".to_owned()), KEY, State::Unknown, "EPERM", "as root"),
        ]);
    }
}
