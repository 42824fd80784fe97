// SPDX-License-Identifier: Apache-2.0
//! Tests the doctor's checks with the facts of a healthy Node, and with the facts of a Node that has a fault.

use super::{reported::assert_described, *};
use crate::core::devices::{
    DeviceKind,
    reply_routing::{DefaultRoute, MAIN_TABLE, Mark, RoutingRule, Selector},
};

const UPLINK: u32 = 2;

/// One test case: a function that adds a fault to the facts of a healthy Node, and the expected finding (key of the
/// check, state, part of the text, part of the advice).
type Row = (fn(&mut Facts), &'static str, State, &'static str, &'static str);

pub(super) fn is(value: &str) -> Setting {
    Setting::Is(value.to_owned())
}

pub(super) fn device(name: &str, ifindex: u32, kind: DeviceKind, addresses: &[&str]) -> Device {
    let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
    Device { addresses, ..Device::new(ifindex, name, kind) }
}

fn watch(resource: &str) -> WatchView {
    WatchView { resource: resource.to_owned(), heard_millis_ago: Some(1_000), failure: None }
}

/// The facts of a healthy Node with addresses of both families, a running agent, and IPv4 mappings.
pub(super) fn well() -> Facts {
    Facts {
        kernel: Kernel {
            release: "6.12.0".to_owned(),
            needed: KernelFloor::of("x86_64"),
            is_new_enough: true,
            has_tcx: true,
            translates_fraglists: false,
        },
        has_btf: true,
        bpffs: "/sys/fs/bpf".to_owned(),
        is_bpffs_mounted: true,
        rights: Some(Rights { bpf: true, net_admin: true, perfmon: false }),
        is_agent_running: true,
        is_confined: Ok(Some(true)),
        pods_on_node_network: Ok([].into()),
        watches: Ok(["pods", "services", "nodes"].map(watch).to_vec()),
        differences: Ok([].into()),
        host_ports: Ok(Vec::new()),
        datapath: Ok(DatapathFacts {
            is_installed: true,
            has_mitigated_programs: false,
            attached_devices: [UPLINK].into(),
            addresses: ["192.0.2.10", "2001:db8::10"].map(|text| text.parse().unwrap()).into(),
            socket_hooks: vec!["connect4", "connect6"],
            port_range: "61000-62000".parse().ok(),
            mappings: [(Family::V4, 3)].into(),
            pod_ports: [("10.0.64.7".parse().unwrap(), [(Protocol::Tcp, PodPort(8080))].into())].into(),
            forwarding: None,
            redirected: [].into(),
            is_redirect_refused: false,
        }),
        cgroup: Some("/sys/fs/cgroup".to_owned()),
        devices: Ok(vec![
            device("eth0", UPLINK, DeviceKind::Physical, &["192.0.2.10", "2001:db8::10"]),
            device("cali1", 3, DeviceKind::Veth, &[]),
        ]),
        pod_devices: [("10.0.64.7".parse().unwrap(), 3)].into(),
        devices_with_fraglists: Ok([].into()),
        sysctls: Sysctls {
            ip_forward: is("1"),
            ipv4_forwarding: ["eth0", "cali1"].map(|name| (name.to_owned(), is("1"))).into(),
            ipv6_forwarding: is("1"),
            ipv6_force_forwarding: BTreeMap::new(),
            rp_filter: is("0"),
            rp_filters: ["eth0", "cali1"].map(|name| (name.to_owned(), is("1"))).into(),
            tcp_be_liberal: is("1"),
            tcp_unacknowledged: is("432000"),
            tcp_established: is("432000"),
            local_ports: is("32768\t60999"),
            reserved_ports: is(""),
        },
        masquerading: Ok(Masquerading { has_nftables: true, is_done: true, guarded: Some(3) }),
        forward_chains: Ok(ForwardChains::default()),
        routing: Ok(Routing::default()),
        markings: Ok([].into()),
        programs_ahead: Ok([].into()),
        has_others_at_egress: false,
        rule_names: Ok(RuleNames::default()),
    }
}

pub(super) fn pinned(facts: &mut Facts) -> &mut DatapathFacts {
    facts.datapath.as_mut().unwrap()
}

pub(super) fn first_device(facts: &mut Facts) -> &mut Device {
    facts.devices.as_mut().unwrap().first_mut().unwrap()
}

pub(super) fn nothing_pinned(facts: &mut Facts) {
    facts.datapath = Ok(DatapathFacts::default());
}

/// For each row, asserts that the row's change of the facts gives the row's finding, and that all other checks have the
/// same state as on a healthy Node.
pub(super) fn check(rows: &[Row]) {
    let usual = examine(&well());
    for (number, (change, key, state, found, advice)) in rows.iter().enumerate() {
        let mut facts = well();
        change(&mut facts);
        let findings = examine(&facts);
        let finding = findings.iter().find(|finding| finding.key == *key).unwrap();
        assert_eq!(finding.state, *state, "row {number}: {finding:?}");
        findings.iter().for_each(assert_described);
        assert!(finding.found.contains(found), "row {number}: {finding:?}");
        let advised = finding.advice.as_deref().unwrap_or_default();
        assert!(advised.contains(advice), "row {number}: {finding:?}");
        assert_eq!(advised.is_empty(), *state == State::Ok, "row {number}: {finding:?}");
        let changed = findings.iter().zip(&usual).filter(|(now, usual)| now.state != usual.state);
        let others: Vec<_> = changed.map(|(now, _)| now.key).filter(|other| other != key).collect();
        // Several checks use the pinned maps and programs, the list of devices, the policy routing rules,
        // `ip_local_port_range`, the BPF file system, and whether an agent runs.
        let matters_to_many = facts.datapath != well().datapath
            || facts.devices.is_err()
            || facts.routing.is_err()
            || facts.sysctls.local_ports != well().sysctls.local_ports
            || !facts.is_bpffs_mounted
            || !facts.is_agent_running;
        assert!(others.is_empty() || matters_to_many, "row {number} also changes {others:?}");
    }
}

#[test]
fn every_check_of_a_healthy_node_is_ok_and_gives_no_advice() {
    let findings = examine(&well());
    let keys: Vec<&str> = findings.iter().map(|finding| finding.key).collect();
    let expected = [
        "kernel",
        "btf",
        "bpffs",
        "cap_bpf",
        "cap_net_admin",
        "cap_perfmon",
        "agent",
        "api_server",
        "admission_policy",
        "datapath",
        "devices",
        "addresses",
        "annotations",
        "node_network",
        "host_ports",
        "program_order",
        "gro_fraglist",
        "cni",
        "policy_engine",
        "service_proxy",
        "local_clients",
        "ip_forward",
        "ipv6_forwarding",
        "forward_chains",
        "rp_filter",
        "conntrack_liberal",
        "conntrack_timeouts",
        "port_range",
        "service_ports",
        "nft_guard",
        "reply_routes",
        "incoming_rules",
    ];
    assert_eq!(keys, expected);
    for finding in findings {
        assert_eq!((finding.state, &finding.advice), (State::Ok, &None), "{finding:?}");
    }
}

#[test]
fn a_missing_kernel_feature_is_reported() {
    check(&[
        (|it| it.kernel.is_new_enough = false, "kernel", State::Failed, "Linux 6.12.0", "run Linux 5.10 or newer"),
        (
            |it| (it.kernel.is_new_enough, it.kernel.needed) = (false, KernelFloor::of("aarch64")),
            "kernel",
            State::Failed,
            "Linux 6.12.0",
            "run Linux 6.1 or newer (arm64 kernels before 6.0 refuse",
        ),
        (|it| it.has_btf = false, "btf", State::Warning, "/sys/kernel/btf/vmlinux", "CONFIG_DEBUG_INFO_BTF"),
        (
            |it| it.is_bpffs_mounted = false,
            "bpffs",
            State::Failed,
            "no BPF file system is mounted at /sys/fs/bpf",
            "mount -t bpf",
        ),
    ]);
}

#[test]
fn required_capabilities_are_distinguished_from_optional_ones() {
    let held = |bpf, net_admin, perfmon| Some(Rights { bpf, net_admin, perfmon });
    let state_of = |rights, key| {
        let mut facts = well();
        facts.rights = rights;
        let finding = examine(&facts).into_iter().find(|finding| finding.key == key).unwrap();
        (finding.state, finding.found)
    };
    assert_eq!(state_of(held(false, true, true), "cap_bpf").0, State::Failed);
    assert_eq!(state_of(held(false, true, true), "cap_net_admin").0, State::Ok);
    assert_eq!(state_of(held(true, false, true), "cap_net_admin").0, State::Failed);
    for key in ["cap_bpf", "cap_net_admin", "cap_perfmon"] {
        assert_eq!(state_of(None, key).0, State::Unknown, "{key}");
    }
}

#[test]
fn the_capabilities_of_the_loader_decide_the_speed_of_the_programs() {
    let of = |is_held, has_tcx, is_installed, has_mitigated_programs| {
        let mut facts = well();
        facts.rights = Some(Rights { bpf: true, net_admin: true, perfmon: is_held });
        facts.kernel.has_tcx = has_tcx;
        facts.datapath =
            facts.datapath.map(|datapath| DatapathFacts { is_installed, has_mitigated_programs, ..datapath });
        let finding = examine(&facts).into_iter().find(|finding| finding.key == "cap_perfmon").unwrap();
        (finding.state, finding.found, finding.advice.unwrap_or_default())
    };
    for is_held in [true, false] {
        let (state, found, _) = of(is_held, true, true, false);
        assert!(state == State::Ok && found.contains("were loaded with the capability"), "{found}");
        let (state, found, advice) = of(is_held, true, true, true);
        assert!(state == State::Warning && found.contains("were loaded without the capability"), "{found}");
        assert!(advice.contains("npl-agent load") && !advice.contains("helper"), "{advice}");
        let (_, _, advice) = of(is_held, false, true, true);
        assert!(advice.contains("read packets by a helper"), "{advice}");
    }
    assert_eq!(of(true, true, false, false).1, "held");
    let (state, found, _) = of(false, true, false, false);
    assert!(state == State::Ok && found.contains("this process does not have the capability"), "{found}");
}

/// The case of cilium/cilium#12317: if the only devices with programs are tunnels, the agent publishes no annotations.
#[test]
fn a_datapath_on_tunnels_alone_is_reported_unless_the_agent_has_published_mappings() {
    fn on_a_tunnel(facts: &mut Facts) {
        first_device(facts).kind = DeviceKind::Tunnel;
        pinned(facts).mappings.clear();
    }
    check(&[
        (on_a_tunnel, "datapath", State::Failed, "only tunnels have programs: eth0", "--devices"),
        (
            |it| {
                on_a_tunnel(it);
                pinned(it).mappings = [(Family::V4, 3)].into();
            },
            "datapath",
            State::Ok,
            "mappings: 3",
            "",
        ),
        (
            |it| {
                on_a_tunnel(it);
                first_device(it).has_default_route = true;
            },
            "datapath",
            State::Ok,
            "mappings: 0",
            "",
        ),
    ]);
}

#[test]
fn a_missing_or_unattached_datapath_is_reported() {
    let no_devices: Row = (
        |it| pinned(it).attached_devices = [].into(),
        "datapath",
        State::Failed,
        "no device has programs for both directions; mappings: 3",
        "--devices",
    );
    check(&[
        no_devices,
        (
            |it| pinned(it).attached_devices = [99].into(),
            "datapath",
            State::Failed,
            "no device",
            "no client outside the Node",
        ),
        (|_| {}, "datapath", State::Ok, "programs on eth0; mappings: 3", ""),
        (|it| it.datapath = Err("no".to_owned()), "datapath", State::Unknown, "no", "as root"),
        (
            |it| it.is_bpffs_mounted = false,
            "datapath",
            State::Unknown,
            "no BPF file system is mounted",
            "see the check bpffs",
        ),
        (nothing_pinned, "datapath", State::Failed, "nothing is pinned below /sys/fs/bpf", "--bpffs"),
        (
            |it| {
                nothing_pinned(it);
                it.is_agent_running = false;
            },
            "datapath",
            State::Warning,
            "nothing is pinned",
            "start the agent",
        ),
        (|it| it.is_agent_running = false, "agent", State::Warning, "not running", "are not applied"),
        (
            |it| {
                nothing_pinned(it);
                it.is_agent_running = false;
            },
            "agent",
            State::Warning,
            "not running",
            "no Pod of this Node gets a node port",
        ),
    ]);
}

#[test]
fn an_agent_that_no_admission_policy_confines_is_reported() {
    const KEY: &str = "admission_policy";
    check(&[
        (|_| {}, KEY, State::Ok, "restricts the agent's writes", ""),
        (|it| it.is_confined = Ok(Some(false)), KEY, State::Warning, "no admission policy", "deploy/npl.yaml"),
        (|it| it.is_confined = Ok(None), KEY, State::Unknown, "not found out", "check again"),
        (|it| it.is_confined = Err("no socket".to_owned()), KEY, State::Unknown, "no socket", "--runtime-dir"),
        (
            |it| {
                it.is_agent_running = false;
                it.is_confined = Err("no socket".to_owned());
            },
            KEY,
            State::Ok,
            "no agent runs",
            "",
        ),
    ]);
}

#[test]
fn missing_cgroup_hierarchy_or_socket_programs_are_reported() {
    check(&[
        (|_| {}, "local_clients", State::Ok, "served by connect4, connect6", ""),
        (
            |it| pinned(it).socket_hooks.clear(),
            "local_clients",
            State::Warning,
            "not served; cgroup v2 is at /sys/fs/cgroup",
            "--cgroup",
        ),
        (
            |it| {
                it.cgroup = None;
                pinned(it).socket_hooks.clear();
            },
            "local_clients",
            State::Warning,
            "no cgroup v2",
            "mount -t cgroup2",
        ),
        (nothing_pinned, "local_clients", State::Ok, "cgroup v2 is at /sys/fs/cgroup", ""),
    ]);
}

/// Redirects the packets of all mapped Pods.
pub(super) fn redirect_all_pods(facts: &mut Facts) {
    let datapath = pinned(facts);
    datapath.forwarding = Some(Forwarding::Redirect);
    datapath.redirected = datapath.pods();
}

/// Gives the mapped Pod a routing table of its own with a default route through this device. Marks route the Pod's
/// replies by the main table.
fn route_pod_through(facts: &mut Facts, ifindex: u32) {
    let (family, mark) = (Family::V4, Mark::new(0x80, 0x80).unwrap());
    let rule = |selector, table| RoutingRule { family, selector, table };
    let pod = Selector::Source("10.0.64.7".parse().unwrap());
    let default_routes = [(MAIN_TABLE, UPLINK), (100, ifindex)];
    facts.routing = Ok(Routing {
        rules: vec![rule(Selector::Mark(mark), MAIN_TABLE), rule(pod, 100)],
        default_routes: default_routes.map(|(table, ifindex)| DefaultRoute { family, table, ifindex }).into(),
        ..Routing::default()
    });
    facts.markings = Ok([Marking { family, ifindex: UPLINK, mark }].into());
}

#[test]
fn a_reverse_path_filter_that_drops_requests_to_a_node_address_with_a_routing_table_is_reported() {
    let mut facts = well();
    route_address_through(&mut facts, UPLINK, 9);
    let findings = examine(&facts);
    let states = ["rp_filter", "reply_routes"]
        .map(|key| findings.iter().find(|finding| finding.key == key).map(|finding| (finding.state, &finding.found)));
    assert!(matches!(states[0], Some((State::Warning, found)) if found.contains("gives a Node address")), "{states:?}");
    assert!(matches!(states[1], Some((State::Warning, _))), "{states:?}");
}

/// Gives a Node address a routing table of its own with a default route through the device `of_address`. The default
/// route of the main table leads through the device `of_main`.
fn route_address_through(facts: &mut Facts, of_address: u32, of_main: u32) {
    let family = Family::V4;
    let address = *pinned(facts).addresses.iter().find(|address| address.is_ipv4()).unwrap();
    let default_routes = [(MAIN_TABLE, of_main), (100, of_address)];
    facts.routing = Ok(Routing {
        rules: vec![RoutingRule { family, selector: Selector::Source(address), table: 100 }],
        default_routes: default_routes.map(|(table, ifindex)| DefaultRoute { family, table, ifindex }).into(),
        ..Routing::default()
    });
}

#[test]
fn reverse_path_filters_are_shown_by_the_greater_setting_and_reported_if_they_drop_requests() {
    check(&[
        (|_| {}, "rp_filter", State::Ok, "strict on eth0", ""),
        (|it| it.sysctls.rp_filter = is("2"), "rp_filter", State::Ok, "loose on eth0", ""),
        (
            |it| drop(it.sysctls.rp_filters.insert("eth0".to_owned(), is("0"))),
            "rp_filter",
            State::Ok,
            "off on eth0",
            "",
        ),
        (|it| it.sysctls.rp_filter = Setting::Unreadable("why".to_owned()), "rp_filter", State::Unknown, "why", "root"),
    ]);
    check(&[
        (
            |it| route_pod_through(it, 9),
            "rp_filter",
            State::Warning,
            "strict on eth0; policy routing rules",
            "drops requests to these Pods that arrive on eth0: set rp_filter to 2",
        ),
        (|it| route_pod_through(it, UPLINK), "rp_filter", State::Ok, "strict on eth0", ""),
        (
            |it| {
                route_pod_through(it, 9);
                it.sysctls.rp_filter = is("2");
            },
            "rp_filter",
            State::Ok,
            "loose on eth0",
            "",
        ),
        (
            |it| {
                route_pod_through(it, 9);
                redirect_all_pods(it);
            },
            "rp_filter",
            State::Ok,
            "strict on eth0",
            "",
        ),
    ]);
    check(&[
        (|it| route_address_through(it, 9, UPLINK), "rp_filter", State::Ok, "strict on eth0", ""),
        (|it| route_address_through(it, UPLINK, UPLINK), "rp_filter", State::Ok, "strict on eth0", ""),
        (
            |it| {
                route_address_through(it, UPLINK, 9);
                redirect_all_pods(it);
            },
            "rp_filter",
            State::Ok,
            "strict on eth0",
            "",
        ),
    ]);
    let finding = examine(&well()).into_iter().find(|finding| finding.key == "rp_filter").unwrap();
    assert!(!finding.found.contains("cali1"), "cali1 leads to a Pod: {finding:?}");
}

#[test]
fn strict_kernel_conntrack_is_reported_for_offload() {
    const KEY: &str = "conntrack_liberal";
    check(&[
        (
            |it| it.sysctls.tcp_be_liberal = is("0"),
            KEY,
            State::Warning,
            "tcp_be_liberal=0",
            "only --forwarding offload needs this setting",
        ),
        (|it| it.sysctls.tcp_be_liberal = is("0"), KEY, State::Warning, "", "nf_conntrack_tcp_be_liberal=1"),
        (|it| it.sysctls.tcp_be_liberal = Setting::Missing, KEY, State::Ok, "kernel conntrack is not loaded", ""),
        (|it| it.sysctls.tcp_be_liberal = Setting::Unreadable("why".to_owned()), KEY, State::Unknown, "why", "root"),
    ]);
}

#[test]
fn short_conntrack_timeouts_are_reported_for_offload() {
    const KEY: &str = "conntrack_timeouts";
    check(&[
        (|it| it.sysctls.tcp_unacknowledged = is("300"), KEY, State::Warning, "unacknowledged=300", "=432000"),
        (|it| it.sysctls.tcp_established = is("300"), KEY, State::Ok, "unacknowledged=432000", ""),
        (|it| it.sysctls.tcp_unacknowledged = Setting::Missing, KEY, State::Ok, "kernel conntrack is not loaded", ""),
        (|it| it.sysctls.tcp_established = Setting::Unreadable("why".to_owned()), KEY, State::Unknown, "why", "root"),
    ]);
}

#[test]
fn ephemeral_ports_among_the_node_ports_of_services_are_reported_unless_reserved() {
    const KEY: &str = "service_ports";
    let mut facts = well();
    let mut state = |local: &str, reserved: &str| {
        (facts.sysctls.local_ports, facts.sysctls.reserved_ports) = (is(local), is(reserved));
        examine(&facts).into_iter().find(|finding| finding.key == KEY).unwrap()
    };
    assert_eq!(state("32768 60999", "").state, State::Ok);
    let finding = state("1024 65535", "61000-62000");
    assert_eq!(finding.state, State::Warning);
    assert!(finding.advice.unwrap().contains("add 30000-32767 to net.ipv4.ip_local_reserved_ports"));
    assert_eq!(state("1024 65535", "30000-32767,61000-62000").state, State::Ok);
    assert_eq!(state("nonsense", "").state, State::Unknown);
}

#[test]
fn ephemeral_ports_in_the_range_are_reported_unless_reserved() {
    const KEY: &str = "port_range";
    check(&[
        (|it| it.sysctls.local_ports = is("1024 65535"), KEY, State::Warning, "61000-62000", "ip_local_reserved_ports"),
        (
            |it| {
                it.sysctls.local_ports = is("1024 65535");
                it.sysctls.reserved_ports = is("61000-62000");
            },
            KEY,
            State::Ok,
            "61000-62000; ephemeral ports of outgoing connections are 1024-65535",
            "",
        ),
        (|it| it.sysctls.local_ports = Setting::Missing, KEY, State::Unknown, "cannot be read", "/proc"),
        (
            |it| pinned(it).port_range = "31000-32000".parse().ok(),
            KEY,
            State::Warning,
            "31000-32000",
            "Services of type NodePort",
        ),
        (|it| pinned(it).port_range = None, KEY, State::Unknown, "32768-60999", "does not overlap the ephemeral ports"),
    ]);
}
