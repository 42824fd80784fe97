// SPDX-License-Identifier: Apache-2.0

use std::{
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use npl_common::stats::MappingStats;

use super::{
    Counts, DatapathCounters, EventOutcome, FailureKind, FamilyTotals, Format, Metrics, OpOutcome, PatchOutcome,
    PortCounts, RemovalCause, RequestProgram, SweptTable, WatchedResource,
};
use crate::core::{
    devices::Coverage,
    model::{Family, Frontend, NodePort, PodPort, Protocol},
    op::{Op, RecentTraffic},
    repairs::RepairedObject,
    service_traffic::ServiceTarget,
};

struct Fixed;

impl DatapathCounters for Fixed {
    fn read(&self) -> Counts {
        let stats = MappingStats {
            request_packets: 1,
            request_bytes: 2,
            reply_packets: 3,
            reply_bytes: 4,
            new_flows: 5,
            established_flows: 6,
        };
        let totals = vec![FamilyTotals { family: Family::V4, stats }];
        Counts { reasons: vec![("no_mapping", 3)], totals, services: None }
    }
}

fn encode_samples() -> String {
    let metrics = Metrics::new(Arc::new(Fixed));
    let frontend = Frontend { family: Family::V4, node_port: NodePort(61000), protocol: Protocol::Tcp };
    metrics.count_op(&Op::Reserve(frontend, RecentTraffic::Refused), OpOutcome::PortTaken);
    metrics.observe_pass(Duration::from_millis(1), Some(UNIX_EPOCH + Duration::from_secs(7)));
    metrics.count_patch(PatchOutcome::TimedOut, Duration::from_secs(10));
    metrics.observe_publication(Duration::from_millis(3));
    metrics.set_flow_limit(Protocol::Tcp, 131_072);
    metrics.count_removed_flows(Family::V6, RemovalCause::Evicted, 128);
    metrics.set_table_fill(SweptTable::SocketReverseNat, Family::V4, 5, 16_384);
    metrics.set_flows(Family::V6, Protocol::Udp, 17);
    metrics.count_event(EventOutcome::Repeated);
    metrics.count_watch_failure(WatchedResource::Services, FailureKind::Forbidden);
    metrics.set_mappings(Family::V4, 2);
    metrics.observe_watch_change(WatchedResource::Node, UNIX_EPOCH + Duration::from_secs(9));
    metrics.set_pending_patches(3);
    metrics.set_ready(true);
    metrics.set_ports(Family::V4, Protocol::Tcp, PortCounts { used: 2, free: 998, quarantined: 1 });
    metrics.set_devices(Coverage { attached: 2, failed: 1 });
    metrics.set_problems(&[("RangeExhausted", 1), ("AddressConflict", 1)]);
    metrics.set_problems(&[("RangeExhausted", 4)]);
    let programs = [("eth0", RequestProgram::of(false, true)), ("gone0", RequestProgram::of(false, false))];
    metrics.set_request_programs(programs.map(|(name, kind)| (name.to_owned(), kind)));
    metrics.set_request_programs([("eth0".to_owned(), RequestProgram::of(true, true))]);
    metrics.set_redirect_refused(true);
    metrics.set_programs_ahead(2);
    metrics.count_repair(RepairedObject::TcxLink);
    metrics.encode(Format::OpenMetrics).expect("text")
}

#[test]
fn every_metric_has_its_prefix_unit_and_labels() {
    let text = encode_samples();
    for line in [
        r#"npl_ops_total{op="reserve",outcome="port_taken"} 1"#,
        "npl_pass_seconds_count 1",
        "npl_last_successful_pass_timestamp_seconds 7.0",
        r#"npl_annotation_patches_total{outcome="timed_out"} 1"#,
        "npl_annotation_patch_seconds_sum 10.0",
        "npl_publication_seconds_sum 0.003",
        "npl_publication_seconds_count 1",
        r#"npl_flow_table_entries{family="IPv6",protocol="udp"} 17"#,
        r#"npl_flow_table_max_entries{protocol="tcp"} 131072"#,
        r#"npl_flow_table_removals_total{family="IPv6",cause="evicted"} 128"#,
        r#"npl_table_entries{table="socket_reverse_nat",family="IPv4"} 5"#,
        r#"npl_table_max_entries{table="socket_reverse_nat",family="IPv4"} 16384"#,
        r#"npl_events_total{outcome="repeated"} 1"#,
        r#"npl_watch_errors_total{subject="services",kind="forbidden"} 1"#,
        r#"npl_mappings{family="IPv4"} 2"#,
        r#"npl_watch_last_change_timestamp_seconds{subject="nodes"} 9.0"#,
        "npl_pending_patches 3",
        "npl_ready 1",
        r#"npl_node_ports{family="IPv4",protocol="tcp",state="quarantined"} 1"#,
        r#"npl_devices{state="failed"} 1"#,
        r#"npl_device_info{device="eth0",kind="xdp"} 1"#,
        r#"npl_problems{reason="RangeExhausted"} 4"#,
        "npl_redirect_refused 1",
        "npl_programs_ahead 2",
        r#"npl_repairs_total{object="tcx_link"} 1"#,
        r#"npl_repairs_total{object="nft_table"} 0"#,
        r#"npl_datapath_reason_packets_total{reason="no_mapping"} 3"#,
        r#"npl_datapath_packets_total{family="IPv4",direction="request"} 1"#,
        r#"npl_datapath_bytes_total{family="IPv4",direction="reply"} 4"#,
        r#"npl_datapath_flows_total{family="IPv4",state="established"} 6"#,
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing from\n{text}");
    }
    assert!(text.contains(concat!("npl_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\",abi=\"")), "{text}");
    assert!(!text.contains("AddressConflict"), "a solved problem must disappear\n{text}");
    assert_eq!(text.matches("npl_device_info{").count(), 1, "former devices and kinds must disappear\n{text}");
}

/// Counters of two Service ports and of all others.
struct OfServices;

impl DatapathCounters for OfServices {
    fn read(&self) -> Counts {
        let stats = |bytes| MappingStats { request_bytes: bytes, new_flows: 1, ..MappingStats::ZERO };
        let port = |protocol| ServiceTarget {
            namespace: "shop".to_owned(),
            service: "web".to_owned(),
            pod_port: PodPort(8080),
            protocol,
        };
        let of = |protocol| Some(port(protocol));
        let services = vec![(of(Protocol::Tcp), stats(7)), (of(Protocol::Udp), stats(8)), (None, stats(9))];
        Counts { services: Some(services), ..Counts::default() }
    }
}

#[test]
fn traffic_of_services_has_the_services_labels_and_one_series_for_all_others() {
    assert!(!encode_samples().contains("npl_service_"), "the metrics of Services are off by default");
    let text = Metrics::new(Arc::new(OfServices)).encode(Format::OpenMetrics).unwrap();
    let of = |service: &str, protocol: &str, rest: &str| match service {
        "_other" => {
            format!(r#"{{service_namespace="_other",service_name="_other",pod_port="_other",protocol="_other",{rest}"#)
        }
        _ => format!(
            r#"{{service_namespace="shop",service_name="{service}",pod_port="8080",protocol="{protocol}",{rest}"#
        ),
    };
    for line in [
        format!("npl_service_bytes_total{}", of("web", "tcp", r#"direction="request"} 7"#)),
        format!("npl_service_bytes_total{}", of("web", "udp", r#"direction="request"} 8"#)),
        format!("npl_service_bytes_total{}", of("_other", "", r#"direction="request"} 9"#)),
        format!("npl_service_packets_total{}", of("_other", "", r#"direction="reply"} 0"#)),
        format!("npl_service_flows_total{}", of("web", "tcp", r#"state="new"} 1"#)),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing from\n{text}");
    }
}

#[test]
fn every_metric_has_a_help_text_and_is_named_once() {
    let text = encode_samples();
    let named = |keyword: &str| -> Vec<&str> {
        text.lines().filter_map(|line| line.strip_prefix(keyword)?.split(' ').next()).collect()
    };
    let types = named("# TYPE ");
    assert_eq!(types, named("# HELP "));
    let mut once = types.clone();
    once.sort_unstable();
    once.dedup();
    assert_eq!(once.len(), types.len());
    assert!(types.iter().all(|name| name.starts_with("npl_") || name.starts_with("process_")), "{types:?}");
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn the_standard_metrics_of_a_process_have_no_prefix_of_their_own() {
    let text = encode_samples();
    for name in [
        "process_cpu_seconds_total",
        "process_start_time_seconds",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
        "process_threads",
        "process_open_fds",
        "process_max_fds",
    ] {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
        assert!(value.is_some_and(|value| value >= 0.0), "{name} is missing from\n{text}");
    }
    assert_eq!(text.matches("# EOF").count(), 1);
}
