// SPDX-License-Identifier: Apache-2.0
//! Tests the allowed source ranges of a Service, from the annotation to clients that are served and clients whose
//! packets are dropped.

use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::traffic;
use serde_json::{Value, json};

use crate::events::{text, wait_for_event};
use crate::world::{LIMIT, NAMESPACE, World};

const KEY: &str = "nodeportlocal.antrea.io/allowed-source-ranges";

/// Sets or removes the annotation with allowed source ranges.
fn set_list(world: &World, list: Option<&str>) {
    let value = list.map_or_else(|| format!("{KEY}-"), |list| format!("{KEY}={list}"));
    let annotate = ["annotate", "service", "web", "--namespace", NAMESPACE, "--overwrite", &value];
    world.cluster.kubectl(&annotate).unwrap();
}

/// Waits until all kernel mappings have exactly these allowed sources; `null` means no restriction.
fn wait_for_sources(world: &World, ranges: &Value) {
    let is_so = || {
        let mappings = world.kernel_mappings();
        let shown = if ranges.is_null() { json!([]) } else { ranges.clone() };
        let is_right = |it: &Value| it["restricted"] == ranges.is_array() && it["allowedSources"] == shown;
        mappings.iter().all(is_right).then_some(())
    };
    let waited = poll::until(&format!("the allowed sources {ranges}"), LIMIT, is_so);
    assert!(waited.is_ok(), "{waited:?}: {:?}", world.kernel_mappings());
}

fn is_served(world: &World) -> bool {
    let server = world.address("web-0", Protocol::Tcp);
    traffic::tcp_request(&world.topology.client().netns, server, "who?").is_ok()
}

#[test]
fn only_allowed_sources_reach_a_restricted_service() {
    let mut world = World::with_agent(&["--resync", "1s"]);
    let client = format!("{}/32", world.client_ip());
    world.create_service();
    set_list(&world, Some(&world.client_ip().to_string()));
    world.enable_service();
    world.create_pod("web-0");
    world.assert_served("web-0");
    wait_for_sources(&world, &json!([client]));
    let table = world.agent_options(&[]).command(&["mappings", "--output", "wide"]).unwrap();
    assert!(table.contains("SOURCES") && table.contains(&client), "{table}");
    let status = world.agent_options(&[]).command(&["status"]).unwrap();
    assert!(status.contains("2 (2 for allowed sources only)"), "{status}");

    set_list(&world, Some("203.0.113.0/24"));
    wait_for_sources(&world, &json!(["203.0.113.0/24"]));
    assert!(!is_served(&world));
    assert!(world.agent().metrics().unwrap().lines().any(|line| {
        let count = line.strip_prefix(r#"npl_datapath_reason_packets_total{reason="source_refused"} "#);
        count.is_some_and(|count| count != "0")
    }));
    set_list(&world, Some(""));
    wait_for_sources(&world, &json!([]));
    assert!(!is_served(&world));
    set_list(&world, None);
    wait_for_sources(&world, &Value::Null);
    world.assert_served("web-0");
    assert_eq!(world.writes("web-0"), 1, "allowed sources must not change the Pod's annotation");
}

#[test]
fn an_unreadable_source_range_is_reported_on_the_service_and_the_others_apply() {
    let mut world = World::with_agent(&[]);
    world.create_service();
    set_list(&world, Some(&format!("10.0.0.0/33, {}", world.client_ip())));
    world.enable_service();
    world.create_pod("web-0");
    world.assert_served("web-0");
    let event = wait_for_event(&world, "web", "UnreadableSourceRange");
    assert_eq!(
        text(&event),
        "entry 1 of allowed-source-ranges, \"10.0.0.0/33\", is not an address or a CIDR range and allows no client; \
         write it as 192.0.2.0/24 or 2001:db8::/32"
    );
    assert_eq!(event["type"], "Warning");
    world.wait_for_metric(r#"npl_problems{reason="UnreadableSourceRange"} 1"#);
    set_list(&world, Some("10.0.0.0/33"));
    wait_for_sources(&world, &json!([]));
    assert!(!is_served(&world), "without a readable range, no client may be accepted");
}

#[test]
fn a_restarted_agent_keeps_allowed_sources_and_applies_missed_changes() {
    let mut world = World::with_agent(&[]);
    let client = format!("{}/32", world.client_ip());
    world.create_service();
    set_list(&world, Some(&client));
    world.enable_service();
    world.create_pod("web-0");
    world.assert_served("web-0");
    wait_for_sources(&world, &json!([client]));
    world.agent().kill().unwrap();
    world.assert_served("web-0");
    world.agent().restart().unwrap();
    world.wait_for_metric(r#"npl_ops_total{op="reserve",outcome="done"} 2"#);
    world.assert_served("web-0");
    let metrics = world.agent().metrics().unwrap();
    for op in ["allow_sources", "upsert_mapping", "forget_sources", "remove_mapping"] {
        assert!(!metrics.contains(&format!("op=\"{op}\"")), "operation {op} ran after a restart:\n{metrics}");
    }
    world.agent().kill().unwrap();
    set_list(&world, Some("203.0.113.0/24"));
    assert!(is_served(&world), "without an agent, the kernel state must not change");
    world.agent().restart().unwrap();
    wait_for_sources(&world, &json!(["203.0.113.0/24"]));
    assert!(!is_served(&world));
}
