// SPDX-License-Identifier: Apache-2.0
//! Tests that each alert of the chart fires on the time series of its fault, and does not fire on similar harmless
//! series.

use std::collections::BTreeSet;
use std::fs;

use npl_testkit::run::Run;
use npl_testkit::{prometheus, tools};
use serde_json::{Value, json};

use crate::objects::{find, rendered};

/// Time series in promtool's notation: a name, and one value per minute.
type Series = &'static [(&'static str, &'static str)];

/// An alert, the series on which it fires, and the series on which it does not fire.
struct Case {
    alert: &'static str,
    fires: Series,
    quiet: Series,
}

const CASES: [Case; 20] = [
    Case {
        alert: "NPLDeviceFailed",
        fires: &[(r#"npl_devices{state="failed"}"#, "1x20")],
        // Harmless: while a device is being replaced, NPL's programs cannot be attached to it for up to two minutes.
        quiet: &[(r#"npl_devices{state="failed"}"#, "0 0 0 1 1 0x20"), (r#"npl_devices{state="attached"}"#, "2x20")],
    },
    Case {
        alert: "NPLNoDeviceAttached",
        fires: &[(r#"npl_devices{state="attached"}"#, "1 1 1 0x20")],
        quiet: &[(r#"npl_devices{state="attached"}"#, "1x20"), (r#"npl_devices{state="failed"}"#, "0x20")],
    },
    Case {
        alert: "NPLAgentNotReady",
        fires: &[("npl_ready", "0x20")],
        // Harmless: an agent restarts and is ready again after two minutes.
        quiet: &[("npl_ready", "1x12 0 0 1x6")],
    },
    Case {
        alert: "NPLAgentDown",
        fires: &[(r#"up{job="npl-agent"}"#, "0x20")],
        quiet: &[(r#"up{job="npl-agent"}"#, "1x20"), (r#"up{job="another"}"#, "0x20")],
    },
    Case {
        alert: "NPLPortsNotServed",
        fires: &[(r#"npl_problems{reason="PortRangeExhausted"}"#, "3x20")],
        // Harmless: the problem is solved, so its series disappears.
        quiet: &[(r#"npl_problems{reason="PortRangeExhausted"}"#, "1 1 1 stale")],
    },
    Case {
        alert: "NPLLoopStalled",
        fires: &[("npl_last_successful_pass_timestamp_seconds", "60x20")],
        quiet: &[("npl_last_successful_pass_timestamp_seconds", "0+60x20")],
    },
    Case {
        alert: "NPLAnnotationsRefused",
        fires: &[(r#"npl_annotation_patches_total{outcome="denied"}"#, "0x10 1x10")],
        quiet: &[
            (r#"npl_annotation_patches_total{outcome="denied"}"#, "7x20"),
            (r#"npl_annotation_patches_total{outcome="unavailable"}"#, "0+1x20"),
            (r#"npl_annotation_patches_total{outcome="patched"}"#, "0+5x20"),
        ],
    },
    Case {
        alert: "NPLPublicationSlow",
        fires: &[
            (r#"npl_publication_seconds_bucket{le="1.6384"}"#, "0+1x30"),
            (r#"npl_publication_seconds_bucket{le="6.5536"}"#, "0+2x30"),
            (r#"npl_publication_seconds_bucket{le="26.2144"}"#, "0+9x30"),
            (r#"npl_publication_seconds_bucket{le="+Inf"}"#, "0+9x30"),
        ],
        // Harmless: only one of fifteen publications is slow.
        quiet: &[
            (r#"npl_publication_seconds_bucket{le="1.6384"}"#, "0+14x30"),
            (r#"npl_publication_seconds_bucket{le="6.5536"}"#, "0+14x30"),
            (r#"npl_publication_seconds_bucket{le="26.2144"}"#, "0+15x30"),
            (r#"npl_publication_seconds_bucket{le="+Inf"}"#, "0+15x30"),
        ],
    },
    Case {
        alert: "NPLApiServerFailing",
        fires: &[(r#"npl_watch_errors_total{subject="pods",kind="unreachable"}"#, "0+2x20")],
        quiet: &[
            (r#"npl_watch_errors_total{subject="pods",kind="expired"}"#, "0+9x20"),
            // Harmless: the API server is unreachable for three minutes during its restart.
            (r#"npl_watch_errors_total{subject="pods",kind="unreachable"}"#, "0 1 2 3 3x20"),
        ],
    },
    Case {
        alert: "NPLOperationsFailing",
        fires: &[(r#"npl_ops_total{op="reserve",outcome="retry"}"#, "0+2x20")],
        quiet: &[
            (r#"npl_ops_total{op="reserve",outcome="retry"}"#, "0 1 2 2x20"),
            (r#"npl_ops_total{op="reserve",outcome="done"}"#, "0+9x20"),
        ],
    },
    Case {
        alert: "NPLPortRangeNearlyUsed",
        fires: &[
            (r#"npl_node_ports{family="IPv4",protocol="tcp",state="used"}"#, "960x20"),
            (r#"npl_node_ports{family="IPv4",protocol="tcp",state="quarantined"}"#, "1x20"),
            (r#"npl_node_ports{family="IPv4",protocol="tcp",state="free"}"#, "40x20"),
        ],
        quiet: &[
            (r#"npl_node_ports{family="IPv4",protocol="tcp",state="used"}"#, "940x20"),
            (r#"npl_node_ports{family="IPv4",protocol="tcp",state="quarantined"}"#, "1x20"),
            (r#"npl_node_ports{family="IPv4",protocol="tcp",state="free"}"#, "60x20"),
        ],
    },
    Case {
        alert: "NPLFlowTableNearlyFull",
        fires: &[
            (r#"npl_flow_table_entries{family="IPv4",protocol="udp"}"#, "60000x20"),
            (r#"npl_flow_table_max_entries{protocol="tcp"}"#, "131072x20"),
            (r#"npl_flow_table_max_entries{protocol="udp"}"#, "65536x20"),
        ],
        quiet: &[
            (r#"npl_flow_table_entries{family="IPv4",protocol="tcp"}"#, "100000x20"),
            (r#"npl_flow_table_entries{family="IPv6",protocol="tcp"}"#, "100000x20"),
            (r#"npl_flow_table_max_entries{protocol="tcp"}"#, "131072x20"),
            (r#"npl_flow_table_max_entries{protocol="udp"}"#, "65536x20"),
        ],
    },
    Case {
        alert: "NPLPacketsDropped",
        fires: &[(r#"npl_datapath_reason_packets_total{reason="flow_table_full"}"#, "0x10 4x10")],
        quiet: &[
            (r#"npl_datapath_reason_packets_total{reason="flow_table_full"}"#, "4x20"),
            (r#"npl_datapath_reason_packets_total{reason="no_mapping"}"#, "0+100x20"),
        ],
    },
    Case {
        alert: "NPLObjectsRepaired",
        // Another program replaces the filter every two minutes.
        fires: &[(r#"npl_repairs_total{object="filter"}"#, "0 0 1 1 2 2 3 3 4 4 5 5 6 6 7 7 8 8 9 9")],
        // Harmless: an administrator has deleted the qdiscs of two devices once, and each qdisc had two filters.
        quiet: &[
            (r#"npl_repairs_total{object="qdisc"}"#, "0x5 2x15"),
            (r#"npl_repairs_total{object="filter"}"#, "0x5 4x15"),
        ],
    },
    Case {
        alert: "NPLFeedDown",
        fires: &[(r#"up{job="npl-feed"}"#, "0x20")],
        // Harmless: the container restarts, and is scraped again after two minutes.
        quiet: &[(r#"up{job="npl-feed"}"#, "1x12 0 0 1x6"), (r#"up{job="another"}"#, "0x20")],
    },
    Case {
        alert: "NPLFeedWatchFailing",
        fires: &[(r#"npl_feed_watch_failing{subject="pods"}"#, "0x10 1x10")],
        // Harmless: the API server restarts.
        quiet: &[
            (r#"npl_feed_watch_failing{subject="pods"}"#, "0x15 1 1 1 0 0"),
            (r#"npl_feed_watch_failing{subject="services"}"#, "0x20"),
        ],
    },
    Case {
        alert: "NPLFeedEntriesLeftOut",
        fires: &[(r#"npl_feed_left_out_entries{reason="foreign_address"}"#, "2x20")],
        // Harmless: a Pod appears before its Node.
        quiet: &[
            (r#"npl_feed_left_out_entries{reason="unknown_node"}"#, "0x15 3 3 0x5"),
            (r#"npl_feed_left_out_entries{reason="malformed"}"#, "0x20"),
        ],
    },
    Case {
        alert: "NPLFeedResourcesRejected",
        fires: &[(r#"npl_feed_xds_messages_total{type="cds",event="nack"}"#, "0x10 1x10")],
        quiet: &[
            (r#"npl_feed_xds_messages_total{type="cds",event="nack"}"#, "3x20"),
            (r#"npl_feed_xds_messages_total{type="cds",event="ack"}"#, "0+9x20"),
            (r#"npl_feed_xds_messages_total{type="eds",event="stale"}"#, "0+1x20"),
        ],
    },
    Case {
        alert: "NPLFeedQueriesFailing",
        fires: &[(r#"npl_feed_dns_answers_total{answer="servfail"}"#, "0+4x20")],
        quiet: &[
            // Harmless: load balancers query a replica that has just started and has not listed the Pods yet.
            (r#"npl_feed_dns_answers_total{answer="servfail"}"#, "0x10 8x10"),
            (r#"npl_feed_dns_answers_total{answer="nxdomain"}"#, "0+60x20"),
        ],
    },
    Case {
        alert: "NPLFeedClientsRefused",
        fires: &[(r#"npl_feed_refused_connections_total{interface="xds",reason="names"}"#, "0+2x20")],
        quiet: &[
            // Harmless: one slow client loses its connection, and clients outside of the allow list are refused.
            (r#"npl_feed_refused_connections_total{interface="xds",reason="memory"}"#, "0x10 1x10"),
            (r#"npl_feed_refused_connections_total{interface="http",reason="allow"}"#, "0+30x20"),
        ],
    },
];

/// The evaluation time, which exceeds the longest `for` of an alert.
const EVALUATED: &str = "20m";

/// Returns a promtool test that expects the alert to fire, or not to fire, on the series.
fn test(Case { alert, .. }: &Case, series: Series, fires: bool) -> Value {
    let with_instance = |name: &str| match name.split_once('{') {
        Some((metric, labels)) => format!(r#"{metric}{{instance="node-1:9912",{labels}"#),
        None => format!(r#"{name}{{instance="node-1:9912"}}"#),
    };
    let input: Vec<Value> =
        series.iter().map(|(name, values)| json!({ "series": with_instance(name), "values": values })).collect();
    let expression = format!(r#"count(ALERTS{{alertname="{alert}",alertstate="firing"}})"#);
    let samples = if fires { json!([{ "labels": "{}", "value": 1 }]) } else { json!([]) };
    let expected = json!({ "expr": expression, "eval_time": EVALUATED, "exp_samples": samples });
    json!({ "interval": "1m", "input_series": input, "promql_expr_test": [expected] })
}

fn rule() -> Value {
    let objects = rendered(&[("metrics.prometheusRule.enabled", "true")]);
    find(&objects, "PrometheusRule", "npl-agent").unwrap().clone()
}

#[test]
fn each_alert_fires_on_its_fault_and_not_on_harmless_series() {
    let run = Run::start().unwrap();
    let rules = run.file("rules.yaml");
    fs::write(&rules, rule()["spec"].to_string()).unwrap();
    let check = tools::output(prometheus::promtool().unwrap().args(["check", "rules"]).arg(&rules)).unwrap();
    assert!(check.contains(&format!("SUCCESS: {} rules found", CASES.len())), "{check}");

    let tests: Vec<Value> =
        CASES.iter().flat_map(|case| [test(case, case.fires, true), test(case, case.quiet, false)]).collect();
    let file = run.file("tests.yaml");
    let text = json!({ "rule_files": [rules], "evaluation_interval": "1m", "tests": tests }).to_string();
    fs::write(&file, text).unwrap();
    tools::output(prometheus::promtool().unwrap().args(["test", "rules"]).arg(&file)).unwrap();
}

/// promtool must report a wrong expectation that an alert fires, and a wrong expectation that an alert does not fire.
#[test]
fn a_wrong_expectation_is_found() {
    let run = Run::start().unwrap();
    let rules = run.file("rules.yaml");
    fs::write(&rules, rule()["spec"].to_string()).unwrap();
    let tests: Vec<Value> =
        CASES.iter().flat_map(|case| [test(case, case.fires, false), test(case, case.quiet, true)]).collect();
    let file = run.file("tests.yaml");
    let text = json!({ "rule_files": [rules], "evaluation_interval": "1m", "tests": tests }).to_string();
    fs::write(&file, text).unwrap();
    let output = prometheus::promtool().unwrap().args(["test", "rules"]).arg(&file).output().unwrap();
    let report = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{report}");
    let report = report.split_whitespace().collect::<Vec<_>>().join(" ");
    for Case { alert, .. } in CASES {
        for [expected, found] in [["nil", "{} 1E+00"], ["{} 1E+00", "nil"]] {
            let failure = format!(
                r#"alertname=\"{alert}\",alertstate=\"firing\"}})", time: {EVALUATED}, exp: {expected} got: {found}"#
            );
            assert_eq!(report.matches(&failure).count(), 1, "{failure} in {report}");
        }
    }
}

#[test]
fn each_alert_has_a_case_and_a_link_to_its_section() {
    let rule = rule();
    let rules = rule.pointer("/spec/groups/0/rules").unwrap().as_array().unwrap();
    let names: BTreeSet<&str> = rules.iter().map(|rule| rule["alert"].as_str().unwrap()).collect();
    assert_eq!(names, CASES.iter().map(|case| case.alert).collect());
    let link = "https://github.com/npl-project/npl/blob/main/docs/alerts.md";
    for rule in rules {
        let anchor = rule["alert"].as_str().unwrap().to_lowercase();
        assert_eq!(rule["annotations"]["runbook_url"], format!("{link}#{anchor}"));
    }
    let elsewhere =
        [("metrics.prometheusRule.enabled", "true"), ("metrics.prometheusRule.runbookUrl", "\"https://w/a\"")];
    let text = find(&rendered(&elsewhere), "PrometheusRule", "npl-agent").unwrap().to_string();
    assert!(text.contains("https://w/a#npldevicefailed") && !text.contains(link), "{text}");
}
