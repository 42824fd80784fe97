// SPDX-License-Identifier: Apache-2.0
//! Checks the sysctls for IP forwarding. For IPv4, the setting of the incoming device decides. For IPv6, one setting
//! applies to all devices. Since Linux 6.17, `force_forwarding` of the incoming device can enable IPv6 forwarding, too.

use std::collections::{BTreeMap, BTreeSet};

use super::{Facts, Finding, Setting, State, sysctls::SEE_PROC};
use crate::core::{
    devices::{Device, DeviceKind, Master, local_addresses},
    model::Family,
};

/// Whether NPL needs IP forwarding in an IP family, that is, whether Pods have addresses of the family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    No,
    Perhaps,
    Yes,
}

/// The names of the forwarding sysctls of an IP family.
struct Names {
    key: &'static str,
    global: &'static str,
    family: &'static str,
    of_device: &'static str,
}

impl Names {
    const fn of(family: Family) -> Self {
        match family {
            Family::V4 => {
                Self { key: "ip_forward", global: "net.ipv4.ip_forward", family: "ipv4", of_device: "forwarding" }
            }
            Family::V6 => Self {
                key: "ipv6_forwarding",
                global: "net.ipv6.conf.all.forwarding",
                family: "ipv6",
                of_device: "force_forwarding",
            },
        }
    }

    /// Returns the name of the device's sysctl, with a slash for each dot in the device's name: the command `sysctl`
    /// reads a dot as a separator, and a slash as a dot.
    fn with_device(&self, device: &str) -> String {
        format!("net.{}.conf.{}.{}", self.family, device.replace('.', "/"), self.of_device)
    }
}

pub(super) fn forwarding(facts: &Facts, family: Family) -> Finding {
    let names = Names::of(family);
    let key = names.key;
    let (global, of_device) = match family {
        Family::V4 => (&facts.sysctls.ip_forward, &facts.sysctls.ipv4_forwarding),
        Family::V6 => (&facts.sysctls.ipv6_forwarding, &facts.sysctls.ipv6_force_forwarding),
    };
    let value = match global {
        Setting::Is(value) => value,
        Setting::Missing if family == Family::V6 => return Finding::ok(key, "this kernel has no IPv6"),
        Setting::Missing => return Finding::unknown(key, format!("no {}", names.global), SEE_PROC),
        Setting::Unreadable(reason) => return Finding::unknown(key, reason, SEE_PROC),
    };
    let found = format!("{}={value}", names.global);
    let need = need(facts, family);
    let is_on = value != "0";
    if need == Need::No && !is_on {
        return Finding::ok(key, format!("{found}; the Node has no {family} address"));
    }
    if is_on && (family == Family::V6 || need == Need::No) {
        return Finding::ok(key, found);
    }
    let forwards = |device: &Device| forwards(of_device.get(&device.name), family, is_on);
    let (uplinks, of_pods) = (receiving_uplinks(facts, family), devices_of_pods(facts, family));
    let off = Off {
        uplinks: uplinks.iter().copied().filter(|device| !forwards(device)).collect(),
        of_pods: of_pods.into_iter().filter(|device| !forwards(device)).collect(),
    };
    if uplinks.is_empty() && !is_on {
        return off_everywhere(&names, family, &found, need);
    }
    if off.uplinks.is_empty() && off.of_pods.is_empty() {
        return Finding::ok(key, if is_on { found } else { format!("{found}, and on for {}", list(&uplinks)) });
    }
    if !is_on && off.uplinks.len() == uplinks.len() {
        return off_everywhere(&names, family, &found, need);
    }
    off.finding(&names, family, &uplinks, need)
}

/// Whether the kernel forwards packets that arrive on a device. For IPv4, the device's own setting decides; for IPv6,
/// the device's own setting or the global setting `is_on` is sufficient. If the device's own setting is not known, the
/// global setting decides.
fn forwards(of_device: Option<&Setting>, family: Family, is_on: bool) -> bool {
    match (of_device, family) {
        (Some(Setting::Is(value)), Family::V4) => value != "0",
        (Some(Setting::Is(value)), Family::V6) => is_on || value != "0",
        (Some(Setting::Missing | Setting::Unreadable(_)) | None, _) => is_on,
    }
}

fn off_everywhere(names: &Names, family: Family, found: &str, need: Need) -> Finding {
    let (state, condition) = match need {
        Need::Yes => (State::Failed, String::new()),
        Need::No | Need::Perhaps => (State::Warning, format!(", if Pods have {family} addresses")),
    };
    let name = names.global;
    let advice = format!("the kernel drops {family} requests before they reach a Pod: set {name}=1{condition}");
    Finding::not_ok(names.key, state, found, advice)
}

/// The uplinks, and the devices that lead to mapped Pods, on which IP forwarding is off.
struct Off<'a> {
    uplinks: Vec<&'a Device>,
    of_pods: Vec<&'a Device>,
}

impl Off<'_> {
    /// Node ports fail if forwarding is off on all uplinks, on an uplink with a default route, or on the device of a
    /// mapped Pod. If forwarding is off only on an uplink without a default route, the check warns, because an operator
    /// may have turned forwarding off there deliberately.
    fn finding(&self, names: &Names, family: Family, uplinks: &[&Device], need: Need) -> Finding {
        let is_main = |device: &&Device| device.has_default_route || uplinks.len() == 1;
        let is_fatal =
            !self.of_pods.is_empty() || self.uplinks.len() == uplinks.len() || self.uplinks.iter().any(is_main);
        let state = if is_fatal && need == Need::Yes { State::Failed } else { State::Warning };
        let all: Vec<&Device> = self.uplinks.iter().chain(&self.of_pods).copied().collect();
        let mut lost = Vec::new();
        if !self.uplinks.is_empty() {
            lost.push(format!("{family} requests that arrive on {}", list(&self.uplinks)));
        }
        if !self.of_pods.is_empty() {
            lost.push(format!("{family} replies of Pods behind {}", list(&self.of_pods)));
        }
        let set: Vec<String> = all.iter().take(SHOWN).map(|it| format!("{}=1", names.with_device(&it.name))).collect();
        let condition = if need == Need::Yes { String::new() } else { format!(", if Pods have {family} addresses") };
        let advice = format!("the kernel drops {}: set {}{condition}", lost.join(" and "), set.join(", "));
        Finding::not_ok(names.key, state, format!("forwarding is off for {}", list(&all)), advice)
    }
}

/// The maximum number of devices that the text of a finding names.
const SHOWN: usize = 5;

fn list(devices: &[&Device]) -> String {
    let mut names: Vec<&str> = devices.iter().take(SHOWN).map(|device| device.name.as_str()).collect();
    if devices.len() > SHOWN {
        names.push("…");
    }
    names.join(", ")
}

/// The devices on which requests of an IP family arrive: the devices with NPL's programs or, if no device has programs
/// yet, the devices to which the agent would attach programs.
fn receiving_uplinks(facts: &Facts, family: Family) -> Vec<&Device> {
    let devices = facts.devices.as_deref().unwrap_or_default();
    let attached: Vec<&Device> = devices.iter().filter(|device| facts.is_attached(device)).collect();
    let uplinks = if attached.is_empty() { facts.uplinks().collect() } else { attached };
    let may_receive =
        |it: &&Device| it.addresses.is_empty() || it.addresses.iter().any(|addr| Family::of(*addr) == family);
    routing_devices(devices, uplinks.into_iter().filter(may_receive).collect())
}

/// The devices on which clients' requests of an IP family arrive. Tunnels between Nodes are left out: replies to clients
/// do not leave through tunnels, and a firewall may filter tunnels differently.
pub(super) fn client_uplinks(facts: &Facts, family: Family) -> impl Iterator<Item = &Device> {
    receiving_uplinks(facts, family).into_iter().filter(|device| device.kind != DeviceKind::Tunnel)
}

/// The devices through which the mapped Pods of a family are reached, and on which their replies arrive.
pub(super) fn devices_of_pods(facts: &Facts, family: Family) -> Vec<&Device> {
    let devices = facts.devices.as_deref().unwrap_or_default();
    let of_family = facts.pod_devices.iter().filter(|(pod, _)| Family::of(**pod) == family);
    let indexes: BTreeSet<u32> = of_family.map(|(_, ifindex)| *ifindex).collect();
    let leading = devices.iter().filter(|device| indexes.contains(&device.ifindex));
    routing_devices(devices, leading.collect())
}

/// Replaces the member devices of VRFs with all VRFs of the Node. For a packet that arrives on a member, the kernel
/// uses the settings of the member's VRF, but [`Device`] does not state to which VRF a member belongs.
fn routing_devices<'a>(devices: &'a [Device], receiving: Vec<&'a Device>) -> Vec<&'a Device> {
    let (members, mut routing): (Vec<_>, Vec<_>) =
        receiving.into_iter().partition(|device| device.master == Some(Master::Vrf));
    if !members.is_empty() {
        routing.extend(devices.iter().filter(|device| device.kind == DeviceKind::Vrf));
    }
    let by_index: BTreeMap<u32, &Device> = routing.into_iter().map(|device| (device.ifindex, device)).collect();
    by_index.into_values().collect()
}

/// Whether NPL needs IP forwarding in an IP family. NPL needs forwarding in a family with mappings. As long as there is
/// no mapping, the families of the Node's addresses decide.
pub(super) fn need(facts: &Facts, family: Family) -> Need {
    let mapped = facts.datapath.as_ref().map(|datapath| &datapath.mappings).ok().filter(|it| !it.is_empty());
    if mapped.is_some_and(|mapped| mapped.contains_key(&family)) {
        return Need::Yes;
    }
    let own: BTreeSet<Family> = match &facts.devices {
        Ok(devices) => local_addresses(devices, &[]).into_iter().map(Family::of).collect(),
        Err(_) => Family::ALL.into(),
    };
    if !own.contains(&family) {
        Need::No
    } else if mapped.is_none() && own.first() == Some(&family) {
        Need::Yes
    } else {
        Need::Perhaps
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        Facts, Setting, State, Sysctls,
        tests::{check, device, first_device, is, pinned, well},
    };
    use crate::core::{
        devices::{DeviceKind, Master},
        model::Family,
    };

    const V4: &str = "ip_forward";
    const V6: &str = "ipv6_forwarding";
    const POD_V6: &str = "2001:db8:64::7";

    fn set_v4(sysctls: &mut Sysctls, device: &str, value: &str) {
        sysctls.ipv4_forwarding.insert(device.to_owned(), is(value));
    }

    /// Turns IPv4 forwarding off on every device, as `sysctl -w net.ipv4.ip_forward=0` does.
    fn turn_v4_off(facts: &mut Facts) {
        facts.sysctls.ip_forward = is("0");
        facts.sysctls.ipv4_forwarding.values_mut().for_each(|setting| *setting = is("0"));
    }

    fn map_v6_pod(facts: &mut Facts) {
        pinned(facts).mappings.insert(Family::V6, 1);
        facts.pod_devices.insert(POD_V6.parse().unwrap(), 3);
    }

    fn force_v6(facts: &mut Facts, device: &str) {
        facts.sysctls.ipv6_force_forwarding.insert(device.to_owned(), is("1"));
    }

    fn second_uplink(facts: &mut Facts) {
        first_device(facts).has_default_route = true;
        facts.devices.as_mut().unwrap().push(device("eth1.5", 4, DeviceKind::Physical, &["198.51.100.4"]));
        let datapath = pinned(facts);
        datapath.attached_devices.insert(4);
        datapath.addresses.insert("198.51.100.4".parse().unwrap());
        set_v4(&mut facts.sysctls, "eth1.5", "1");
    }

    #[test]
    fn disabled_forwarding_is_reported_for_families_of_pods() {
        check(&[
            (turn_v4_off, V4, State::Failed, "net.ipv4.ip_forward=0", "set net.ipv4.ip_forward=1"),
            (|it| it.sysctls.ip_forward = Setting::Missing, V4, State::Unknown, "no net.ipv4.ip_forward", "/proc"),
            (|it| it.sysctls.ip_forward = Setting::Unreadable("why".to_owned()), V4, State::Unknown, "why", "as root"),
            // Before the first mapping, the check assumes that Pods have IPv4 addresses, as the Node does.
            (
                |it| {
                    pinned(it).mappings.clear();
                    turn_v4_off(it);
                },
                V4,
                State::Failed,
                "=0",
                "before they reach a Pod",
            ),
            (
                |it| {
                    pinned(it).mappings = [(Family::V6, 1)].into();
                    turn_v4_off(it);
                },
                V4,
                State::Warning,
                "=0",
                "if Pods have IPv4 addresses",
            ),
            (
                |it| {
                    it.datapath = Err("no".to_owned());
                    it.devices = Err("no".to_owned());
                    it.sysctls.ip_forward = is("0");
                },
                V4,
                State::Failed,
                "=0",
                "set net.ipv4.ip_forward=1",
            ),
        ]);
    }

    #[test]
    fn disabled_ipv6_forwarding_is_reported_where_pods_have_ipv6() {
        check(&[
            (
                |it| it.sysctls.ipv6_forwarding = is("0"),
                V6,
                State::Warning,
                "net.ipv6.conf.all.forwarding=0",
                "set net.ipv6.conf.all.forwarding=1, if Pods have IPv6 addresses",
            ),
            (
                |it| {
                    map_v6_pod(it);
                    it.sysctls.ipv6_forwarding = is("0");
                },
                V6,
                State::Failed,
                "=0",
                "drops IPv6 requests before they reach a Pod",
            ),
            (
                |it| {
                    it.devices = Ok(vec![device("eth0", 2, DeviceKind::Physical, &["192.0.2.10"])]);
                    it.sysctls.ipv6_forwarding = is("0");
                },
                V6,
                State::Ok,
                "the Node has no IPv6 address",
                "",
            ),
            (|it| it.sysctls.ipv6_forwarding = Setting::Missing, V6, State::Ok, "this kernel has no IPv6", ""),
        ]);
    }

    #[test]
    fn ipv4_forwarding_is_decided_by_the_incoming_device() {
        const UPLINK_OFF: &str = "net.ipv4.conf.eth0.forwarding=1";
        check(&[
            // IPv4 forwarding is on globally, but off on `eth0`.
            (|it| set_v4(&mut it.sysctls, "eth0", "0"), V4, State::Failed, "off for eth0", UPLINK_OFF),
            (|it| set_v4(&mut it.sysctls, "cali1", "0"), V4, State::Failed, "off for cali1", "replies of Pods behind"),
            // IPv4 forwarding is off globally, but on for both devices.
            (|it| it.sysctls.ip_forward = is("0"), V4, State::Ok, "net.ipv4.ip_forward=0, and on for eth0", ""),
            // Neither requests nor replies arrive on `docker0`.
            (|it| set_v4(&mut it.sysctls, "docker0", "0"), V4, State::Ok, "net.ipv4.ip_forward=1", ""),
            // Before the agent has attached its programs, the check considers the devices that will be uplinks.
            (
                |it| {
                    pinned(it).attached_devices.clear();
                    set_v4(&mut it.sysctls, "eth0", "0");
                },
                V4,
                State::Failed,
                "off for eth0",
                UPLINK_OFF,
            ),
        ]);
    }

    #[test]
    fn one_of_several_uplinks_without_forwarding_is_a_warning_unless_it_has_the_default_route() {
        check(&[
            (second_uplink, V4, State::Ok, "net.ipv4.ip_forward=1", ""),
            (
                |it| {
                    second_uplink(it);
                    set_v4(&mut it.sysctls, "eth1.5", "0");
                },
                V4,
                State::Warning,
                "off for eth1.5",
                "set net.ipv4.conf.eth1/5.forwarding=1",
            ),
            (
                |it| {
                    second_uplink(it);
                    set_v4(&mut it.sysctls, "eth0", "0");
                },
                V4,
                State::Failed,
                "off for eth0",
                "requests that arrive on eth0",
            ),
        ]);
    }

    #[test]
    fn ipv6_forwarding_is_global_unless_every_device_forces_it() {
        check(&[
            (
                |it| {
                    map_v6_pod(it);
                    it.sysctls.ipv6_force_forwarding.insert("eth0".to_owned(), is("0"));
                },
                V6,
                State::Ok,
                "net.ipv6.conf.all.forwarding=1",
                "",
            ),
            (
                |it| {
                    map_v6_pod(it);
                    it.sysctls.ipv6_forwarding = is("0");
                    force_v6(it, "eth0");
                    force_v6(it, "cali1");
                },
                V6,
                State::Ok,
                "and on for eth0",
                "",
            ),
            (
                |it| {
                    map_v6_pod(it);
                    it.sysctls.ipv6_forwarding = is("0");
                    force_v6(it, "eth0");
                },
                V6,
                State::Failed,
                "off for cali1",
                "net.ipv6.conf.cali1.force_forwarding=1",
            ),
        ]);
    }

    #[test]
    fn packets_of_a_vrf_member_are_forwarded_by_the_settings_of_the_vrf() {
        let of_vrf = |member: &str, vrf: &str| {
            let mut facts = well();
            first_device(&mut facts).master = Some(Master::Vrf);
            facts.devices.as_mut().unwrap().push(device("red", 9, DeviceKind::Vrf, &[]));
            set_v4(&mut facts.sysctls, "eth0", member);
            set_v4(&mut facts.sysctls, "red", vrf);
            super::forwarding(&facts, Family::V4).state
        };
        assert_eq!(of_vrf("0", "1"), State::Ok);
        assert_eq!(of_vrf("1", "0"), State::Failed);
    }
}
