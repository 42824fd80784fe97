// SPDX-License-Identifier: Apache-2.0
//! The alerts that the chart installs as a `PrometheusRule`, each with a section of `docs/alerts.md`.

use std::fmt::Write as _;

/// The chart's file with the alert rules. The chart's template replaces [`RUNBOOK`] in this file by the URL of
/// `docs/alerts.md`.
pub(super) const FILE: &str = "deploy/chart/npl/files/alerts.yaml";

/// The document with a section for each alert.
#[cfg(test)]
pub(super) const PAGE: &str = "docs/alerts.md";

/// The placeholder for the URL of the document with a section for each alert.
const RUNBOOK: &str = "RUNBOOK_URL";

/// A Prometheus alert.
pub(super) struct Alert {
    /// The alert's name, which is also the heading of its section in the document.
    pub(super) name: &'static str,
    /// The expression in `PromQL`.
    pub(super) expression: &'static str,
    /// The field `for`: how long the expression must hold before the alert fires.
    wait: &'static str,
    /// `critical` if node ports do not work for some clients; `warning` for every other problem.
    severity: &'static str,
    /// One sentence about the effect of the problem; `$labels` are the labels of the expression's series.
    summary: &'static str,
}

pub(super) const ALERTS: [Alert; 20] = [
    Alert {
        name: "NPLDeviceFailed",
        expression: r#"npl_devices{state="failed"} > 0"#,
        wait: "5m",
        severity: "critical",
        summary: "{{ $value }} devices of {{ $labels.instance }} do not have the programs attached: clients behind them are not served.",
    },
    Alert {
        name: "NPLNoDeviceAttached",
        expression: r#"npl_devices{state="attached"} == 0"#,
        wait: "1m",
        severity: "critical",
        summary: "The programs are attached to no device of {{ $labels.instance }}: no node port of this Node works.",
    },
    Alert {
        name: "NPLAgentNotReady",
        expression: "npl_ready == 0",
        wait: "10m",
        severity: "warning",
        summary: "The agent of {{ $labels.instance }} is not ready: new Pods may get no node port.",
    },
    Alert {
        name: "NPLAgentDown",
        expression: r#"up{job="npl-agent"} == 0"#,
        wait: "10m",
        severity: "warning",
        summary: "The agent of {{ $labels.instance }} cannot be scraped: mappings work while the Node runs, but the agent may no longer apply changes.",
    },
    Alert {
        name: "NPLPortsNotServed",
        expression: "npl_problems > 0",
        wait: "10m",
        severity: "warning",
        summary: "{{ $value }} problems on {{ $labels.instance }} keep Pod ports from being served as requested: {{ $labels.reason }}.",
    },
    Alert {
        name: "NPLLoopStalled",
        expression: "time() - npl_last_successful_pass_timestamp_seconds > 120",
        wait: "5m",
        severity: "warning",
        summary: "The last pass of the agent of {{ $labels.instance }} without a failed operation ended {{ $value | \
                  humanizeDuration }} ago.",
    },
    Alert {
        name: "NPLAnnotationsRefused",
        expression: r#"increase(npl_annotation_patches_total{outcome=~"denied|refused"}[15m]) > 0"#,
        wait: "0m",
        severity: "warning",
        summary: "The API server refuses annotations of {{ $labels.instance }} ({{ $labels.outcome }}): node ports are not published.",
    },
    Alert {
        name: "NPLPublicationSlow",
        expression: "histogram_quantile(0.9, sum by (instance, le) (rate(npl_publication_seconds_bucket[10m]))) > 5",
        wait: "10m",
        severity: "warning",
        summary: "The publication of one in ten annotations of {{ $labels.instance }} takes {{ $value | \
                  humanizeDuration }} or longer.",
    },
    Alert {
        name: "NPLApiServerFailing",
        expression: r#"increase(npl_watch_errors_total{kind!="expired"}[15m]) > 10"#,
        wait: "0m",
        severity: "warning",
        summary: "Watches of {{ $labels.instance }} on {{ $labels.subject }} fail: {{ $labels.kind }}.",
    },
    Alert {
        name: "NPLOperationsFailing",
        expression: r#"increase(npl_ops_total{outcome="retry"}[15m]) > 10"#,
        wait: "0m",
        severity: "warning",
        summary: "Operations of the kind {{ $labels.op }} fail on {{ $labels.instance }}, and the agent retries them.",
    },
    Alert {
        name: "NPLPortRangeNearlyUsed",
        expression: r#"npl_node_ports{state="free"} / ignoring(state) sum without (state) (npl_node_ports) < 0.05"#,
        wait: "5m",
        severity: "warning",
        summary: "{{ $labels.instance }} has {{ $value | humanizePercentage }} of its {{ $labels.protocol }} node ports left ({{ $labels.family }}).",
    },
    Alert {
        name: "NPLFlowTableNearlyFull",
        expression: "npl_flow_table_entries / ignoring(family) group_left npl_flow_table_max_entries > 0.9",
        wait: "5m",
        severity: "warning",
        summary: "The {{ $labels.protocol }} flow table of {{ $labels.instance }} is {{ $value | humanizePercentage }} full ({{ $labels.family }}): if the table becomes full, its idle flows are evicted.",
    },
    Alert {
        name: "NPLPacketsDropped",
        expression: r#"increase(npl_datapath_reason_packets_total{reason=~"rewrite_failed|flow_table_full"}[15m]) > 0"#,
        wait: "0m",
        severity: "warning",
        summary: "{{ $labels.instance }} drops packets (rewrite_failed) or stores no entry for new connections (flow_table_full): {{ $labels.reason }}.",
    },
    Alert {
        name: "NPLObjectsRepaired",
        expression: "increase(npl_repairs_total[30m]) > 5",
        wait: "0m",
        severity: "warning",
        summary: "Other software removes or changes kernel objects of NPL on {{ $labels.instance }} ({{ $labels.object }}): the agent restores them, but clients may lose requests meanwhile.",
    },
    Alert {
        name: "NPLFeedDown",
        expression: r#"up{job="npl-feed"} == 0"#,
        wait: "10m",
        severity: "warning",
        summary: "The replica {{ $labels.instance }} of npl-feed cannot be scraped: load balancers may have no replica \
                  to read from.",
    },
    Alert {
        name: "NPLFeedWatchFailing",
        expression: "npl_feed_watch_failing == 1",
        wait: "5m",
        severity: "warning",
        summary: "The watch of {{ $labels.instance }} (npl-feed) on {{ $labels.subject }} fails: load balancers get no changes from this replica.",
    },
    Alert {
        name: "NPLFeedEntriesLeftOut",
        expression: "npl_feed_left_out_entries > 0",
        wait: "10m",
        severity: "warning",
        summary: "{{ $labels.instance }} (npl-feed) does not serve {{ $value }} annotation entries: {{ $labels.reason }}.",
    },
    Alert {
        name: "NPLFeedResourcesRejected",
        expression: r#"increase(npl_feed_xds_messages_total{event="nack"}[15m]) > 0"#,
        wait: "0m",
        severity: "warning",
        summary: "An xDS client of {{ $labels.instance }} (npl-feed) rejects resources ({{ $labels.type }}) and \
                  continues to use their previous versions.",
    },
    Alert {
        name: "NPLFeedQueriesFailing",
        expression: r#"increase(npl_feed_dns_answers_total{answer="servfail"}[15m]) > 10"#,
        wait: "5m",
        severity: "warning",
        summary: "{{ $labels.instance }} (npl-feed) answers DNS queries with SERVFAIL: load balancers that send these \
                  queries do not learn the members.",
    },
    Alert {
        name: "NPLFeedClientsRefused",
        expression: r#"increase(npl_feed_refused_connections_total{reason!="allow"}[15m]) > 10"#,
        wait: "0m",
        severity: "warning",
        summary: "{{ $labels.instance }} (npl-feed) ends connections or streams of clients ({{ $labels.interface }}) because of a limit: {{ $labels.reason }}.",
    },
];

/// Renders the alert rules as a Prometheus rule file in YAML. The `spec` of a `PrometheusRule` has the same form.
pub(super) fn rules() -> String {
    let mut text =
        "# SPDX-License-Identifier: Apache-2.0\n# Rendered from npl-agent/src/reference/alerts.rs by `cargo \
                    xtask docs`; do not edit.\ngroups:\n  - name: npl\n    rules:\n"
            .to_owned();
    for Alert { name, expression, wait, severity, summary } in &ALERTS {
        let anchor = name.to_lowercase();
        let _infallible = writeln!(
            text,
            "      - alert: {name}\n        expr: '{expression}'\n        for: {wait}\n        labels:\n          severity: \
             {severity}\n        annotations:\n          summary: '{summary}'\n          runbook_url: {RUNBOOK}#{anchor}"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::{ALERTS, PAGE, rules};

    #[test]
    fn each_alert_has_a_section_of_the_page_in_the_same_order() {
        let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(PAGE)).unwrap();
        let sections: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("## ")).collect();
        assert_eq!(sections, ALERTS.map(|alert| alert.name));
    }

    /// The texts of the alerts are in single quotation marks in YAML, so such a mark in a text would end the string.
    #[test]
    fn no_text_has_the_quotation_mark_of_the_file() {
        assert!(ALERTS.iter().all(|alert| !alert.expression.contains('\'') && !alert.summary.contains('\'')));
        assert_eq!(rules().matches("- alert: ").count(), ALERTS.len());
    }
}
