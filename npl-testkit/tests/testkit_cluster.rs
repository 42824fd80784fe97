// SPDX-License-Identifier: Apache-2.0
//! Tests of the test kit's control plane. These tests require root and the binaries of `cargo xtask setup`.

use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use npl_testkit::cluster::{Cluster, MAPPING_ANNOTATION, PodObject, Port, ServiceObject};
use npl_testkit::control_plane::{ControlPlane, Pool};
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

/// The lists that are empty, or contain only the API server's own Service, while no test has created objects.
const LISTS: [(&str, usize); 4] =
    [("/api/v1/nodes", 0), ("/api/v1/pods", 0), ("/api/v1/events", 0), ("/api/v1/services", 1)];

#[test]
fn a_reused_control_plane_has_no_objects_of_the_earlier_test() {
    static PLANES: Pool = Pool::new(|plane| Cluster::new(plane)?.create_namespace("shop"));
    let run = Run::start().unwrap();
    let earlier = run.netns("earlier").unwrap();
    let plane = PLANES.take(&earlier).unwrap();
    let (address, directory) = (plane.address(), plane.directory().to_owned());
    let cluster = Cluster::new(&plane).unwrap();
    cluster.create_node("node-1", &["192.0.2.10".parse().unwrap()]).unwrap();
    let port = Port::new("http", 80, Protocol::Tcp).to("web");
    cluster.create_service(&ServiceObject::new("shop", "web", "web", vec![port])).unwrap();
    for number in 0..300 {
        cluster.create_pod(&PodObject::new("shop", &format!("web-{number}"), "node-1", "web")).unwrap();
    }
    // A finalizer would keep the Pod if the API server deleted it.
    let finalizer = json!({"metadata": {"finalizers": ["example.org/keep"]}});
    cluster.client().merge_patch("/api/v1/namespaces/shop/pods/web-0", &finalizer).unwrap();
    let shown = cluster.kubectl(&["get", "pods", "--namespace", "shop", "--output", "name"]).unwrap();
    assert_eq!(shown.lines().count(), 300, "kubectl runs in the namespace {earlier:?}");
    drop((cluster, plane));

    let plane = PLANES.take(&run.netns("later").unwrap()).unwrap();
    assert_eq!((plane.address(), plane.directory()), (address, &*directory), "the control plane is not reused");
    let cluster = Cluster::new(&plane).unwrap();
    // The agent's first lists are answered from the API server's cache, as with this resource version.
    for (list, count) in LISTS {
        let found = cluster.client().get(&format!("{list}?resourceVersion=0")).unwrap();
        assert_eq!(found["items"].as_array().unwrap().len(), count, "{list}: {found}");
    }
    cluster.kubectl(&["create", "clusterrole", "other", "--verb", "get", "--resource", "pods"]).unwrap();
    drop((cluster, plane));

    let plane = PLANES.take(&run.netns("last").unwrap()).unwrap();
    assert_ne!(plane.directory(), directory, "a control plane with a changed access rule is reused");
    assert!(!directory.exists(), "the changed control plane is not removed");
}

#[test]
fn errors_of_the_api_server_are_returned() {
    let run = Run::start().unwrap();
    let plane = ControlPlane::start(&run, None).unwrap();
    let client = plane.client().unwrap();
    let error = client.create("/api/v1/namespaces", &json!({"metadata": {"name": "Not A Name"}})).unwrap_err();
    assert!(format!("{error:#}").contains("422"), "{error:#}");
}
