// SPDX-License-Identifier: Apache-2.0
//! Runs the commands of the documents that an operator runs on a Node.

use std::fs;

use npl_testkit::agent::Options;
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::tools;
use npl_testkit::traffic;

use crate::world::{LIMIT, World};

/// The first line of a block of shell commands that this test runs as root on a Node with an agent.
const MARK: &str = "```sh node";

/// The sections of docs/bpftool.md, and a part of the output of their commands. `PORT` and `POD` are the node port and
/// the address of the Pod.
const OUTPUTS: [(&str, &str); 11] = [
    ("Before you begin", ""),
    ("List programs and maps", "npl_mapping_v4"),
    ("Dump all mappings", "PORT\t6\tPOD\t8080"),
    ("Look up one mapping", "\"node_port\": PORT"),
    ("Read the counters of one mapping", "request_packets"),
    ("Count flows", "POD:8080"),
    ("Read the reasons of untranslated packets", "\t"),
    // `bpftool` 7.1 shows no TCX links, as the page states.
    ("See the order of programs on a device", "tc:"),
    ("Measure the run time of the programs", "npl_ingress\t"),
    (COMPARISON, ""),
    ("Check that tracing is off", "0"),
];

/// The section whose commands must print nothing.
const COMPARISON: &str = "Compare a pinned map with `npl-agent mappings`";

/// The documents that also have marked blocks.
const OTHERS: [&str; 3] = ["operate.md", "datapath.md", "connection-tracking.md"];

/// Returns the marked commands of each section of a document, with the section's heading.
fn marked_sections(text: &str) -> Vec<(&str, String)> {
    let mut sections: Vec<(&str, String)> = Vec::new();
    let mut is_marked = false;
    for line in text.lines() {
        match line {
            MARK => is_marked = true,
            "```" => is_marked = false,
            _ if is_marked => {
                let (_, commands) = sections.last_mut().unwrap();
                commands.push_str(line);
                commands.push('\n');
            }
            _ => sections.extend(line.strip_prefix("## ").map(|heading| (heading, String::new()))),
        }
    }
    sections.retain(|(_, commands)| !commands.is_empty());
    sections
}

fn document(name: &str) -> String {
    fs::read_to_string(tools::repository_file(&format!("docs/{name}"))).unwrap()
}

/// A shell function that runs the agent's binary with the Node's BPF file system and the agent's local socket.
fn agent_function(Options { runtime_dir, binary, bpffs, .. }: &Options) -> String {
    let [runtime_dir, binary, bpffs] = [runtime_dir, binary, bpffs].map(|path| path.display());
    format!("npl-agent() {{ NPL_RUNTIME_DIR={runtime_dir} NPL_INTERVAL=0s {binary} \"$@\" --bpffs {bpffs}; }}\n")
}

/// The Node has one Pod with an open connection, and has received a packet that matches no mapping.
#[test]
fn the_commands_of_the_documents_run_on_a_node() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let server = world.address("web-0", Protocol::Tcp);
    let client = world.topology.client().netns.clone();
    let open = traffic::tcp_connect(&client, server).unwrap();
    let client_port = open.local_addr().unwrap().port().to_string();
    let unmapped = if server.port() == 61_900 { 61_901 } else { 61_900 };
    traffic::tcp_connect(&client, (server.ip(), unmapped).into()).unwrap_err();
    let options = world.agent_options(&[]);
    // The client's last segment of the handshake creates the flow's entry, and may arrive after `connect` returns.
    let is_listed = || options.command(&["flows"]).is_ok_and(|text| text.contains(&client_port)).then_some(());
    poll::until("the entry of the open connection", LIMIT, is_listed).unwrap();

    let pod = world.topology.pods()[0].ip().to_string();
    let words = |addr: &str| addr.replace('.', " ");
    // In place of the time in which an operator waits for packets, the client opens a connection.
    let (name, ip, port) = (client.name(), server.ip(), server.port());
    let one_connection = format!("ip netns exec {name} bash -c 'exec 3<>/dev/tcp/{ip}/{port}'");
    let run = |commands: &str| {
        let script = format!("set -euo pipefail\n{}{commands}", agent_function(&options))
            .replace("/sys/fs/bpf/npl/v2", world.pins().to_str().unwrap())
            .replace("port=61000", &format!("port={port}"))
            .replace("198 51 100 2", &words(&world.client_ip().to_string()))
            .replace("10 244 1 7", &words(&pod))
            .replace("10,244,1,7", &pod.replace('.', ","))
            .replace("$((50000", &format!("$(({client_port}"))
            .replace("DEVICE", "eth0")
            .replace("sleep 10", &one_connection);
        tools::output(world.topology.node().command("bash").unwrap().args(["-c", &script])).unwrap()
    };
    let page = document("bpftool.md");
    let sections = marked_sections(&page);
    let headings: Vec<&str> = sections.iter().map(|(heading, _)| *heading).collect();
    assert_eq!(headings, OUTPUTS.map(|(heading, _)| heading));
    // The first section sets the variable that all others use.
    let variable = &sections[0].1;
    for ((heading, commands), (_, expected)) in sections.iter().zip(OUTPUTS) {
        let output = run(&format!("{variable}{commands}"));
        let expected = expected.replace("PORT", &port.to_string()).replace("POD", &pod);
        assert!(output.contains(&expected), "{heading}: {output}");
        assert!(*heading != COMPARISON || output.is_empty(), "{heading}: {output}");
    }
    for name in OTHERS {
        let text = document(name);
        let sections = marked_sections(&text);
        assert!(!sections.is_empty(), "{name} has no marked block");
        for (heading, commands) in sections {
            assert!(!run(&commands).is_empty(), "{name}, {heading}: the commands print nothing");
        }
    }
}
