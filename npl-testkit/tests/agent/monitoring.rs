// SPDX-License-Identifier: Apache-2.0
//! Tests that a real Prometheus can scrape the running agent, that every query of the dashboard then returns data, and
//! that the metrics of Services count all traffic.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;

use npl_testkit::http;
use npl_testkit::poll;
use npl_testkit::prometheus::Prometheus;
use npl_testkit::tools;
use serde_json::Value;

use crate::world::{LIMIT, NAMESPACE, World};

/// The expressions of the dashboard's panels about agents, as Grafana sends them. A test of npl-feed sends the
/// expressions about the feed.
fn queries() -> BTreeSet<String> {
    let text = fs::read_to_string(tools::repository_file("deploy/chart/npl/files/dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.filter_map(|panel| panel["targets"].as_array()).flatten();
    let as_sent = |target: &Value| {
        let expression = target["expr"].as_str().unwrap();
        // Replace Grafana's variables. Grafana sets `$__rate_interval` to at least four scrape intervals; Prometheus
        // scrapes every second in this test.
        expression.replace("$instance", ".*").replace("$__rate_interval", "4s")
    };
    targets.map(as_sent).filter(|query| !query.contains("npl_feed_")).collect()
}

/// Returns the sum of the series of a metric that contain `labels`.
fn sum(metrics: &str, name: &str, labels: &str) -> u64 {
    let lines = metrics.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('{'));
    let values = lines.filter(|line| line.contains(labels)).filter_map(|line| line.rsplit_once(' '));
    values.map(|(_, value)| value.parse::<u64>().unwrap()).sum()
}

/// With `--service-metrics 1`, only the TCP port of the Service has series of its own. The counters of this port do not
/// decrease when the Pod and its mapping are removed, and the sum over all series remains the traffic of all mappings.
#[test]
fn traffic_of_services_is_bounded_complete_and_does_not_decrease() {
    let mut world = World::with_agent(&["--service-metrics", "1", "--drain", "0s"]);
    world.create_service();
    world.enable_service();
    let of_web = format!(r#"service_namespace="{NAMESPACE}",service_name="web",pod_port="8080",protocol="tcp""#);
    let mut before = 0;
    for pod in ["web-0", "web-1"] {
        world.create_pod(pod);
        let is_counted = || {
            world.assert_served(pod);
            let now = sum(&world.agent().metrics().unwrap(), "npl_service_flows_total", &of_web);
            assert!(now >= before, "{now} flows after {before}");
            (now > before).then_some(now)
        };
        (before, _) = poll::until("traffic of the Service", LIMIT, is_counted).unwrap();
        world.delete_pod(pod);
        world.wait_for_kernel_mappings(0);
        let metrics = world.agent().metrics().unwrap();
        let now = sum(&metrics, "npl_service_flows_total", &of_web);
        assert!(now >= before, "{now} flows after {before}");
        before = now;
        for (of_services, of_all) in [
            ("npl_service_packets_total", "npl_datapath_packets_total"),
            ("npl_service_bytes_total", "npl_datapath_bytes_total"),
            ("npl_service_flows_total", "npl_datapath_flows_total"),
        ] {
            assert_eq!(sum(&metrics, of_services, ""), sum(&metrics, of_all, ""), "{metrics}");
        }
        assert!(sum(&metrics, "npl_service_packets_total", r#"service_name="_other""#) > 0, "{metrics}");
        assert!(!metrics.contains(r#"service_name="web",pod_port="8080",protocol="udp""#), "{metrics}");
    }
}

#[test]
fn every_query_of_the_dashboard_returns_data_of_a_running_agent() {
    let mut world = World::new();
    // Like the chart, the test binds `--metrics-listen` to the Node's own address.
    let listen = SocketAddr::new(world.node_ip(), 9912);
    world.create_node();
    world.start_agent(&["--metrics-listen", &format!("[{}]:9912", world.node_ip())]);
    world.create_service();
    world.enable_service();
    let prometheus = Prometheus::start(&world.run, world.topology.node(), listen).unwrap();
    world.create_pod("web-0");
    world.assert_served("web-0");

    let mut missing = queries();
    assert!(missing.len() > 15, "{missing:?}");
    let mut number = 0;
    let complete = || {
        // Requests continue, because a quantile is a number only if its histogram gets observations within the rate
        // interval.
        number += 1;
        let pod = format!("more-{number}");
        world.create_pod(&pod);
        world.assert_served(&pod);
        missing.retain(|query| {
            let samples = prometheus.query(query).unwrap();
            // A result of only NaN counts as no data: the quantile of a histogram without observations is NaN.
            samples.iter().all(|sample| sample["value"][1] == "NaN")
        });
        missing.is_empty().then_some(())
    };
    let waited = poll::until("data for every query", LIMIT, complete);
    assert!(waited.is_ok(), "no data for {missing:?}");

    // A scrape that takes longer than a second counts as failed.
    let is_up = || {
        let up = prometheus.query(r#"up{job="npl-agent"}"#).ok()?;
        (up.first()?["value"][1] == "1").then_some(())
    };
    poll::until("a scrape of the agent", LIMIT, is_up).unwrap();
    // The Node's own address must serve `/metrics` only, and no probes.
    let status = |path: &str| http::get(world.topology.node(), listen, path).unwrap().0;
    assert_eq!((status("/metrics"), status("/livez"), status("/readyz")), (200, 404, 404));
}
