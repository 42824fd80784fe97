// SPDX-License-Identifier: Apache-2.0
//! The Grafana dashboard that the chart installs as a `ConfigMap`.

use serde_json::{Value, json};

/// The chart's file with the dashboard.
pub(super) const FILE: &str = "deploy/chart/npl/files/dashboard.json";

/// The width of Grafana's grid, in units of the grid. The two constants below are the size of a panel in the same
/// units.
const GRID: usize = 24;
const WIDTH: usize = 8;
const HEIGHT: usize = 7;

/// A panel with a graph.
struct Panel {
    title: &'static str,
    about: &'static str,
    /// The name that Grafana uses for the unit of the graph's values.
    unit: &'static str,
    /// The `PromQL` expressions, each with the legend of its series.
    queries: &'static [(&'static str, &'static str)],
}

/// The rows of the dashboard, each with its title and panels.
const ROWS: [(&str, &[Panel]); 5] = [
    (
        "Health",
        &[
            Panel {
                title: "Agents that are ready",
                about: "If the value is below the number of Nodes, an agent is starting or does not run, or its programs are attached to no device. Mappings keep working, unless the programs are attached to no device.",
                unit: "short",
                queries: &[
                    (r#"sum(npl_ready{instance=~"$instance"})"#, "ready"),
                    (r#"count(npl_build_info{instance=~"$instance"})"#, "scraped"),
                ],
            },
            Panel {
                title: "Devices",
                about: "Devices by state. Clients behind a device with the state `failed` are not served.",
                unit: "short",
                queries: &[(r#"sum by (state) (npl_devices{instance=~"$instance"})"#, "{{state}}")],
            },
            Panel {
                title: "Pod ports not served as requested",
                about: "Problems by the reason of the Event; docs/reference/events.md has causes and actions.",
                unit: "short",
                queries: &[(r#"sum by (reason) (npl_problems{instance=~"$instance"}) or vector(0)"#, "{{reason}}")],
            },
        ],
    ),
    (
        "Node ports",
        &[
            Panel {
                title: "Mappings",
                about: "Mappings of the selected Nodes, including draining mappings.",
                unit: "short",
                queries: &[(r#"sum by (family) (npl_mappings{instance=~"$instance"})"#, "{{family}}")],
            },
            Panel {
                title: "Fewest free node ports of a Node",
                about: "If the value is 0, a further Pod port of the Node gets no node port: enlarge --port-range.",
                unit: "short",
                queries: &[(
                    r#"min by (family, protocol) (npl_node_ports{instance=~"$instance", state="free"})"#,
                    "{{family}} {{protocol}}",
                )],
            },
            Panel {
                title: "Time to publish",
                about: "Time from a change that alters a Pod's annotation to the API server's confirmation of the annotation.",
                unit: "s",
                queries: &[
                    (
                        r#"histogram_quantile(0.5, sum by (le) (rate(npl_publication_seconds_bucket{instance=~"$instance"}[$__rate_interval])))"#,
                        "median",
                    ),
                    (
                        r#"histogram_quantile(0.99, sum by (le) (rate(npl_publication_seconds_bucket{instance=~"$instance"}[$__rate_interval])))"#,
                        "99 %",
                    ),
                ],
            },
            Panel {
                title: "Patches of Pods",
                about: "Patches with the outcome `denied` or `refused` require an operator to act: see docs/alerts.md.",
                unit: "ops",
                queries: &[
                    (
                        r#"sum by (outcome) (rate(npl_annotation_patches_total{instance=~"$instance"}[$__rate_interval]))"#,
                        "{{outcome}}",
                    ),
                    (r#"sum(npl_pending_patches{instance=~"$instance"})"#, "pending"),
                ],
            },
            Panel {
                title: "Operations",
                about: "Operations on node ports, mappings and annotations. Operations with the outcome `retry` have failed.",
                unit: "ops",
                queries: &[(
                    r#"sum by (outcome) (rate(npl_ops_total{instance=~"$instance"}[$__rate_interval]))"#,
                    "{{outcome}}",
                )],
            },
            Panel {
                title: "Errors of watches",
                about: "Failed lists and watches by kind. The kind `expired` is normal.",
                unit: "ops",
                queries: &[(
                    r#"sum by (subject, kind) (rate(npl_watch_errors_total{instance=~"$instance"}[$__rate_interval])) or vector(0)"#,
                    "{{subject}} {{kind}}",
                )],
            },
            Panel {
                title: "Repairs",
                about: "Kernel objects of NPL that other software removed or changed, and that the agent restored. The value is 0 on a Node without such software.",
                unit: "short",
                queries: &[(
                    r#"sum by (object) (increase(npl_repairs_total{instance=~"$instance"}[$__rate_interval]))"#,
                    "{{object}}",
                )],
            },
        ],
    ),
    (
        "Traffic",
        &[
            Panel {
                title: "Translated packets",
                about: "A packet that the kernel has merged from several segments counts once.",
                unit: "pps",
                queries: &[(
                    r#"sum by (family, direction) (rate(npl_datapath_packets_total{instance=~"$instance"}[$__rate_interval]))"#,
                    "{{family}} {{direction}}",
                )],
            },
            Panel {
                title: "Translated bytes",
                about: "Bytes of translated packets, including link-layer headers.",
                unit: "Bps",
                queries: &[(
                    r#"sum by (family, direction) (rate(npl_datapath_bytes_total{instance=~"$instance"}[$__rate_interval]))"#,
                    "{{family}} {{direction}}",
                )],
            },
            Panel {
                title: "New flows",
                about: "A flow whose Pod does not answer counts only as `new`.",
                unit: "ops",
                queries: &[(
                    r#"sum by (state) (rate(npl_datapath_flows_total{instance=~"$instance"}[$__rate_interval]))"#,
                    "{{state}}",
                )],
            },
            Panel {
                title: "Packets by reason",
                about: "Packets that were dropped, passed untranslated, or translated in spite of a problem. docs/reference/reasons.md explains each reason.",
                unit: "pps",
                queries: &[(
                    r#"sum by (reason) (rate(npl_datapath_reason_packets_total{instance=~"$instance"}[$__rate_interval]))"#,
                    "{{reason}}",
                )],
            },
            Panel {
                title: "Fullest flow table",
                about: "If a flow table of a Node is full, the flows of this table that have been idle longest are evicted.",
                unit: "percentunit",
                queries: &[(
                    r#"max by (family, protocol) (npl_flow_table_entries{instance=~"$instance"} / ignoring(family) group_left npl_flow_table_max_entries{instance=~"$instance"})"#,
                    "{{family}} {{protocol}}",
                )],
            },
        ],
    ),
    (
        "Agents",
        &[
            Panel {
                title: "CPU time",
                about: "CPU time of each agent.",
                unit: "percentunit",
                queries: &[(
                    r#"rate(process_cpu_seconds_total{instance=~"$instance", job="npl-agent"}[$__rate_interval])"#,
                    "{{instance}}",
                )],
            },
            Panel {
                title: "Resident memory",
                about: "Resident memory of each agent. The kernel's memory for the maps is not included, but counts towards the container's limit.",
                unit: "bytes",
                queries: &[(
                    r#"process_resident_memory_bytes{instance=~"$instance", job="npl-agent"}"#,
                    "{{instance}}",
                )],
            },
            Panel {
                title: "Duration of a pass",
                about: "99 % of the passes of the main loop take less time than this value.",
                unit: "s",
                queries: &[(
                    r#"histogram_quantile(0.99, sum by (le) (rate(npl_pass_seconds_bucket{instance=~"$instance"}[$__rate_interval])))"#,
                    "99 %",
                )],
            },
        ],
    ),
    (
        "npl-feed",
        &[
            Panel {
                title: "Members",
                about: "Members that each replica serves. The replicas serve the same number, except while a change arrives. No data: the feed is not installed or not scraped.",
                unit: "short",
                queries: &[("npl_feed_members", "{{instance}}")],
            },
            Panel {
                title: "Failing watches and left-out entries",
                about: "While a watch fails, the replica serves the last known members. Left-out entries are annotation entries that the feed does not serve: docs/load-balancers.md.",
                unit: "short",
                queries: &[
                    ("max by (subject) (npl_feed_watch_failing)", "watch of {{subject}}"),
                    ("max by (reason) (npl_feed_left_out_entries)", "left out: {{reason}}"),
                ],
            },
            Panel {
                title: "xDS streams",
                about: "Open streams of each replica. The number of streams is at most the number of xDS load balancers and gRPC clients.",
                unit: "short",
                queries: &[("npl_feed_xds_streams", "{{instance}}")],
            },
            Panel {
                title: "xDS messages",
                about: "Messages by event. With the event `nack`, a client has rejected a resource.",
                unit: "ops",
                queries: &[("sum by (event) (rate(npl_feed_xds_messages_total[$__rate_interval]))", "{{event}}")],
            },
            Panel {
                title: "Answers by DNS and HTTP",
                about: "DNS answers by response code, and HTTP answers by class of the status code.",
                unit: "ops",
                queries: &[
                    ("sum by (answer) (rate(npl_feed_dns_answers_total[$__rate_interval]))", "DNS {{answer}}"),
                    ("sum by (answer) (rate(npl_feed_http_answers_total[$__rate_interval]))", "HTTP {{answer}}"),
                ],
            },
            Panel {
                title: "Refused clients",
                about: "Clients that the feed refused, and connections and streams that it ended: docs/load-balancers.md.",
                unit: "ops",
                queries: &[(
                    "sum by (interface, reason) (rate(npl_feed_refused_connections_total[$__rate_interval])) or vector(0)",
                    "{{interface}} {{reason}}",
                )],
            },
        ],
    ),
];

/// Renders the dashboard in Grafana's JSON format.
pub(super) fn dashboard() -> String {
    let mut panels = Vec::new();
    let mut top = 0;
    for (title, row) in ROWS {
        panels.push(json!({
            "type": "row", "title": title, "collapsed": false, "id": panels.len() + 1, "panels": [],
            "gridPos": { "x": 0, "y": top, "w": GRID, "h": 1 },
        }));
        top += 1;
        for (number, panel) in row.iter().enumerate() {
            let (x, y) = (number * WIDTH % GRID, top + number * WIDTH / GRID * HEIGHT);
            panels.push(graph(panel, panels.len() + 1, x, y));
        }
        top += row.len().div_ceil(GRID / WIDTH) * HEIGHT;
    }
    let source = json!({ "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus" });
    let instance = json!({
        "name": "instance", "label": "Agent", "type": "query", "datasource": data_source(), "refresh": 2, "sort": 1,
        "multi": true, "includeAll": true, "allValue": ".*",
        "query": { "query": "label_values(npl_build_info, instance)", "refId": "instance" },
    });
    let dashboard = json!({
        "title": "NPL: NodePortLocal", "uid": "npl", "tags": ["npl", "kubernetes", "networking"], "schemaVersion": 39,
        "editable": true, "refresh": "30s", "time": { "from": "now-1h", "to": "now" },
        "templating": { "list": [source, instance] }, "panels": panels,
    });
    format!("{dashboard:#}\n")
}

fn data_source() -> Value {
    json!({ "type": "prometheus", "uid": "${datasource}" })
}

fn graph(Panel { title, about, unit, queries }: &Panel, id: usize, x: usize, y: usize) -> Value {
    let targets = ('A'..).zip(*queries).map(|(letter, (expression, legend))| {
        json!({ "refId": letter.to_string(), "datasource": data_source(), "expr": expression, "legendFormat": legend })
    });
    json!({
        "type": "timeseries", "title": title, "description": about, "id": id, "datasource": data_source(),
        "gridPos": { "x": x, "y": y, "w": WIDTH, "h": HEIGHT },
        "fieldConfig": { "defaults": { "unit": unit, "min": 0 }, "overrides": [] },
        "options": { "legend": { "displayMode": "list", "placement": "bottom" }, "tooltip": { "mode": "multi" } },
        "targets": targets.collect::<Vec<_>>(),
    })
}

/// Returns the `PromQL` expressions of all panels.
#[cfg(test)]
pub(super) fn expressions() -> impl Iterator<Item = &'static str> {
    ROWS.into_iter().flat_map(|(_, row)| row).flat_map(|panel| panel.queries).map(|(expression, _)| *expression)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::{GRID, dashboard};

    #[test]
    fn panels_have_distinct_ids_and_do_not_overlap() {
        let dashboard: Value = serde_json::from_str(&dashboard()).unwrap();
        let panels = dashboard["panels"].as_array().unwrap();
        let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
        assert_eq!(ids.len(), panels.len());
        let mut taken = BTreeSet::new();
        for panel in panels {
            let place = |key: &str| usize::try_from(panel["gridPos"][key].as_u64().unwrap()).unwrap();
            for x in place("x")..place("x") + place("w") {
                for y in place("y")..place("y") + place("h") {
                    assert!(x < GRID && taken.insert((x, y)), "{} overlaps another panel", panel["title"]);
                }
            }
        }
    }
}
