// SPDX-License-Identifier: Apache-2.0

use proptest::{prelude::*, sample::select};
use serde_json::{Value, json};

use super::*;

fn keys() -> AnnotationKeys {
    AnnotationKeys::new("nodeportlocal.antrea.io")
}

/// Converts a Pod with this `spec` and `status`, as the API server sends it.
fn converted_pod(spec: Value, status: Value) -> Converted<Pod> {
    let metadata = json!({ "name": "web-0", "namespace": "default", "uid": "u-1", "resourceVersion": "17" });
    let mut object = json!({ "kind": "Pod", "apiVersion": "v1", "metadata": metadata });
    object["spec"] = spec;
    object["status"] = status;
    pod(serde_json::from_value(object).unwrap(), &keys()).unwrap()
}

fn converted_service(annotations: Value, spec: Value) -> Converted<Service> {
    let mut object = json!({ "metadata": { "name": "web", "namespace": "default", "uid": "u-2" } });
    object["metadata"]["annotations"] = annotations;
    object["spec"] = spec;
    service(serde_json::from_value(object).unwrap(), &keys()).unwrap()
}

fn addresses(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn numbers(ports: &[ContainerPort]) -> Vec<u16> {
    ports.iter().map(|port| port.port.0).collect()
}

#[test]
fn all_used_fields_of_a_pod_are_converted() {
    let object = json!({
        "metadata": {
            "name": "web-0", "namespace": "default", "uid": "u-1", "resourceVersion": "17",
            "labels": { "app": "web" }, "annotations": {
                "nodeportlocal.antrea.io": "[]", "nodeportlocal.antrea.io/requested-node-ports": "8080=61005", "other": "x",
            },
            "deletionTimestamp": "2026-01-01T00:00:00Z", "managedFields": [{ "manager": "kubelet" }],
        },
        "spec": { "containers": [{ "name": "c", "ports": [
            { "name": "http", "containerPort": 8080, "protocol": "TCP", "hostPort": 80, "hostIP": "192.0.2.1" },
        ] }] },
        "status": { "phase": "Running", "podIP": "10.0.0.5", "podIPs": [{ "ip": "10.0.0.5" }, { "ip": "2001:db8::5" }] },
    });
    let Converted { object, skipped } = pod(serde_json::from_value(object).unwrap(), &keys()).unwrap();
    assert_eq!(skipped, []);
    assert_eq!(
        object,
        Pod {
            key: ObjectKey::new("default", "web-0"),
            uid: PodUid("u-1".into()),
            resource_version: 17,
            labels: [("app".to_owned(), "web".to_owned())].into(),
            is_finished: false,
            is_terminating: true,
            host_network: false,
            ips: addresses(&["10.0.0.5", "2001:db8::5"]),
            ports: vec![ContainerPort {
                name: Some("http".to_owned()),
                port: PodPort(8080),
                protocol: Protocol::Tcp,
                host_port: Some(NodePort(80)),
                host_ip: Some("192.0.2.1".parse().unwrap()),
            }],
            annotation: Some("[]".to_owned()),
            annotation_manager: None,
            requests: NodePortRequests::read("8080=61005"),
            gate: Gate::Absent,
        }
    );
}

#[test]
fn a_readiness_gate_is_open_when_its_condition_is_true() {
    let gate_of = |gates: &[&str], conditions: &[(&str, &str)]| {
        let gates: Vec<Value> = gates.iter().map(|kind| json!({ "conditionType": kind })).collect();
        let conditions: Vec<Value> =
            conditions.iter().map(|(kind, status)| json!({ "type": kind, "status": status })).collect();
        converted_pod(json!({ "readinessGates": gates }), json!({ "conditions": conditions })).object.gate
    };
    let own = "nodeportlocal.antrea.io/published";
    assert_eq!(gate_of(&[], &[(own, "True")]), Gate::Absent);
    assert_eq!(gate_of(&["example.org/published"], &[]), Gate::Absent);
    assert_eq!(
        gate_of(&["example.org/published", own], &[("Ready", "True"), (own, "False")]),
        Gate::Closed { are_containers_ready: false }
    );
    let ready = [("ContainersReady", "True"), (own, "False")];
    assert_eq!(gate_of(&[own], &ready), Gate::Closed { are_containers_ready: true });
    assert_eq!(gate_of(&[own], &[("ContainersReady", "True"), (own, "True")]), Gate::Open);
}

#[test]
fn a_pod_without_spec_and_status_has_no_addresses_and_ports() {
    let Converted { object, skipped } = converted_pod(json!({}), json!({}));
    assert!(skipped.is_empty() && object.ips.is_empty() && object.ports.is_empty() && object.annotation.is_none());
}

#[test]
fn null_lists_are_empty_lists() {
    let spec = json!({ "containers": null, "initContainers": null, "hostNetwork": null });
    let pod = converted_pod(spec, json!({ "phase": null, "podIP": null, "podIPs": null }));
    assert!(pod.object.ports.is_empty() && pod.object.ips.is_empty());
    let service = converted_service(json!(null), json!({ "selector": null, "ports": null, "ipFamilies": null }));
    assert!(service.object.selector.is_empty() && service.object.ports.is_empty());
}

#[test]
fn an_object_without_name_namespace_or_uid_is_skipped() {
    for metadata in [json!({}), json!({ "name": "a" }), json!({ "name": "a", "namespace": "b" })] {
        let object: PodObject = serde_json::from_value(json!({ "metadata": metadata })).unwrap();
        assert_eq!(pod(object, &keys()), None);
    }
    assert_eq!(service(ServiceObject::default(), &keys()), None);
    assert_eq!(node(NodeObject::default()), None);
}

#[test]
fn succeeded_and_failed_pods_are_finished() {
    let is_finished = |phase: &str| converted_pod(json!({}), json!({ "phase": phase })).object.is_finished;
    assert!(is_finished("Succeeded") && is_finished("Failed"));
    assert!(!is_finished("Running") && !is_finished("Pending") && !is_finished("Unknown") && !is_finished(""));
}

#[test]
fn only_native_sidecars_among_init_containers_have_ports() {
    let spec = json!({
        "initContainers": [
            { "ports": [{ "containerPort": 1 }] },
            { "restartPolicy": "Always", "ports": [{ "containerPort": 2 }] },
            { "restartPolicy": "OnFailure", "ports": [{ "containerPort": 3 }] },
        ],
        "containers": [{ "ports": [{ "containerPort": 4 }] }, {}],
    });
    assert_eq!(numbers(&converted_pod(spec, json!({})).object.ports), [4, 2]);
}

/// The kubelet maps no host port of an init container, and a native sidecar is an init container
/// (kubernetes/kubernetes#57443).
#[test]
fn a_native_sidecar_has_no_host_port() {
    let port = |number| json!([{ "name": "http", "containerPort": number, "hostPort": 8099, "hostIP": "192.0.2.1" }]);
    let spec = json!({
        "initContainers": [{ "restartPolicy": "Always", "ports": port(2) }],
        "containers": [{ "ports": port(4) }],
    });
    let ports = converted_pod(spec, json!({})).object.ports;
    let host_ports: Vec<_> = ports.iter().map(|port| (port.port.0, port.host_port.map(|port| port.0))).collect();
    assert_eq!(host_ports, [(4, Some(8099)), (2, None)]);
    assert!(ports.iter().all(|port| port.name.as_deref() == Some("http")), "{ports:?}");
}

#[test]
fn invalid_ports_and_protocols_are_skipped_one_by_one() {
    let spec = json!({ "hostNetwork": true, "containers": [{ "ports": [
        { "containerPort": 0 },
        { "containerPort": 65536 },
        { "containerPort": -1 },
        { "containerPort": 65535, "protocol": "UDP" },
        { "containerPort": 7, "protocol": "QUIC" },
        { "containerPort": 8, "hostPort": 70000 },
        { "containerPort": 9, "hostIP": "not-an-address" },
        { "containerPort": 10, "hostPort": 0, "hostIP": "::", "name": "" },
        {},
    ] }] });
    let Converted { object, skipped } = converted_pod(spec, json!({}));
    assert_eq!(numbers(&object.ports), [65535, 10]);
    let last = object.ports.last().unwrap();
    assert_eq!((last.host_port, last.host_ip, &last.name), (None, None, &None));
    use Skipped::{Address, Port, Protocol};
    assert_eq!(skipped, [Port, Port, Port, Protocol, Port, Address, Port]);
}

#[test]
fn pod_addresses_come_from_either_field_without_duplicates() {
    let ips = |status: Value| converted_pod(json!({}), status).object.ips;
    assert_eq!(ips(json!({ "podIP": "10.0.0.5" })), addresses(&["10.0.0.5"]));
    assert_eq!(ips(json!({ "podIP": "" })), addresses(&[]));
    let twice = json!({ "podIPs": [{ "ip": "10.0.0.5" }, { "ip": "::ffff:10.0.0.5" }, {}, { "ip": "0.0.0.0" }] });
    assert_eq!(ips(twice), addresses(&["10.0.0.5"]));
    let broken = converted_pod(json!({}), json!({ "podIPs": [{ "ip": "10.0.0.300" }, { "ip": "2001:db8::5" }] }));
    assert_eq!((broken.object.ips, broken.skipped), (addresses(&["2001:db8::5"]), vec![Skipped::Address]));
}

#[test]
fn a_resource_version_that_is_no_number_counts_as_zero() {
    let object = json!({ "metadata": { "name": "a", "namespace": "b", "uid": "c", "resourceVersion": "xyz" } });
    assert_eq!(pod(serde_json::from_value(object).unwrap(), &keys()).unwrap().object.resource_version, 0);
}

#[test]
fn allowed_sources_are_read_from_the_annotation_of_the_domain() {
    let list = |annotations: Value| converted_service(annotations, json!({})).object.allow_list;
    let shown = |list: AllowList| list.sources.ranges().map(|range| range.to_string()).collect::<Vec<_>>();
    let key = "nodeportlocal.antrea.io/allowed-source-ranges";
    assert_eq!(list(json!({})), AllowList::ABSENT);
    assert_eq!(list(json!({ "example.com/allowed-source-ranges": "192.0.2.1" })), AllowList::ABSENT);
    assert!(list(json!({ key: "" })).sources.is_restricted(), "an empty list allows no source");
    assert_eq!(shown(list(json!({ key: "192.0.2.1, 2001:db8::/32" }))), ["192.0.2.1/32", "2001:db8::/32"]);
    assert!(list(json!({ key: "nonsense" })).unreadable.is_some());
    let other = AnnotationKeys::new("example.com").allowed_sources;
    assert_eq!(other, "example.com/allowed-source-ranges");
}

#[test]
fn only_the_exact_value_true_enables_a_service() {
    let is_enabled = |value: &str| {
        converted_service(json!({ "nodeportlocal.antrea.io/enabled": value }), json!({})).object.is_enabled
    };
    assert!(is_enabled("true"));
    for value in ["True", "TRUE", "1", "yes", " true", "true ", "", "false"] {
        assert!(!is_enabled(value), "{value:?}");
    }
    assert!(!converted_service(json!({ "example.com/enabled": "true" }), json!({})).object.is_enabled);
}

#[test]
fn node_ports_and_the_health_check_port_of_a_service_are_read_whatever_its_type() {
    let spec = json!({ "type": "LoadBalancer", "healthCheckNodePort": 61002, "ports": [
        { "port": 80, "nodePort": 61000 },
        { "port": 53, "nodePort": 61001, "protocol": "UDP" },
        { "port": 81, "nodePort": 0 },
        { "port": 82 },
    ] });
    let node_ports: Vec<_> = converted_service(json!({}), spec).object.node_ports.into_iter().collect();
    assert_eq!(node_ports, [61_000, 61_001, 61_002].map(NodePort));
}

#[test]
fn a_target_port_is_a_number_a_name_or_the_services_own_port() {
    let spec = json!({ "ports": [
        { "port": 80, "targetPort": 8080 },
        { "port": 81, "targetPort": "http", "protocol": "UDP" },
        { "port": 82 },
        { "port": 83, "targetPort": 0 },
        { "port": 84, "targetPort": "" },
        { "port": 85, "targetPort": 99999 },
        { "port": 86, "targetPort": 1, "protocol": "tcp" },
    ] });
    let Converted { object, skipped } = converted_service(json!({}), spec);
    let number = |port| TargetPort::Number(PodPort(port));
    let targets: Vec<_> = object.ports.into_iter().map(|port| (port.protocol, port.target)).collect();
    assert_eq!(
        targets,
        [
            (Protocol::Tcp, number(8080)),
            (Protocol::Udp, TargetPort::Name("http".to_owned())),
            (Protocol::Tcp, number(82)),
            (Protocol::Tcp, number(83)),
            (Protocol::Tcp, number(84)),
        ]
    );
    assert_eq!(skipped, [Skipped::Port, Skipped::Protocol]);
}

#[test]
fn a_service_of_an_unknown_type_gets_no_node_ports() {
    let of = |name: Value| converted_service(json!({}), json!({ "type": name }));
    assert_eq!(of(json!("ClusterIP")).object.service_type, ServiceType::ClusterIp);
    assert_eq!(of(json!(null)).object.service_type, ServiceType::ClusterIp);
    assert_eq!(of(json!("LoadBalancer")).object.service_type, ServiceType::LoadBalancer);
    let Converted { object, skipped } = of(json!("Teleport"));
    assert_eq!((object.service_type, skipped), (ServiceType::ExternalName, vec![Skipped::ServiceType]));
}

#[test]
fn ip_families_keep_their_order() {
    let spec = json!({ "ipFamilies": ["IPv6", "IPX", "IPv4"] });
    let Converted { object, skipped } = converted_service(json!({}), spec);
    assert_eq!((object.families, skipped), (vec![Family::V6, Family::V4], vec![Skipped::Family]));
}

#[test]
fn a_node_has_internal_and_external_addresses() {
    let object = json!({ "metadata": { "name": "worker-1" }, "status": { "addresses": [
        { "type": "Hostname", "address": "worker-1" },
        { "type": "ExternalIP", "address": "198.51.100.1" },
        { "type": "InternalIP", "address": "192.0.2.1" },
        { "type": "InternalIP", "address": "2001:db8::1" },
        { "type": "InternalIP", "address": "192.0.2.1" },
        { "type": "InternalIP", "address": "worker-1" },
        { "type": "InternalIP" },
        {},
    ] } });
    let Converted { object, skipped } = node(serde_json::from_value(object).unwrap()).unwrap();
    assert_eq!(object.internal_ips, addresses(&["192.0.2.1", "2001:db8::1"]));
    assert_eq!(object.external_ips, addresses(&["198.51.100.1"]));
    assert_eq!(skipped, [Skipped::Address, Skipped::Address]);
}

/// Generates values of a numeric field, including invalid values that an API server without validation might store.
fn number() -> impl Strategy<Value = Value> {
    prop_oneof![
        select(vec![0_i64, 1, 80, 65_535, 65_536, -1, i64::MAX, i64::MIN]).prop_map(|number| json!(number)),
        any::<i64>().prop_map(|number| json!(number)),
        Just(Value::Null),
    ]
}

fn text() -> impl Strategy<Value = Value> {
    let known = ["", "TCP", "UDP", "SCTP", "Always", "IPv4", "IPv6", "192.0.2.1", "::", "0.0.0.0", "::ffff:192.0.2.1"];
    prop_oneof![
        4 => select(known.to_vec()).prop_map(|text| json!(text)),
        1 => any::<String>().prop_map(|text| json!(text)),
        1 => Just(Value::Null),
    ]
}

fn container() -> impl Strategy<Value = Value> {
    let port = (text(), number(), text(), number(), text()).prop_map(|(name, port, protocol, host_port, host_ip)| {
        // `containerPort` is a required field, so 1 replaces a generated null.
        let port = if port.is_null() { json!(1) } else { port };
        json!({ "name": name, "containerPort": port, "protocol": protocol, "hostPort": host_port, "hostIP": host_ip })
    });
    (text(), prop::collection::vec(port, 0..4))
        .prop_map(|(policy, ports)| json!({ "restartPolicy": policy, "ports": ports }))
}

proptest! {
    #[test]
    fn a_converted_pod_has_only_valid_ports_and_addresses(
        containers in prop::collection::vec(container(), 0..3),
        sidecars in prop::collection::vec(container(), 0..3),
        ips in prop::collection::vec(text(), 0..4),
        phase in text(),
    ) {
        let ips: Vec<Value> = ips.into_iter().map(|ip| json!({ "ip": ip })).collect();
        let spec = json!({ "containers": containers, "initContainers": sidecars });
        let pod = converted_pod(spec, json!({ "phase": phase, "podIPs": ips })).object;
        for port in &pod.ports {
            prop_assert!(port.port.0 != 0 && port.host_port.is_none_or(|host_port| host_port.0 != 0), "{:?}", port);
            prop_assert!(port.host_ip.is_none_or(|ip| !ip.is_unspecified()), "{:?}", port);
        }
        let once: std::collections::BTreeSet<_> = pod.ips.iter().collect();
        prop_assert!(once.len() == pod.ips.len() && pod.ips.iter().all(|ip| !ip.is_unspecified()), "{:?}", pod.ips);
    }

    #[test]
    fn a_converted_service_has_only_valid_target_ports(
        kind in text(),
        families in prop::collection::vec(text(), 0..4),
        ports in prop::collection::vec((number(), text(), prop_oneof![number(), text()]), 0..4),
        enabled in text(),
    ) {
        let families: Vec<Value> = families.into_iter().filter(Value::is_string).collect();
        let ports: Vec<Value> = ports.into_iter().map(|(port, protocol, target)| {
            let port = if port.is_null() { json!(1) } else { port };
            json!({ "port": port, "protocol": protocol, "targetPort": target })
        }).collect();
        let annotations = if enabled.is_null() { json!({}) } else { json!({ "nodeportlocal.antrea.io/enabled": enabled }) };
        let service = converted_service(annotations, json!({ "type": kind, "ipFamilies": families, "ports": ports })).object;
        prop_assert_eq!(service.is_enabled, enabled == "true");
        for port in &service.ports {
            let is_valid = match &port.target {
                TargetPort::Number(number) => number.0 != 0,
                TargetPort::Name(name) => !name.is_empty(),
            };
            prop_assert!(is_valid, "{:?}", port);
        }
    }
}

#[test]
fn addresses_of_a_pod_without_a_sandbox_are_not_used() {
    let ips = |ready: Option<&str>| {
        let conditions: Vec<Value> =
            ready.into_iter().map(|status| json!({ "type": "PodReadyToStartContainers", "status": status })).collect();
        let status = json!({ "podIP": "10.0.0.5", "podIPs": [{ "ip": "10.0.0.5" }], "conditions": conditions });
        converted_pod(json!({}), status).object.ips
    };
    // After a reboot of the Node, the Pod's status keeps the old addresses until the kubelet has created the sandbox
    // again.
    assert_eq!(ips(Some("False")), addresses(&[]));
    for other in [Some("True"), Some("Unknown"), None] {
        assert_eq!(ips(other), addresses(&["10.0.0.5"]), "{other:?}");
    }
}

#[test]
fn another_field_manager_of_the_annotation_is_named() {
    let manager = |fields: Value| {
        let mut object = json!({ "metadata": { "name": "web-0", "namespace": "default", "uid": "u-1" } });
        object["metadata"]["managedFields"] = fields;
        pod(serde_json::from_value(object).unwrap(), &keys()).unwrap().object.annotation_manager
    };
    let entry = |manager: &str, key: &str| {
        let fields = json!({ "f:metadata": { "f:annotations": { ".": {}, key: {} } }, "f:status": { "f:phase": {} } });
        json!({ "manager": manager, "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": fields })
    };
    let (ours, other) = ("f:nodeportlocal.antrea.io", "f:example.org/note");
    assert_eq!(manager(json!([entry("kubectl", other), entry("antrea-agent", ours)])).as_deref(), Some("antrea-agent"));
    assert_eq!(manager(json!([entry("kubectl", other), entry("npl-agent", ours)])), None);
    assert_eq!(manager(json!([{ "manager": "kubelet" }, { "fieldsV1": {} }, entry("kubelet", other)])), None);
    assert_eq!(manager(Value::Null), None);
}
