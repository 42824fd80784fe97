// SPDX-License-Identifier: Apache-2.0
//! The doctor's findings about the CNI, the policy engines and the Service proxy of the Node.

use super::{Facts, Finding, kernel::ASK_AS_ROOT};
use crate::core::{
    devices::redirect::Forwarding,
    networks::{CILIUM_HOST, Network, Role, recognize},
};

/// Returns the software of this role that NPL recognizes on the Node.
fn found(facts: &Facts, role: Role) -> Result<Vec<&'static Network>, String> {
    let devices = facts.devices.as_ref().map_err(Clone::clone)?;
    let rules = facts.rule_names.as_ref().map_err(Clone::clone)?;
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    Ok(recognize(&names, rules).filter(|network| network.role == role).collect())
}

fn shown(networks: &[&Network]) -> String {
    networks.iter().map(|it| format!("{}: {}", it.name, it.with_npl)).collect::<Vec<_>>().join("; ").replace('`', "")
}

/// Returns the finding that names the Node's CNI or Service proxy.
pub(super) fn recognized(facts: &Facts, role: Role) -> Finding {
    let (key, name) = role.names();
    match found(facts, role) {
        Ok(networks) if networks.is_empty() => Finding::ok(key, format!("no known {name} found")),
        Ok(networks) => Finding::ok(key, shown(&networks)),
        Err(reason) => Finding::unknown(key, reason, ASK_AS_ROOT),
    }
}

/// Returns the finding that names the Node's policy engines: a warning if redirected packets bypass the rules of an
/// engine, or if the agent refuses redirect because of an engine.
pub(super) fn policy_engine(facts: &Facts) -> Finding {
    let (key, name) = Role::PolicyEngine.names();
    let networks = match found(facts, Role::PolicyEngine) {
        Ok(networks) => networks,
        Err(reason) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    let bypassed: Vec<&str> =
        networks.iter().filter(|network| network.is_bypassed_by_redirect).map(|it| it.name).collect();
    let datapath = facts.datapath.as_ref().ok();
    let is_redirecting = datapath.is_some_and(|it| it.forwarding == Some(Forwarding::Redirect));
    if !bypassed.is_empty() && datapath.is_some_and(|it| it.is_redirect_refused) {
        return Finding::warning(
            key,
            format!("--forwarding redirect is refused: NetworkPolicy of {} would not apply", bypassed.join(", ")),
            "the host's stack forwards all packets: set --forwarding stack or offload, or --ignore-network-policy if \
             node ports need no NetworkPolicy",
        );
    }
    if !bypassed.is_empty() && is_redirecting {
        return Finding::warning(
            key,
            format!("redirected packets bypass the NetworkPolicy of {}", bypassed.join(", ")),
            "every client reaches the node ports of redirected Pods: set --forwarding stack or offload, or restrict \
             clients by allowed-source-ranges",
        );
    }
    if networks.is_empty() {
        return Finding::ok(key, format!("no known {name} found"));
    }
    Finding::ok(key, shown(&networks))
}

/// The lowest port that Cilium, by default, may choose as the source port of a masqueraded connection.
const CILIUM_FIRST_PORT: u16 = 32_768;

/// Whether Cilium may choose node ports as source ports of masqueraded connections. If Cilium masquerades by eBPF, a
/// program of Cilium is attached at egress of an uplink.
pub(super) fn is_masqueraded_by_cilium(facts: &Facts) -> bool {
    let reaches = facts.datapath.as_ref().ok().and_then(|it| it.port_range.as_ref());
    let reaches = reaches.is_some_and(|range| range.end().0 >= CILIUM_FIRST_PORT);
    let devices = facts.devices.as_deref().unwrap_or_default();
    reaches && facts.has_others_at_egress && devices.iter().any(|device| device.name == CILIUM_HOST)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            State,
            tests::{check, pinned},
        },
        *,
    };
    use crate::core::{
        devices::{Device, DeviceKind},
        networks::tests::rules,
    };

    fn add_device(facts: &mut Facts, name: &str) {
        facts.devices.as_mut().unwrap().push(Device::new(9, name, DeviceKind::Veth));
    }

    fn calico(facts: &mut Facts) {
        facts.rule_names = Ok(rules(&["filter", "nat"], &["FORWARD", "cali-FORWARD", "KUBE-SERVICES"]));
    }

    #[test]
    fn cni_policy_engine_and_service_proxy_are_named_with_their_effect() {
        check(&[
            (|it| add_device(it, "flannel.1"), "cni", State::Ok, "flannel: works without settings", ""),
            (|it| it.devices.as_mut().unwrap().truncate(1), "cni", State::Ok, "no known CNI found", ""),
            (calico, "policy_engine", State::Ok, "Calico: its policies apply with stack and offload", ""),
            (|_| (), "policy_engine", State::Ok, "no known policy engine found", ""),
            (calico, "service_proxy", State::Ok, "kube-proxy (iptables)", ""),
        ]);
        let mut unreadable = super::super::tests::well();
        unreadable.rule_names = Err("EPERM".to_owned());
        for key in ["cni", "policy_engine", "service_proxy"] {
            let findings = super::super::examine(&unreadable);
            let finding = findings.iter().find(|finding| finding.key == key).unwrap();
            assert_eq!((finding.state, finding.found.as_str()), (State::Unknown, "EPERM"));
        }
    }

    #[test]
    fn redirect_with_a_policy_engine_in_netfilter_is_a_warning_whether_refused_or_not() {
        check(&[
            (
                |it| {
                    calico(it);
                    pinned(it).is_redirect_refused = true;
                },
                "policy_engine",
                State::Warning,
                "--forwarding redirect is refused: NetworkPolicy of Calico",
                "--ignore-network-policy",
            ),
            (
                |it| {
                    calico(it);
                    pinned(it).forwarding = Some(Forwarding::Redirect);
                },
                "policy_engine",
                State::Warning,
                "redirected packets bypass the NetworkPolicy of Calico",
                "allowed-source-ranges",
            ),
            (
                |it| {
                    calico(it);
                    pinned(it).forwarding = Some(Forwarding::Offload);
                },
                "policy_engine",
                State::Ok,
                "Calico",
                "",
            ),
            (|it| pinned(it).forwarding = Some(Forwarding::Redirect), "policy_engine", State::Ok, "no known", ""),
        ]);
    }

    #[test]
    fn a_port_range_that_cilium_masquerades_to_is_a_warning() {
        fn cilium(facts: &mut Facts) {
            add_device(facts, "cilium_host");
            facts.has_others_at_egress = true;
        }
        check(&[
            (cilium, "port_range", State::Warning, "from 32768-65535", "28000-29000"),
            (|it| add_device(it, "cilium_host"), "port_range", State::Ok, "61000-62000", ""),
            (|it| it.has_others_at_egress = true, "port_range", State::Ok, "61000-62000", ""),
            (
                |it| {
                    cilium(it);
                    pinned(it).port_range = "28000-29000".parse().ok();
                },
                "port_range",
                State::Ok,
                "28000-29000",
                "",
            ),
        ]);
    }
}
