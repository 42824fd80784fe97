// SPDX-License-Identifier: Apache-2.0
//! Tests that each of the doctor's checks is ok on a healthy Node, and that the check reports a fault if the Node has
//! the problem for which the check exists.

use super::{
    catalog::CHECKS,
    tests::{first_device, is, pinned, well},
    *,
};
use crate::core::devices::LinkLayer;

/// The key of a check, and a fault that this check must report. Further checks may report the same fault.
type Fault = (&'static str, fn(&mut Facts));

/// For each check of the doctor, a fault that the check must report.
const FAULTS: [Fault; 32] = [
    ("kernel", |it| it.kernel.is_new_enough = false),
    ("btf", |it| it.has_btf = false),
    ("bpffs", |it| it.is_bpffs_mounted = false),
    ("cap_bpf", |it| it.rights = Some(Rights { bpf: false, net_admin: true, perfmon: true })),
    ("cap_net_admin", |it| it.rights = Some(Rights { bpf: true, net_admin: false, perfmon: true })),
    ("cap_perfmon", |it| pinned(it).has_mitigated_programs = true),
    ("agent", |it| it.is_agent_running = false),
    ("api_server", |it| it.watches = Err("no socket".to_owned())),
    ("admission_policy", |it| it.is_confined = Ok(Some(false))),
    ("datapath", |it| pinned(it).attached_devices.clear()),
    ("devices", |it| first_device(it).link_layer = LinkLayer::Tagged),
    ("addresses", |it| first_device(it).addresses.push([192, 0, 2, 77].into())),
    ("annotations", |it| it.differences = Err("no socket".to_owned())),
    ("node_network", |it| it.devices = Err("EPERM".to_owned())),
    ("host_ports", |it| it.host_ports = Err("no socket".to_owned())),
    ("program_order", |it| {
        it.programs_ahead = Ok([("eth0".to_owned(), ["cil_from_netdev".to_owned()].into())].into());
    }),
    ("gro_fraglist", |it| it.devices_with_fraglists = Ok(["eth0".to_owned()].into())),
    ("cni", |it| it.rule_names = Err("EAGAIN".to_owned())),
    ("policy_engine", |it| it.rule_names = Err("EAGAIN".to_owned())),
    ("service_proxy", |it| it.rule_names = Err("EAGAIN".to_owned())),
    ("local_clients", |it| pinned(it).socket_hooks.clear()),
    ("ip_forward", |it| drop(it.sysctls.ipv4_forwarding.insert("eth0".to_owned(), is("0")))),
    ("ipv6_forwarding", |it| {
        pinned(it).mappings.insert(Family::V6, 1);
        it.sysctls.ipv6_forwarding = is("0");
    }),
    ("forward_chains", |it| it.forward_chains = Err("EPERM".to_owned())),
    ("rp_filter", |it| it.sysctls.rp_filter = Setting::Unreadable("EPERM".to_owned())),
    ("conntrack_liberal", |it| it.sysctls.tcp_be_liberal = is("0")),
    ("conntrack_timeouts", |it| it.sysctls.tcp_unacknowledged = is("300")),
    ("port_range", |it| it.sysctls.local_ports = is("1024 65535")),
    ("service_ports", |it| it.sysctls.local_ports = is("1024 65535")),
    ("nft_guard", |it| it.masquerading = Ok(Masquerading { has_nftables: true, is_done: true, guarded: None })),
    ("reply_routes", |it| it.routing = Err("EPERM".to_owned())),
    ("incoming_rules", |it| it.routing = Err("EPERM".to_owned())),
];

/// The test also fails if a check has no fault in the list.
#[test]
fn every_check_is_ok_on_a_healthy_node_and_reports_its_fault() {
    let healthy = examine(&well());
    let keys = |findings: &[Finding]| findings.iter().map(|finding| finding.key).collect::<Vec<_>>();
    assert_eq!(keys(&healthy), FAULTS.map(|(key, _)| key));
    assert_eq!(keys(&healthy), CHECKS.iter().map(|check| check.key).collect::<Vec<_>>());
    for (key, fault) in FAULTS {
        let state = |findings: &[Finding]| findings.iter().find(|finding| finding.key == key).map(|it| it.state);
        assert_eq!(state(&healthy), Some(State::Ok), "{key}");
        let mut facts = well();
        fault(&mut facts);
        let found = examine(&facts);
        assert_ne!(state(&found), Some(State::Ok), "{key} does not report its fault");
        found.iter().for_each(assert_described);
    }
}

/// Asserts that [`CHECKS`], from which `docs/reference/doctor.md` is generated, describes the finding's state, and that
/// a finding that is not ok names the section about its check.
pub(super) fn assert_described(finding: &Finding) {
    let Finding { key, state, .. } = finding;
    let check = CHECKS.iter().find(|check| check.key == *key).unwrap();
    let meaning = check.states.iter().find(|(described, _)| described == state);
    assert!(meaning.is_some(), "docs/reference/doctor.md does not describe the state {state:?} of {key}");
    let page = (*state != State::Ok).then(|| format!("docs/reference/doctor.md#{key}"));
    assert_eq!(finding.page(), page);
}
