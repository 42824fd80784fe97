// SPDX-License-Identifier: Apache-2.0
//! Tests the interfaces for operators: probes, metrics, inspection commands and cleanup.

use std::process::Command;

use npl_testkit::agent::Agent;
use npl_testkit::cluster::{Port, ServiceObject};
use npl_testkit::echo::Protocol;
use npl_testkit::poll;
use npl_testkit::residue::Residue;
use npl_testkit::{tools, traffic};
use serde_json::{Value, json};

use crate::world::{LIMIT, NAMESPACE, World, manifest};

#[test]
fn commands_show_kernel_state_with_and_without_a_running_agent() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let (options, pod_ip) = (world.agent_options(&[]), world.topology.pods()[0].ip());
    for is_running in [true, false] {
        let table = options.command(&["mappings"]).unwrap();
        assert!(table.starts_with("NODE PORT"), "{table}");
        assert!(table.contains(&format!("{pod_ip}:8080")), "{table}");
        let status = options.command_json("status").unwrap();
        assert_eq!(status.get("agentRunning").unwrap(), is_running, "{status}");
        assert_eq!(status.get("mappings").unwrap(), 2, "{status}");
        let tcp = &world.kernel_mappings()[0];
        // The output contains names of Pods and states of node ports only while an agent runs, because the kernel's
        // maps do not contain these names and states.
        let named = [("namespace", "shop"), ("pod", "web-0"), ("state", "published")];
        for (field, value) in named {
            let expected = if is_running { json!(value) } else { Value::Null };
            assert_eq!(tcp[field], expected, "{field} of {tcp}");
        }
        assert_eq!(table.contains("shop/web-0"), is_running, "{table}");
        assert_eq!(tcp.get("nodePort").unwrap(), 61000, "{tcp}");
        assert!(tcp.get("replyPackets").unwrap().as_u64().unwrap() >= 3, "{tcp}");
        world.agent().kill().unwrap();
    }
}

#[test]
fn the_exit_code_of_status_is_its_verdict() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let options = world.agent_options(&[]);
    let status = |arguments: &[&str]| options.exit_code_and_output(&[&["status"], arguments].concat()).unwrap();
    let (code, healthy) = status(&["--wait=30s", "--interval", "100ms"]);
    assert_eq!(code, 0, "{healthy}");
    for expected in
        ["node-1: healthy", "2 published", "services received data", "requests/s", "QUARANTINED", "npl_mapping_v4"]
    {
        assert!(healthy.contains(expected), "{expected} is not in {healthy}");
    }
    assert!(!healthy.contains('\x1b'), "there must be no colors if the output is not a terminal");
    // This Service cannot be served, because no container port has the name of its target port.
    let named = Port::new("none", 81, Protocol::Tcp).to("no-such-port");
    world.cluster.create_service(&ServiceObject::new(NAMESPACE, "second", "web", vec![named]).enabled()).unwrap();
    world.wait_for_log("no-such-port");
    let (code, refused) = status(&[]);
    assert!(code == 1 && refused.contains("UnresolvedTargetPort"), "{code} {refused}");
    world.agent().kill().unwrap();
    let (code, away) = status(&[]);
    assert!(code == 1 && away.contains("no agent runs on this Node"), "{code} {away}");
    options.command(&["cleanup"]).unwrap();
    let (code, gone) = status(&["--wait=1s"]);
    assert!(code == 2 && gone.contains("not installed"), "{code} {gone}");
    let (code, json) = status(&["--output", "json"]);
    assert_eq!((code, serde_json::from_str::<Value>(&json).unwrap()["verdict"].as_str()), (2, Some("cannot-tell")));
}

#[test]
fn why_and_flows_find_a_pod_by_its_name() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let (options, client) = (world.agent_options(&[]), world.client_ip().to_string());
    let run = |arguments: &[&str]| options.exit_code_and_output(arguments).unwrap();
    let (code, chain) = run(&["why", "pod/shop/web-0"]);
    assert!(code == 0 && !chain.contains("──►"), "{code} {chain}");
    for expected in
        ["port 8080/tcp IPv4", "port 8080/udp IPv4", "selected by web", "61000/tcp IPv4", "reply packets, the last"]
    {
        assert!(chain.contains(expected), "{expected} is not in {chain}");
    }
    let flows = |arguments: &[&str]| -> Vec<Value> {
        let (code, text) = run(&[&["flows", "--output", "json"], arguments].concat());
        assert_eq!(code, 0, "{text}");
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    };
    let server = world.address("web-0", Protocol::Udp);
    world.topology.node().count_connections().unwrap();
    let socket = traffic::udp_socket(&world.topology.client().netns, server, true).unwrap();
    // Send more than one datagram, because the client's second datagram establishes a UDP flow.
    for _ in 0..3 {
        assert_eq!(traffic::udp_ask(&socket, "who?").unwrap().pod, "web-0");
    }
    let node = server.to_string();
    let named = flows(&["--pod", "web-0", "--client", &client, "--protocol", "udp"]);
    let flow = named.first().unwrap_or_else(|| panic!("no flow of {client}: {:?}", flows(&[])));
    let pod_address = format!("{}:8080", world.topology.pods()[0].ip());
    assert_eq!(
        [&flow["node"], &flow["podAddress"], &flow["pod"]],
        [&json!(node), &json!(pod_address), &json!("web-0")]
    );
    assert!(flow["client"].as_str().unwrap().starts_with(&client), "{flow}");
    // Each of the three requests is a datagram of 4 bytes with headers of 28 bytes.
    assert_eq!([&flow["requestPackets"], &flow["requestBytes"], &flow["replyPackets"]], [3, 3 * 32, 3], "{flow}");
    assert!(flows(&["--pod", "other"]).is_empty());
    world.cluster.set_service_enabled(NAMESPACE, "web", false).unwrap();
    let disabled = || run(&["why", "service/shop/web"]);
    poll::until("`why` to report the disabled Service", LIMIT, || (disabled().0 == 1).then_some(())).unwrap();
    let (_, text) = disabled();
    assert!(text.contains("──► enabled") && text.contains("docs/troubleshoot.md#a-pod-has-no-annotation"), "{text}");
    world.agent().kill().unwrap();
    assert_eq!(run(&["why", "pod/shop/web-0"]).0, 2, "`why` must exit with 2 while no agent runs");
    assert!(flows(&[]).iter().any(|flow| flow["node"] == json!(node) && flow["pod"].is_null()));
}

#[test]
fn the_support_archive_has_only_its_documents_with_and_without_an_agent() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let canary = "4d2c-canary";
    let foreign = json!({"metadata": {"annotations": {"example.com/password": canary}, "labels": {"canary": canary}}});
    world.cluster.client().merge_patch(&format!("/api/v1/namespaces/{NAMESPACE}/pods/web-0"), &foreign).unwrap();
    let options = world.agent_options(&[]);
    let documents = || options.command_json("bundle").unwrap();
    let with_agent = documents();
    assert_eq!(with_agent["agent.json"]["nodePorts"][0]["pod"], "web-0", "{with_agent}");
    assert_eq!((&with_agent["errors.json"], &with_agent["flows.json"]), (&json!({}), &Value::Null));
    for text in [canary, options.kubeconfig.to_str().unwrap(), "token"] {
        assert!(!with_agent.to_string().contains(text), "{text} is in the archive");
    }
    world.agent().kill().unwrap();
    let archive = world.run.file("bundle.tar.gz");
    options.command(&["bundle", "--file", archive.to_str().unwrap()]).unwrap();
    let names = tools::output(Command::new("tar").arg("-tzf").arg(&archive)).unwrap();
    let expected =
        ["README.txt", "doctor.json", "errors.json", "mappings.json", "pins.json", "status.json", "version.json"];
    assert_eq!(names.lines().collect::<Vec<_>>(), expected.map(|name| format!("npl-bundle/{name}")));
    let without = documents();
    assert_eq!(without["status.json"]["mappings"], 2, "{without}");
    assert!(without["errors.json"]["agent.json"].as_str().unwrap().contains("no agent listens"), "{without}");
}

#[test]
fn metrics_count_mappings_ops_and_packets() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let metrics = world.agent().metrics().unwrap();
    for expected in [
        r#"npl_mappings{family="IPv4"} 2"#,
        r#"op="upsert_mapping",outcome="done"} 2"#,
        r#"npl_node_ports{family="IPv4",protocol="tcp",state="used"} 1"#,
    ] {
        assert!(metrics.contains(expected), "{expected} is not in\n{metrics}");
    }
    assert!(
        metrics.contains("# TYPE npl_ops_total counter"),
        "a client that asks for no format must get plain text:\n{metrics}"
    );
    world.wait_for_metric("npl_publication_seconds_count 1");
}

#[test]
fn cleanup_removes_all_npl_state_and_nothing_else() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let options = world.agent_options(&[]);
    let refused = options.command(&["cleanup"]).unwrap_err();
    assert!(format!("{refused:#}").contains("stop it first"), "{refused:#}");
    let dry_run = options.command(&["cleanup", "--dry-run"]).unwrap();
    assert!(dry_run.starts_with("WOULD REMOVE") && dry_run.contains("npl_mapping_v4"), "{dry_run}");
    let foreign = world.bpffs.path().join("somebody-elses");
    std::fs::create_dir(&foreign).unwrap();
    world.agent().kill().unwrap();
    let json = |flags: &[&str]| {
        let text = options.command(&[&["cleanup", "--output", "json"], flags].concat()).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let before: Vec<String> = look(&world);
    let planned = json(&["--dry-run"]);
    assert_eq!(look(&world), before, "the dry run has changed state");
    let removed = json(&[]);
    assert!(removed.to_string().contains("npl_mapping_v4"), "{removed}");
    assert_eq!((&planned["dryRun"], &removed["dryRun"]), (&json!(true), &json!(false)));
    assert_eq!(planned["removals"], removed["removals"]);
    assert!(!world.bpffs.path().join("npl").exists());
    assert!(foreign.exists());
    let residue = Residue::look_at(&world.run, world.bpffs.path()).unwrap();
    let left: Vec<&str> = residue.lines().filter(|line| line.contains("program") || line.contains("map ")).collect();
    assert!(left.is_empty(), "{left:?}");
    for flags in [&["cleanup", "--dry-run"][..], &["cleanup"]] {
        assert_eq!(options.command(flags).unwrap().trim(), "nothing to remove");
        assert!(!world.bpffs.path().join("npl").exists());
    }
}

fn look(world: &World) -> Vec<String> {
    let residue = Residue::look_at(&world.run, world.bpffs.path()).unwrap();
    residue.lines().map(str::to_owned).collect()
}

#[test]
fn a_retiring_agent_serves_during_the_drain_and_is_ready_after_the_cleanup() {
    let mut world = World::with_agent(&[]);
    world.serve(&["web-0"]);
    let server = world.address("web-0", Protocol::Tcp);
    world.agent().kill().unwrap();

    let options = world.agent_options(&["--retire", "--drain", "6s"]);
    let mut retiring = Agent::launch(options).unwrap();
    world.annotations.wait_for("web-0", LIMIT, |value| value.is_none()).unwrap();
    world.assert_answers(Protocol::Tcp, server, "web-0");
    retiring.wait_until_ready().unwrap();
    assert!(!world.bpffs.path().join("npl").exists());
    let residue = Residue::look_at(&world.run, world.bpffs.path()).unwrap();
    let left: Vec<&str> = residue.lines().filter(|line| line.contains("program") || line.contains("map ")).collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(
        retiring.process().exit_status().is_none(),
        "kubectl waits for available Pods, so a retired agent keeps running"
    );

    // The operator cancels the uninstallation, so the agent runs without `--retire` again.
    drop(retiring);
    world.agent().restart().unwrap();
    world.assert_served("web-0");
    world.agent().kill().unwrap();

    // An agent on a Node without an uplink serves no client, but must also become ready when it is retired.
    let mut retiring = Agent::start(world.agent_options(&["--retire", "--drain", "0s", "--devices", "gone0"])).unwrap();
    world.annotations.wait_for("web-0", LIMIT, |value| value.is_none()).unwrap();
    let log = std::fs::read_to_string(retiring.process().log()).unwrap();
    assert!(log.contains("retiring this Node: waiting for the API server to remove the annotations"), "{log}");
}

#[test]
fn the_admission_policy_protects_every_field_of_a_pods_status() {
    let world = World::new();
    let api = world.cluster.client().get("/openapi/v3/api/v1").unwrap();
    let schema = api.pointer("/components/schemas/io.k8s.api.core.v1.PodStatus/properties").unwrap();
    let policy = std::fs::read_to_string(manifest()).unwrap();
    let is_guarded = |field: &&String| {
        policy.contains(&format!("object.status.?{field} == oldObject.status.?{field}")) || *field == "conditions"
    };
    let open: Vec<&String> = schema.as_object().unwrap().keys().filter(|field| !is_guarded(field)).collect();
    assert!(open.is_empty(), "deploy/npl.yaml lets the agent write to {open:?} of a Pod's status");
}

#[test]
fn the_api_server_accepts_the_whole_manifest() {
    let world = World::new();
    // The namespace and the RBAC objects must exist already: if the namespace were missing, the dry run of the other
    // objects would fail.
    let manifest = manifest();
    let accepted =
        world.cluster.kubectl(&["apply", "--dry-run=server", "--filename", manifest.to_str().unwrap()]).unwrap();
    for object in ["daemonset.apps/npl-agent", "clusterrole.rbac.authorization.k8s.io/npl-agent"] {
        assert!(accepted.contains(object), "{object} is not in {accepted}");
    }
}
