// SPDX-License-Identifier: Apache-2.0

use clap::{CommandFactory, Parser};

use super::{CgroupSelection, ClientScope, Config, ConfigError, DeviceSelection};
use crate::{
    config::args::{Cli, Command},
    core::{
        devices::{
            redirect::{Forwarding, NetworkPolicy},
            xdp::Attach,
        },
        model::{
            Protocol,
            namespaces::Namespaces,
            settings::{NodeIpSource, ProtocolPairing},
        },
        sizes::MaxFlows,
    },
    nft_guard::GuardMode,
};

fn parse(line: &[&str]) -> Result<Config, ConfigError> {
    let cli = Cli::try_parse_from(line).map_err(|err| ConfigError::from_clap(&err).expect("a refused value"))?;
    let Command::Run(args) = cli.command else { panic!("{:?}", cli.command) };
    Config::try_from(*args)
}

fn config(flags: &[&str]) -> Result<Config, ConfigError> {
    parse(&[&["npl-agent", "run", "--node-name", "worker-1"], flags].concat())
}

/// The error sentence that the agent prints for these flags.
fn complaint(flags: &[&str]) -> String {
    config(flags).unwrap_err().to_string()
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn every_flag_has_a_help_text_and_every_flag_of_run_has_a_variable() {
    for command in Cli::command().get_subcommands() {
        let is_setting = ["run", "load", "cleanup", "doctor"].contains(&command.get_name());
        for flag in command.get_arguments().filter(|flag| !matches!(flag.get_id().as_str(), "help" | "version")) {
            let name = flag.get_long().unwrap_or_default();
            let variable = format!("NPL_{}", name.to_ascii_uppercase().replace('-', "_"));
            if is_setting || flag.get_env().is_some() {
                assert_eq!(flag.get_env(), Some(variable.as_ref()), "--{name}");
            }
            assert!(flag.get_help().is_some(), "--{name}");
        }
    }
}

#[test]
fn protocol_pairing_is_separate_or_merged() {
    let pairing = |text: &str| config(&["--protocol-pairing", text]).map(|config| config.settings.protocol_pairing);
    assert_eq!(pairing("merged"), Ok(ProtocolPairing::Merged));
    assert_eq!(pairing("separate"), Ok(ProtocolPairing::Separate));
    assert_eq!(
        complaint(&["--protocol-pairing", "both"]),
        "--protocol-pairing: protocol pairing \"both\" is not known: give separate or merged"
    );
}

#[test]
fn node_ports_can_be_requested_only_with_the_flag() {
    assert!(!config(&[]).unwrap().settings.requested_node_ports);
    assert!(config(&["--requested-node-ports"]).unwrap().settings.requested_node_ports);
}

#[test]
fn unset_flags_have_their_documented_defaults() {
    let config = config(&[]).unwrap();
    assert_eq!(config.settings.port_range.to_string(), "61000-62000");
    assert_eq!(config.settings.protocols, [Protocol::Tcp, Protocol::Udp]);
    assert_eq!(config.settings.protocol_pairing, ProtocolPairing::Separate);
    assert_eq!(config.settings.node_ip, NodeIpSource::Internal);
    assert_eq!((config.settings.drain_millis, config.settings.quarantine_millis), (30_000, 60_000));
    assert_eq!(config.devices, DeviceSelection::Auto);
    assert_eq!((config.attach, config.forwarding), (Attach::Tc, Forwarding::Stack));
    assert_eq!(config.network_policy, NetworkPolicy::Applies);
    assert_eq!(config.annotation_keys.enabled, "nodeportlocal.antrea.io/enabled");
    assert_eq!(config.annotation_keys.mapping, "nodeportlocal.antrea.io");
    assert_eq!((config.settings.namespaces, config.service_selector), (Namespaces::default(), None));
    assert_eq!(config.resync.as_secs(), 30);
    assert_eq!((config.cgroup, config.local_clients), (CgroupSelection::Auto, ClientScope::All));
    assert_eq!(config.guard, GuardMode::Auto);
    assert_eq!(config.listen.to_string(), "127.0.0.1:9911");
    assert_eq!(config.metrics_listen, None);
}

#[test]
fn the_number_of_flows_is_auto_or_a_number() {
    let max_flows = |flags: &[&str]| config(flags).unwrap().max_flows;
    assert_eq!(max_flows(&[]), MaxFlows::Auto);
    assert_eq!(max_flows(&["--max-flows", "auto"]), MaxFlows::Auto);
    assert_eq!(max_flows(&["--max-flows", "500000"]), MaxFlows::Flows(500_000));
}

#[test]
fn network_policy_is_ignored_on_demand_only() {
    let config = config(&["--forwarding", "redirect", "--ignore-network-policy"]).unwrap();
    assert_eq!((config.forwarding, config.network_policy), (Forwarding::Redirect, NetworkPolicy::Ignored));
}

#[test]
fn durations_have_units_and_may_be_combined() {
    for (text, millis) in [("500ms", 500), ("30s", 30_000), ("2m", 120_000), ("1h", 3_600_000), ("1m30s", 90_000)] {
        assert_eq!(config(&["--drain", text]).unwrap().settings.drain_millis, millis, "{text}");
    }
    assert_eq!(config(&["--quarantine", "0s"]).unwrap().settings.quarantine_millis, 0);
}

#[test]
fn protocols_are_named_in_any_order_and_case() {
    let protocols = |list: &str| config(&["--protocols", list]).unwrap().settings.protocols;
    assert_eq!(protocols("sctp, UDP,tcp,udp"), [Protocol::Tcp, Protocol::Udp, Protocol::Sctp]);
    assert_eq!(protocols("tcp"), [Protocol::Tcp]);
}

#[test]
fn namespaces_are_named_or_all() {
    let namespaces = |text: &str| config(&["--namespaces", text]).unwrap().settings.namespaces;
    assert_eq!(namespaces(""), Namespaces::default());
    assert_eq!(namespaces("shop, billing").to_string(), "billing,shop");
}

#[test]
fn a_selector_of_services_is_kept_as_it_is_written() {
    let selector = "tier in (web, api),!canary";
    assert_eq!(config(&["--service-selector", selector]).unwrap().service_selector.as_deref(), Some(selector));
}

#[test]
fn devices_are_named_once_each() {
    let named = config(&["--devices", "eth0, eth1,eth0"]).unwrap().devices;
    assert_eq!(named, DeviceSelection::Named(vec!["eth0".to_owned(), "eth1".to_owned()]));
}

#[test]
fn invalid_values_are_refused_with_the_flag_and_an_example() {
    for (flag, value, expected) in [
        ("--drain", "30", "not a duration: give a number and a unit, for example 30s"),
        ("--drain", "", "not a duration"),
        ("--drain", "s", "not a duration"),
        ("--drain", "1.5s", "not a duration"),
        ("--quarantine", "-1s", "not a duration"),
        ("--quarantine", "25h", "longer than a day"),
        ("--quarantine", "99999999999999999999h", "longer than a day"),
        ("--resync", "10ms", "shorter than a second: give for example 30s"),
        ("--port-range", "62000-61000", "for example 61000-62000"),
        ("--node-ip", "127.0.0.1", "not an address that clients can reach"),
        ("--node-ip", "0.0.0.0", "not an address that clients can reach"),
        ("--node-ip", "192.0.2.1,192.0.2.2", "more than one IPv4 address"),
        ("--node-ip", "eth0", "neither internal nor external"),
        ("--node-ip", "10.0.0.0/33", "for example 192.0.2.10 or 10.0.0.0/8"),
        ("--annotation-format", "v3", "give v1.7, v2.0 or v2.6"),
        ("--annotation-domain", "Example.com", "for example nodeportlocal.antrea.io"),
        ("--annotation-domain", "example.com/x", "not an annotation domain"),
        ("--annotation-domain", "", "not an annotation domain"),
        ("--namespaces", "shop,,billing", "\"\" is not the name of a namespace: give names of at most 63 lower-case"),
        ("--namespaces", "Shop", "for example shop,billing"),
        ("--namespaces", "shop,shop", "namespace \"shop\" is in the list twice: give each namespace once"),
        ("--namespaces", "a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q", "the list has 17 namespaces, and at most 16 are allowed"),
        ("--service-selector", "npl of (yes)", "for example example.com/npl=yes"),
        ("--service-selector", "", "not a label selector"),
        ("--protocols", "tcp,icmp", "give tcp, udp or sctp with commas between them"),
        ("--protocols", "", "not a list of protocols"),
        ("--devices", "eth0,,eth1", "for example eth0,eth1"),
        ("--devices", "a-name-of-16-by.", "not a list of devices"),
        ("--devices", "../x", "not a list of devices"),
        ("--attach", "generic", "give tc, auto or xdp"),
        ("--forwarding", "tunnel", "give stack, redirect or offload"),
        ("--bpffs", "sys/fs/bpf", "not an absolute path"),
        ("--cgroup", "sys/fs/cgroup", "give auto, none or an absolute path, for example /sys/fs/cgroup"),
        ("--local-clients", "pods", "\"pods\" does not name local clients: give all or host"),
        ("--max-flows", "", "give auto or a number from 4096 to 8388608, for example 131072"),
        ("--max-flows", "4095", "\"4095\" is not a number of flows"),
        ("--max-flows", "1e6", "not a number of flows"),
        ("--nft-guard", "yes", "give auto, on or off"),
        ("--listen", "9911", "for example 127.0.0.1:9911"),
        ("--metrics-listen", "9912", "for example 192.0.2.10:9912"),
        ("--metrics-listen", "[192.0.2.10]", "for example 192.0.2.10:9912"),
        ("--metrics-listen", "[node]:9912", "for example 192.0.2.10:9912"),
    ] {
        let complaint = complaint(&[&format!("{flag}={value}")]);
        assert!(complaint.starts_with(&format!("{flag}: ")) && complaint.contains(expected), "{complaint}");
        assert!(!complaint.contains('\n') && !complaint.ends_with('.'), "{complaint}");
    }
}

/// The manifest has a variable in brackets. Kubernetes replaces the variable by the Node's address, which may be IPv4
/// or IPv6.
#[test]
fn the_address_for_metrics_may_have_brackets_in_both_families() {
    for (text, expected) in [
        ("192.0.2.10:9912", "192.0.2.10:9912"),
        ("[192.0.2.10]:9912", "192.0.2.10:9912"),
        ("[2001:db8::10]:9912", "[2001:db8::10]:9912"),
    ] {
        let listen = config(&["--metrics-listen", text]).unwrap().metrics_listen;
        assert_eq!(listen.map(|it| it.to_string()).as_deref(), Some(expected));
    }
}

#[test]
fn redirect_excludes_attach_xdp_and_permits_tc_and_auto() {
    for forwarding in ["redirect", "offload"] {
        let complaint = complaint(&["--forwarding", forwarding, "--attach", "xdp"]);
        let expected = format!("\"xdp\" cannot be combined with --forwarding {forwarding}");
        assert!(
            complaint.contains("--attach") && complaint.contains(&expected) && complaint.contains("give auto or tc"),
            "{complaint}"
        );
        for attach in ["tc", "auto"] {
            assert!(config(&["--forwarding", forwarding, "--attach", attach]).is_ok());
        }
    }
}

#[test]
fn a_quarantine_shorter_than_load_balancers_keep_members_gives_a_warning() {
    let warning = |flags: &[&str]| config(flags).unwrap().settings.quarantine_warning();
    assert_eq!(warning(&[]), None);
    assert_eq!(warning(&["--quarantine", "30s"]), None);
    let text = warning(&["--quarantine", "29s"]).unwrap();
    assert!(text.contains("--quarantine 29000ms") && text.contains("give at least 30s"), "{text}");
}

#[test]
fn a_domain_too_long_for_an_annotation_is_refused() {
    let domain = "a".repeat(64);
    assert!(complaint(&["--annotation-domain", &domain]).contains("at most 63"));
}

#[test]
fn a_node_name_must_be_a_valid_object_name() {
    let refused = parse(&["npl-agent", "run", "--node-name", "worker 1,metadata.name=other"]);
    assert!(refused.is_err_and(|err| err.flag == "--node-name"));
}

#[test]
fn an_error_about_a_path_with_a_line_break_is_one_line() {
    let expected = "--bpffs: \"a\\nb\" is not an absolute path: give for example /sys/fs/bpf";
    assert_eq!(complaint(&["--bpffs", "a\nb"]), expected);
}

#[test]
fn errors_that_clap_finds_keep_its_text() {
    for line in
        [&["npl-agent", "run"][..], &["npl-agent", "run", "--no-such-flag"], &["npl-agent", "status", "--output=x"]]
    {
        let err = Cli::try_parse_from(line).unwrap_err();
        assert_eq!((ConfigError::from_clap(&err), err.exit_code()), (None, 2), "{line:?}");
    }
}
