// SPDX-License-Identifier: Apache-2.0
//! Tests `npl-agent trace` with real traffic, while an agent is running.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use npl_testkit::echo::Protocol;
use npl_testkit::traffic;
use serde_json::{Value, json};

use crate::world::World;

/// The first bytes of a pcapng file: the type of the section header block.
const PCAPNG: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];

/// Runs `trace` while a client sends requests to the Pod, and returns its exit code and output.
fn trace(world: &World, arguments: &[&str]) -> (i32, String) {
    let server = world.address("web-0", Protocol::Udp);
    let socket = traffic::udp_socket(&world.topology.client().netns, server, true).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                assert_eq!(traffic::udp_ask(&socket, "who?").unwrap().pod, "web-0");
            }
        });
        let arguments = [&["trace"], arguments].concat();
        let traced = world.agent_options(&[]).exit_code_and_output(&arguments);
        is_over.store(true, Ordering::Relaxed);
        traced.unwrap()
    })
}

#[test]
fn trace_shows_a_pods_packets_before_and_after_translation() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let client = world.client_ip().to_string();
    let selection = ["--pod", "web-0", "--namespace", "shop", "--client", &client, "--count", "6"];
    let (code, text) = trace(&world, &[&selection[..], &["--output", "json"]].concat());
    assert_eq!(code, 0, "{text}");
    let records: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!(records.len(), 6, "{text}");
    let pod = world.topology.pods()[0].ip().to_string();
    let node = world.address("web-0", Protocol::Udp);
    let of =
        |hook: &str| records.iter().find(|record| record["hook"] == hook).unwrap_or_else(|| panic!("{hook}: {text}"));
    let request = of("ingress");
    assert_eq!([&request["verdict"], &request["direction"]], ["translated", "request"], "{request}");
    assert_eq!(request["before"]["destination"], json!(node.ip()), "{request}");
    assert_eq!(request["before"]["ports"][1], node.port(), "{request}");
    assert_eq!([&request["after"]["source"], &request["after"]["destination"]], [&client, &pod], "{request}");
    let reply = of("egress");
    assert_eq!([&reply["verdict"], &reply["direction"]], ["translated", "reply"], "{reply}");
    assert_eq!(reply["before"]["source"], pod, "{reply}");
    assert_eq!(reply["after"]["ports"][0], node.port(), "{reply}");

    let (code, table) = trace(&world, &[&selection[..], &["--duration", "300s"]].concat());
    assert_eq!(code, 0, "{table}");
    assert!(table.contains(&format!("{node}: translated as udp {client}")), "{table}");
    assert_eq!(table.lines().count(), 7, "a header and six records: {table}");
}

#[test]
fn trace_writes_a_capture_and_refuses_a_selection_of_nothing() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let file = std::env::temp_dir().join(format!("npl-trace-{}.pcapng", std::process::id()));
    let name = file.to_str().unwrap();
    let port = world.address("web-0", Protocol::Udp).port().to_string();
    let (code, text) = trace(&world, &["--node-port", &port, "--count", "3", "--pcap", name]);
    assert_eq!(code, 0, "{text}");
    let capture = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    assert_eq!(capture.get(..4), Some(&PCAPNG[..]));
    let name_of_side = b" ingress before";
    assert!(capture.windows(name_of_side.len()).any(|bytes| bytes == name_of_side), "no interface of requests");
    let (code, refused) = world.agent_options(&[]).exit_code_and_output(&["trace"]).unwrap();
    assert!(code == 1 && refused.contains("give --client, --client-port, --pod or --node-port"), "{code} {refused}");
    let (code, unknown) = world.agent_options(&[]).exit_code_and_output(&["trace", "--pod", "db"]).unwrap();
    assert!(code == 1 && unknown.contains("no Pod whose name begins with `db`"), "{code} {unknown}");
}
