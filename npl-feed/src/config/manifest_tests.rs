// SPDX-License-Identifier: Apache-2.0
//! Tests that the feed's manifest grants only read access to the API server, and that the manifest's environment
//! variables match the command line.

use std::fs;

use clap::{CommandFactory as _, Parser as _};
use serde_json::Value;

use super::Config;

fn objects() -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/npl-feed.yaml");
    serde_saphyr::from_multiple(&fs::read_to_string(path).unwrap()).unwrap()
}

fn object(kind: &str) -> Value {
    objects().into_iter().find(|object| object["kind"] == kind).unwrap()
}

#[test]
fn the_role_grants_only_read_access() {
    let role = object("ClusterRole");
    let rules = role["rules"].as_array().unwrap();
    assert_eq!(rules.len(), 1);
    assert_eq!(rules[0]["resources"], serde_json::json!(["pods", "services", "nodes"]));
    assert_eq!(rules[0]["verbs"], serde_json::json!(["list", "watch"]));
    let kinds: Vec<Value> = objects().into_iter().map(|object| object["kind"].clone()).collect();
    assert!(!kinds.contains(&Value::from("Role")) && !kinds.contains(&Value::from("Secret")), "{kinds:?}");
}

#[test]
fn the_pod_has_no_privilege() {
    let spec = object("Deployment")["spec"].clone();
    assert_eq!(spec["replicas"], 2);
    let pod = &spec["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(pod["securityContext"]["runAsUser"], 65534);
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(container["securityContext"]["capabilities"], serde_json::json!({ "drop": ["ALL"] }));
    assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    assert_eq!(container["securityContext"]["allowPrivilegeEscalation"], false);
    for refused in ["hostNetwork", "hostPID", "hostIPC", "volumes"] {
        assert!(pod.get(refused).is_none(), "{refused}");
    }
    assert_eq!(container["image"], concat!("localhost/npl-feed:", env!("CARGO_PKG_VERSION")));
}

/// Tests that each environment variable in the manifest has the default value of the variable's command-line flag.
#[test]
fn each_variable_has_the_default_of_its_flag() {
    let pod = object("Deployment")["spec"]["template"]["spec"].clone();
    let variables = pod["containers"][0]["env"].as_array().unwrap();
    assert!(!variables.is_empty());
    let command = Config::command();
    for variable in variables {
        let name = variable["name"].as_str().unwrap();
        let flag = command.get_arguments().find(|flag| flag.get_env().is_some_and(|it| it == name));
        let flag = flag.unwrap_or_else(|| panic!("no flag has the variable {name}"));
        assert_eq!(flag.get_default_values(), [variable["value"].as_str().unwrap()], "{name}");
    }
}

#[test]
fn the_ports_are_those_of_the_command_line() {
    let pod = object("Deployment")["spec"]["template"]["spec"].clone();
    let config = Config::try_parse_from(["npl-feed"]).unwrap();
    let port = |name: &str| {
        let ports = pod["containers"][0]["ports"].as_array().unwrap();
        ports.iter().find(|port| port["name"] == name).unwrap()["containerPort"].as_u64().unwrap()
    };
    for (name, listen) in [("xds", config.xds), ("http", config.http), ("dns", config.dns), ("dns-tcp", config.dns)] {
        assert_eq!(port(name), u64::from(listen.0.unwrap().port()), "{name}");
    }
    let service = object("Service");
    let document = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/load-balancers.md")).unwrap();
    for port in service["spec"]["ports"].as_array().unwrap() {
        assert!(document.contains(&format!("`{}`", port["nodePort"])), "docs/load-balancers.md must name {port}");
    }
}
