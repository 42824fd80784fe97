// SPDX-License-Identifier: Apache-2.0
//! Tests of the test kit's control plane. These tests require root and the binaries of `cargo xtask setup`.

use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use npl_testkit::cluster::{Cluster, MAPPING_ANNOTATION, PodObject, Port, ServiceObject};
use npl_testkit::control_plane::ControlPlane;
use npl_testkit::echo::Protocol;
use npl_testkit::run::Run;
use serde_json::json;

const LIMIT: Duration = Duration::from_secs(20);

#[test]
fn objects_survive_a_restart_of_the_api_server() {
    let run = Run::start().unwrap();
    let netns = run.netns("control").unwrap();
    let started = Instant::now();
    let mut plane = ControlPlane::start(&run, Some(&netns)).unwrap();
    println!("control plane ready after {:?}", started.elapsed());
    let mode = std::fs::metadata(plane.agent_kubeconfig()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let cluster = Cluster::new(&plane).unwrap();
    let host: IpAddr = "192.0.2.10".parse().unwrap();
    cluster.create_node("node-1", &[host]).unwrap();
    cluster.create_namespace("shop").unwrap();
    let port = Port::new("http", 80, Protocol::Tcp).to("web");
    cluster.create_service(&ServiceObject::new("shop", "web", "web", vec![port]).enabled()).unwrap();
    let pod = PodObject::new("shop", "web-0", "node-1", "web").with_ports(vec![Port::new("web", 8080, Protocol::Tcp)]);
    cluster.create_pod(&pod).unwrap();
    cluster.set_pod_running("shop", "web-0", host, &["10.244.0.1".parse().unwrap()]).unwrap();
    let shown = cluster.kubectl(&["get", "pods", "--namespace", "shop", "--output", "wide"]).unwrap();
    assert!(shown.contains("10.244.0.1"), "{shown}");

    let log = cluster.watch_mappings("shop", LIMIT).unwrap();
    let written = Instant::now();
    cluster.kubectl(&["annotate", "pod", "web-0", "--namespace", "shop", &format!("{MAPPING_ANNOTATION}=[]")]).unwrap();
    let seen = log.wait_for("web-0", LIMIT, |value| value == Some("[]")).unwrap();
    println!("the watch delivered the annotation {:?} after kubectl was started", seen.at - written);
    assert_eq!(log.history("web-0").len(), 2);
    assert_eq!(cluster.pod_annotation("shop", "web-0").unwrap().as_deref(), Some("[]"));

    plane.stop_api_server().unwrap();
    cluster.client().text("/readyz").unwrap_err();
    plane.start_api_server().unwrap();
    assert_eq!(cluster.pod_annotation("shop", "web-0").unwrap().as_deref(), Some("[]"));
    cluster.delete_pod("shop", "web-0").unwrap();
    assert_eq!(cluster.client().find("/api/v1/namespaces/shop/pods/web-0").unwrap(), None);
}

#[test]
fn errors_of_the_api_server_are_returned() {
    let run = Run::start().unwrap();
    let plane = ControlPlane::start(&run, None).unwrap();
    let client = plane.client().unwrap();
    let error = client.create("/api/v1/namespaces", &json!({"metadata": {"name": "Not A Name"}})).unwrap_err();
    assert!(format!("{error:#}").contains("422"), "{error:#}");
}
