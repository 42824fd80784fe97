// SPDX-License-Identifier: Apache-2.0
//! Checks the Node's network devices, their addresses and the order of their programs.

use super::{
    Facts, Finding, abridged, abridged_to,
    kernel::{ASK_AS_ROOT, NAME_RUNTIME_DIR},
};
use crate::core::devices::{
    Device, DeviceSelection, HAS_INGRESS_QUEUE, choose, local_addresses, node_network::network_of,
};

/// Checks for devices that the programs do not support although clients may use them.
pub(super) fn devices(facts: &Facts) -> Finding {
    let key = "devices";
    let devices = match &facts.devices {
        Ok(devices) => devices,
        Err(reason) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    let unsupported = devices.iter().filter_map(|device| Some(format!("{}: {}", device.name, refusal(facts, device)?)));
    let unsupported: Vec<String> = unsupported.collect();
    if unsupported.is_empty() {
        return Finding::ok(key, "the programs support all devices by which clients may reach the Node");
    }
    Finding::warning(
        key,
        unsupported.join("; "),
        "clients that reach the Node through such a device are not served; all other clients are served. Change the \
         device as described, or name the other devices with --devices",
    )
}

fn refusal(facts: &Facts, device: &Device) -> Option<&'static str> {
    match choose(device, &DeviceSelection::Auto, &[], facts.is_attached(device)) {
        Ok(_) if device.link.has_ingress_queue && !facts.kernel.has_tcx => Some(HAS_INGRESS_QUEUE),
        Err(reason) if reason.is_unsupported() => Some(reason.as_str()),
        Ok(_) | Err(_) => None,
    }
}

/// The maximum number of addresses that the check `addresses` names.
const MAX_NAMED_ADDRESSES: usize = 16;

/// Checks for addresses of the Node on which NPL does not serve node ports.
pub(super) fn addresses(facts: &Facts) -> Finding {
    let key = "addresses";
    let (datapath, devices) = match (&facts.datapath, &facts.devices) {
        (Ok(datapath), Ok(devices)) => (datapath, devices),
        (Err(reason), _) | (_, Err(reason)) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    if !datapath.is_installed {
        return Finding::ok(key, "node ports do not answer on any address yet: see the check datapath");
    }
    let all = local_addresses(devices, &[]);
    let missing: Vec<_> =
        all.iter().filter(|addr| !datapath.addresses.contains(addr)).map(ToString::to_string).collect();
    if missing.is_empty() {
        return Finding::ok(key, format!("node ports answer on all {} addresses of the Node", all.len()));
    }
    let advice = if facts.is_agent_running {
        "clients that connect to these addresses are not served: run the check again after a second, because the agent \
         serves a new address with a short delay. If the check still lists addresses, the Node has more than 256 \
         addresses of an IP family: the agent serves 256 of them, and published addresses take precedence"
    } else {
        "clients that connect to these addresses are not served: start the agent, which adds these addresses"
    };
    let named = abridged_to(MAX_NAMED_ADDRESSES, &missing, ", ", " and ");
    let found = format!("node ports do not answer on {} of {} addresses: {named}", missing.len(), all.len());
    Finding::warning(key, found, advice)
}

/// Checks for Pods on the network of an uplink, which get no node ports, and for macvlan and ipvlan devices of the Node
/// that lead to such Pods.
pub(super) fn node_network(facts: &Facts) -> Finding {
    let key = "node_network";
    let devices = match &facts.devices {
        Ok(devices) => devices,
        Err(reason) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    let shims = devices.iter().filter(|device| !device.addresses.is_empty()).filter_map(|device| {
        let uplink = network_of(device, devices, &[]).filter(|uplink| uplink.ifindex != device.ifindex)?;
        Some(format!("{} on {}", device.name, uplink.name))
    });
    let shims: Vec<String> = shims.collect();
    let shims = match shims.join("; ") {
        none if none.is_empty() => "no macvlan or ipvlan device of the Node is on the network of an uplink".to_owned(),
        some => format!("macvlan or ipvlan: {some}: Pods behind these devices get no node port"),
    };
    let pods = match &facts.pods_on_node_network {
        Ok(pods) if facts.is_agent_running => pods,
        Err(reason) if facts.is_agent_running => return Finding::unknown(key, reason, NAME_RUNTIME_DIR),
        // Without an agent, the doctor does not know the Pods.
        Ok(_) | Err(_) => return Finding::ok(key, shims),
    };
    if pods.is_empty() {
        return Finding::ok(key, format!("no Pod is on the network of an uplink; {shims}"));
    }
    let named = abridged(&pods.iter().collect::<Vec<_>>(), ", ", " and ");
    Finding::warning(
        key,
        format!("Pods on the network of an uplink: {named}; {shims}"),
        "these Pods get no node port (Event PodOnNodeNetwork), because they would answer clients directly and with their \
         own address: let the load balancer use the Pods' own addresses, or attach the Pods to a network behind the Node",
    )
}

/// Checks for programs of other software that run ahead of NPL's programs: a final verdict of these programs prevents
/// NPL's programs from running.
pub(super) fn program_order(facts: &Facts) -> Finding {
    let key = "program_order";
    let ahead = match &facts.programs_ahead {
        Ok(ahead) if ahead.is_empty() => {
            return Finding::ok(key, "no program of other software runs ahead of NPL's");
        }
        Ok(ahead) => ahead,
        Err(reason) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    let found = ahead.iter().map(|(device, programs)| {
        format!("{device}: {}", programs.iter().map(String::as_str).collect::<Vec<_>>().join(", "))
    });
    let remedy = if facts.kernel.has_tcx {
        "have the other software attach its program behind NPL's"
    } else if facts.is_agent_running {
        "the agent moves its filter ahead, at most 5 times in 10 minutes, but the other software does the same with its \
         filter: give the filter of the other software a priority above 1"
    } else {
        "start the agent, which moves its filter ahead"
    };
    Finding::failed(
        key,
        format!("programs ahead of NPL's: {}", found.collect::<Vec<_>>().join("; ")),
        format!(
            "NPL's program runs only if such a program returns TC_ACT_UNSPEC; otherwise clients that reach the Node \
             through this device are refused or get no answer: {remedy}"
        ),
    )
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::super::{
        DatapathFacts, Facts, State,
        tests::{check, first_device, well},
    };
    use crate::core::devices::{Device, DeviceKind, LinkFacts, LinkLayer};

    #[test]
    fn addresses_that_do_not_fit_are_reported() {
        let key = "addresses";
        check(&[
            (
                |it| first_device(it).addresses.push([192, 0, 2, 77].into()),
                key,
                State::Warning,
                "1 of 3 addresses: 192.0.2.77",
                "256",
            ),
            (
                |it| {
                    it.is_agent_running = false;
                    first_device(it).addresses.push([192, 0, 2, 77].into());
                },
                key,
                State::Warning,
                "1 of 3",
                "start the agent",
            ),
            (
                |it| first_device(it).addresses.extend((1..=16).map(|byte| IpAddr::from([198, 51, 100, byte]))),
                key,
                State::Warning,
                "16 of 18 addresses: 198.51.100.1, 198.51.100.2, 198.51.100.3, 198.51.100.4, 198.51.100.5, \
                 198.51.100.6, 198.51.100.7, 198.51.100.8, 198.51.100.9, 198.51.100.10, 198.51.100.11, 198.51.100.12, \
                 198.51.100.13, 198.51.100.14, 198.51.100.15, 198.51.100.16",
                "256",
            ),
            (
                |it| first_device(it).addresses.extend((1..=20).map(|byte| IpAddr::from([198, 51, 100, byte]))),
                key,
                State::Warning,
                "198.51.100.15, 198.51.100.16 and 4 more",
                "256",
            ),
            (|it| it.datapath = Err("EPERM".to_owned()), key, State::Unknown, "EPERM", "as root"),
            (|it| it.datapath = Ok(DatapathFacts::default()), key, State::Ok, "see the check datapath", ""),
        ]);
    }

    fn add_shim(facts: &mut Facts, addresses: &[&str]) {
        let link = LinkFacts { shares_network_of: Some(first_device(facts).ifindex), ..LinkFacts::default() };
        let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
        let shim = Device { addresses, link, ..Device::new(9, "shim", DeviceKind::Other) };
        facts.devices.as_mut().unwrap().push(shim);
    }

    #[test]
    fn macvlan_and_ipvlan_devices_on_the_network_of_an_uplink_are_named() {
        let key = "node_network";
        check(&[
            (|it| it.devices = Err("EPERM".to_owned()), key, State::Unknown, "EPERM", "as root"),
            // A device without an address, such as a virtual machine's macvtap device, leads to no Pod.
            (|it| add_shim(it, &[]), key, State::Ok, "no macvlan or ipvlan device", ""),
        ]);
        check(&[(
            |it| it.pods_on_node_network = Ok(["a", "b", "c", "d"].map(|name| format!("shop/{name}")).into()),
            key,
            State::Warning,
            "shop/a, shop/b, shop/c and 1 more",
            "the Pods' own addresses",
        )]);
        let mut facts = well();
        add_shim(&mut facts, &["192.0.2.11"]);
        let finding = super::node_network(&facts);
        assert_eq!(finding.state, State::Ok);
        assert!(finding.found.contains("shim on eth0: Pods behind these devices get no node port"), "{finding:?}");
    }

    const KEY: &str = "devices";

    #[test]
    fn unsupported_devices_are_reported_with_advice() {
        check(&[
            (
                |it| first_device(it).link_layer = LinkLayer::Tagged,
                KEY,
                State::Warning,
                "eth0: leaves VLAN tags in frames: set it to `reorder_hdr on`",
                "--devices",
            ),
            (
                |it| first_device(it).link_layer = LinkLayer::Other,
                KEY,
                State::Warning,
                "neither an Ethernet nor an IP header",
                "",
            ),
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
            // A TCX link can be attached to a device that has an `ingress` qdisc.
            (|it| first_device(it).link.has_ingress_queue = true, KEY, State::Ok, "the programs support all", ""),
            (|it| it.devices = Err("EPERM".to_owned()), KEY, State::Unknown, "EPERM", "as root"),
        ]);
    }

    fn cilium_is_ahead(facts: &mut Facts) {
        facts.programs_ahead = Ok([("eth0".to_owned(), ["cil_from_netdev (ingress)".to_owned()].into())].into());
    }

    #[test]
    fn programs_ahead_of_npls_are_a_failure() {
        let key = "program_order";
        check(&[
            (cilium_is_ahead, key, State::Failed, "eth0: cil_from_netdev (ingress)", "behind NPL's"),
            (
                |it| {
                    it.kernel.has_tcx = false;
                    cilium_is_ahead(it);
                },
                key,
                State::Failed,
                "eth0: cil_from_netdev",
                "a priority above 1",
            ),
            (|it| it.programs_ahead = Err("EPERM".to_owned()), key, State::Unknown, "EPERM", "as root"),
        ]);
    }
}
