// SPDX-License-Identifier: Apache-2.0
//! Stories about Pods that request certain node ports by an annotation.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes them")]

use expect_test::expect;

use crate::core::tests::script::check;

#[test]
fn a_pod_gets_the_free_node_ports_that_it_requests() {
    check(
        "node 192.0.2.1
         service default/web app=web 53/udp 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5 request=8080=61000,53/udp=61003
         pod default/web-1 app=web 10.0.0.6 request=8080=61002
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 53/udp 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5 request=8080=61000,53/udp=61003
                reserve 61000/tcp IPv4
                reserve 61003/udp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                map 61003/udp IPv4 -> 10.0.0.5 53
                annotate default/web-0 8080=192.0.2.1:61000/tcp 53=192.0.2.1:61003/udp
            pod default/web-1 app=web 10.0.0.6 request=8080=61002
                reserve 61001/udp IPv4
                reserve 61002/tcp IPv4
                map 61001/udp IPv4 -> 10.0.0.6 53
                map 61002/tcp IPv4 -> 10.0.0.6 8080
                annotate default/web-1 53=192.0.2.1:61001/udp 8080=192.0.2.1:61002/tcp
            show
                61000/tcp IPv4 of default/web-0: Active
                61001/udp IPv4 of default/web-1: Active
                61002/tcp IPv4 of default/web-1: Active
                61003/udp IPv4 of default/web-0: Active
        "#]],
    );
}

/// The Pod's port 53 has no request and the lower number, and must not get the node port that port 8080 requests.
#[test]
fn a_requested_node_port_goes_to_no_other_port_or_pod_in_the_same_pass() {
    check(
        "node 192.0.2.1
         service default/web app=web 53/udp 8080/tcp
         start
         pod default/a app=web 10.0.0.5 &
         pod default/b app=web 10.0.0.6 request=8080=61000",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 53/udp 8080/tcp
            start
            pod default/a app=web 10.0.0.5 &
            pod default/b app=web 10.0.0.6 request=8080=61000
                reserve 61000/tcp IPv4
                reserve 61001/udp IPv4
                reserve 61002/udp IPv4
                reserve 61003/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.6 8080
                map 61001/udp IPv4 -> 10.0.0.6 53
                map 61002/udp IPv4 -> 10.0.0.5 53
                map 61003/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 53=192.0.2.1:61002/udp 8080=192.0.2.1:61003/tcp
                annotate default/b 8080=192.0.2.1:61000/tcp 53=192.0.2.1:61001/udp
        "#]],
    );
}

#[test]
fn a_request_for_all_protocols_gets_one_number_for_protocols_and_families() {
    check(
        "node 192.0.2.1 2001:db8:1::1
         service default/dns app=dns dual 53/udp 53/tcp
         start
         pod default/dns-0 app=dns 10.0.0.5 2001:db8::5 request=53=61002",
        &expect![[r#"
            node 192.0.2.1 2001:db8:1::1
            service default/dns app=dns dual 53/udp 53/tcp
            start
            pod default/dns-0 app=dns 10.0.0.5 2001:db8::5 request=53=61002
                reserve 61002/tcp IPv4
                reserve 61002/udp IPv4
                reserve 61002/tcp IPv6
                reserve 61002/udp IPv6
                map 61002/tcp IPv4 -> 10.0.0.5 53
                map 61002/udp IPv4 -> 10.0.0.5 53
                map 61002/tcp IPv6 -> 2001:db8::5 53
                map 61002/udp IPv6 -> 2001:db8::5 53
                annotate default/dns-0 53=2001:db8:1::1:61002/tcp 53=2001:db8:1::1:61002/udp 53=192.0.2.1:61002/tcp 53=192.0.2.1:61002/udp
        "#]],
    );
}

#[test]
fn of_two_pods_that_request_a_node_port_the_first_keeps_it() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/b app=web 10.0.0.5 request=8080=61002
         pod default/a app=web 10.0.0.6 request=8080=61002
         show
         gone default/b
         wait 100s
         show
         pod default/a uid=a-2 app=web 10.0.0.7
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/b app=web 10.0.0.5 request=8080=61002
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.5 8080
                annotate default/b 8080=192.0.2.1:61002/tcp
            pod default/a app=web 10.0.0.6 request=8080=61002
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.6 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            show
                61000/tcp IPv4 of default/a: Active
                61002/tcp IPv4 of default/b: Active
                NodePortRequestRefused: pod default/a: pod port 8080/tcp does not get the requested node port 61002, which belongs to pod default/b: request another node port for one of the two pods
            gone default/b
                unmap 61002/tcp IPv4
            wait 100s
                release 61002/tcp IPv4
            show
                61000/tcp IPv4 of default/a: Active
                NodePortRequestRefused: pod default/a: pod port 8080/tcp does not get the requested node port 61002, which belongs to pod default/b: request another node port for one of the two pods
            pod default/a uid=a-2 app=web 10.0.0.7
                reserve 61002/tcp IPv4
                unmap 61000/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.7 8080
                annotate default/a 8080=192.0.2.1:61002/tcp
            show
                61000/tcp IPv4 of default/a: Quarantined { until: Some(Moment(161000)) }
                61002/tcp IPv4 of default/a: Active
        "#]],
    );
}

#[test]
fn a_successor_gets_the_node_port_after_the_quarantine_only() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5 request=8080=61002
         gone default/web-0
         wait 20s
         pod default/web-0 uid=second app=web 10.0.0.6 request=8080=61002
         show
         wait 100s
         show
         gone default/web-0
         pod default/web-0 uid=third app=web 10.0.0.7 request=8080=61002
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5 request=8080=61002
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61002/tcp
            gone default/web-0
                unmap 61002/tcp IPv4
            wait 20s
            pod default/web-0 uid=second app=web 10.0.0.6 request=8080=61002
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.6 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            show
                61000/tcp IPv4 of default/web-0: Active
                61002/tcp IPv4 of default/web-0: Quarantined { until: Some(Moment(61000)) }
                NodePortRequestRefused: pod default/web-0: pod port 8080/tcp does not get the requested node port 61002, which is in quarantine because pod default/web-0 had it: request another node port, or delete the pod after 111 s without packets to the node port, so that its successor requests the node port again
            wait 100s
                release 61002/tcp IPv4
            show
                61000/tcp IPv4 of default/web-0: Active
                NodePortRequestRefused: pod default/web-0: pod port 8080/tcp does not get the requested node port 61002, which is in quarantine because pod default/web-0 had it: request another node port, or delete the pod after 111 s without packets to the node port, so that its successor requests the node port again
            gone default/web-0
                unmap 61000/tcp IPv4
            pod default/web-0 uid=third app=web 10.0.0.7 request=8080=61002
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.7 8080
                annotate default/web-0 8080=192.0.2.1:61002/tcp
            show
                61000/tcp IPv4 of default/web-0: Quarantined { until: Some(Moment(181000)) }
                61002/tcp IPv4 of default/web-0: Active
        "#]],
    );
}

#[test]
fn a_node_port_with_recent_traffic_is_not_given_on_request() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         send 61002/udp
         pod default/web-0 app=web 10.0.0.5 request=8080=61002
         show
         cease 61002/udp
         wait 130s
         pod default/web-1 app=web 10.0.0.6 request=8080=61002",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            send 61002/udp
            pod default/web-0 app=web 10.0.0.5 request=8080=61002
                reserve 61002/tcp IPv4
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            show
                61000/tcp IPv4 of default/web-0: Active
                NodePortRequestRefused: pod default/web-0: pod port 8080/tcp does not get the requested node port 61002, which received packets or had a mapping within the last two minutes: let load balancers stop using it, and delete the pod after 120 s, so that its successor requests the node port again
            cease 61002/udp
            wait 130s
            pod default/web-1 app=web 10.0.0.6 request=8080=61002
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.6 8080
                annotate default/web-1 8080=192.0.2.1:61002/tcp
        "#]],
    );
}

#[test]
fn a_node_port_that_is_reserved_or_outside_of_the_range_is_not_given_on_request() {
    check(
        "node 192.0.2.1
         range 61000-61007
         service default/web app=web 8080/tcp
         service default/ingress app=ingress nodeport 80/tcp 61001
         steal 61003/tcp
         start
         pod default/host app=host 10.0.0.4 port=http:80/tcp@61002
         pod default/a app=web 10.0.0.5 request=8080=61001
         pod default/b app=web 10.0.0.6 request=8080=61002
         pod default/c app=web 10.0.0.7 request=8080=61003
         pod default/d app=web 10.0.0.8 request=8080=8080
         pod default/e app=web 10.0.0.9 request=8080=61006,8081=x port=http:8080/tcp@80
         show",
        &expect![[r#"
            node 192.0.2.1
            range 61000-61007
            service default/web app=web 8080/tcp
            service default/ingress app=ingress nodeport 80/tcp 61001
            steal 61003/tcp
            start
            pod default/host app=host 10.0.0.4 port=http:80/tcp@61002
            pod default/a app=web 10.0.0.5 request=8080=61001
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            pod default/b app=web 10.0.0.6 request=8080=61002
                reserve 61003/tcp IPv4
                reserve 61004/tcp IPv4
                map 61004/tcp IPv4 -> 10.0.0.6 8080
                annotate default/b 8080=192.0.2.1:61004/tcp
            pod default/c app=web 10.0.0.7 request=8080=61003
                reserve 61005/tcp IPv4
                map 61005/tcp IPv4 -> 10.0.0.7 8080
                annotate default/c 8080=192.0.2.1:61005/tcp
            pod default/d app=web 10.0.0.8 request=8080=8080
                reserve 61006/tcp IPv4
                map 61006/tcp IPv4 -> 10.0.0.8 8080
                annotate default/d 8080=192.0.2.1:61006/tcp
            pod default/e app=web 10.0.0.9 request=8080=61006,8081=x port=http:8080/tcp@80
                annotate default/e 8080=192.0.2.1:80/tcp
            show
                61000/tcp IPv4 of default/a: Active
                61004/tcp IPv4 of default/b: Active
                61005/tcp IPv4 of default/c: Active
                61006/tcp IPv4 of default/d: Active
                NodePortRequestRefused: pod default/a: pod port 8080/tcp does not get the requested node port 61001, which is a nodePort or healthCheckNodePort of service default/ingress: request another node port, or give the service another port
                NodePortRequestRefused: pod default/b: pod port 8080/tcp does not get the requested node port 61002, which is a hostPort of a pod on the node: request a node port that no pod has as hostPort
                NodePortRequestRefused: pod default/c: pod port 8080/tcp does not get the requested node port 61003, which another process of the node uses: find the process with `ss -tulnp`, or request another node port
                NodePortRequestRefused: pod default/d: pod port 8080/tcp does not get the requested node port 8080, which is outside of the agent's --port-range 61000-61007: request a node port of this range
                NodePortRequestRefused: pod default/e: entry 2 of requested-node-ports, "8081=x", is not a pod port and a node port and requests no node port: write it as 8080=61005 or 53/udp=61006
                NodePortRequestRefused: pod default/e: pod port 8080/tcp does not get the requested node port 61006, because the pod port is published with its host port 80: remove the request, or the pod's hostPort or hostNetwork
        "#]],
    );
}

#[test]
fn a_changed_request_does_not_move_a_mapping_and_applies_to_the_next_mapping() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         pod default/web-0 app=web 10.0.0.5 request=8080=61002
         show
         unservice default/web
         wait 100s
         service default/web app=web 8080/tcp
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            pod default/web-0 app=web 10.0.0.5 request=8080=61002
            show
                61000/tcp IPv4 of default/web-0: Active
                NodePortRequestRefused: pod default/web-0: pod port 8080/tcp does not get the requested node port 61002, because the pod port already has another node port, which a request does not change: delete the pod, so that its successor requests the node port again
            unservice default/web
                withdraw default/web-0
            wait 100s
                unmap 61000/tcp IPv4
                release 61000/tcp IPv4
            service default/web app=web 8080/tcp
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61002/tcp
            show
                61002/tcp IPv4 of default/web-0: Active
        "#]],
    );
}

#[test]
fn a_restarted_agent_keeps_the_node_port_of_a_pod_whatever_the_pod_requests() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5 request=8080=61002
         pod default/web-1 app=web 10.0.0.6 request=8080=61002
         start
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5 request=8080=61002
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61002/tcp
            pod default/web-1 app=web 10.0.0.6 request=8080=61002
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.6 8080
                annotate default/web-1 8080=192.0.2.1:61000/tcp
            start
                reserve 61000/tcp IPv4
                reserve 61002/tcp IPv4
            show
                61000/tcp IPv4 of default/web-1: Active
                61002/tcp IPv4 of default/web-0: Active
                NodePortRequestRefused: pod default/web-1: pod port 8080/tcp does not get the requested node port 61002, which belongs to pod default/web-0: request another node port for one of the two pods
        "#]],
    );
}

/// AKO and F5 CIS ignore the protocol of an annotation entry.
#[test]
fn a_number_that_another_pod_has_or_had_for_another_protocol_is_not_given_on_request() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         service default/dns app=dns 53/udp
         start
         pod default/web-0 app=web 10.0.0.5 request=8080=61002
         pod default/dns-0 app=dns 10.0.0.6 request=53=61002
         gone default/web-0
         wait 20s
         pod default/dns-1 app=dns 10.0.0.7 request=53=61002
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            service default/dns app=dns 53/udp
            start
            pod default/web-0 app=web 10.0.0.5 request=8080=61002
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61002/tcp
            pod default/dns-0 app=dns 10.0.0.6 request=53=61002
                reserve 61000/udp IPv4
                map 61000/udp IPv4 -> 10.0.0.6 53
                annotate default/dns-0 53=192.0.2.1:61000/udp
            gone default/web-0
                unmap 61002/tcp IPv4
            wait 20s
            pod default/dns-1 app=dns 10.0.0.7 request=53=61002
                reserve 61001/udp IPv4
                map 61001/udp IPv4 -> 10.0.0.7 53
                annotate default/dns-1 53=192.0.2.1:61001/udp
            show
                61000/udp IPv4 of default/dns-0: Active
                61001/udp IPv4 of default/dns-1: Active
                61002/tcp IPv4 of default/web-0: Quarantined { until: Some(Moment(61000)) }
                NodePortRequestRefused: pod default/dns-0: pod port 53/udp does not get the requested node port 61002, which belongs to pod default/web-0: request another node port for one of the two pods
                NodePortRequestRefused: pod default/dns-1: pod port 53/udp does not get the requested node port 61002, which is in quarantine because pod default/web-0 had it: request another node port, or delete the pod after 111 s without packets to the node port, so that its successor requests the node port again
        "#]],
    );
}

/// The restarted agent does not know which Pod had the node port.
#[test]
fn a_restarted_agent_gives_no_node_port_in_quarantine_on_request() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5 request=8080=61002
         gone default/web-0
         wait 20s
         start
         pod default/web-0 uid=second app=web 10.0.0.6 request=8080=61002
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5 request=8080=61002
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61002/tcp
            gone default/web-0
                unmap 61002/tcp IPv4
            wait 20s
            start
            pod default/web-0 uid=second app=web 10.0.0.6 request=8080=61002
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.6 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            show
                61000/tcp IPv4 of default/web-0: Active
                NodePortRequestRefused: pod default/web-0: pod port 8080/tcp does not get the requested node port 61002, which is in quarantine because another pod had it: request another node port, or delete the pod after 111 s without packets to the node port, so that its successor requests the node port again
        "#]],
    );
}

#[test]
fn requests_have_no_effect_unless_they_are_enabled() {
    check(
        "no-requests
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5 request=8080=61002
         pod default/other app=other 10.0.0.6 request=8080=61002
         show",
        &expect![[r#"
            no-requests
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5 request=8080=61002
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            pod default/other app=other 10.0.0.6 request=8080=61002
            show
                61000/tcp IPv4 of default/web-0: Active
                NodePortRequestRefused: pod default/web-0: the pod requests node ports, which the agent does not permit, and gets ordinary node ports: set the agent's --requested-node-ports, or remove the annotation requested-node-ports from the pod
        "#]],
    );
}

#[test]
fn merged_protocols_have_one_request() {
    check(
        "pairing merged
         node 192.0.2.1
         service default/dns app=dns 53/udp 53/tcp
         start
         pod default/dns-0 app=dns 10.0.0.5 request=53/udp=61002
         pod default/dns-1 app=dns 10.0.0.6 request=53/udp=61001,53/tcp=61003
         show",
        &expect![[r#"
            pairing merged
            node 192.0.2.1
            service default/dns app=dns 53/udp 53/tcp
            start
            pod default/dns-0 app=dns 10.0.0.5 request=53/udp=61002
                reserve 61002/tcp IPv4
                reserve 61002/udp IPv4
                map 61002/tcp IPv4 -> 10.0.0.5 53
                map 61002/udp IPv4 -> 10.0.0.5 53
                annotate default/dns-0 53=192.0.2.1:61002/tcp+udp
            pod default/dns-1 app=dns 10.0.0.6 request=53/udp=61001,53/tcp=61003
                reserve 61003/tcp IPv4
                reserve 61003/udp IPv4
                map 61003/tcp IPv4 -> 10.0.0.6 53
                map 61003/udp IPv4 -> 10.0.0.6 53
                annotate default/dns-1 53=192.0.2.1:61003/tcp+udp
            show
                61002/tcp IPv4 of default/dns-0: Active
                61002/udp IPv4 of default/dns-0: Active
                61003/tcp IPv4 of default/dns-1: Active
                61003/udp IPv4 of default/dns-1: Active
                NodePortRequestRefused: pod default/dns-1: pod port 53/udp does not get the requested node port 61001, because --protocol-pairing=merged gives all protocols of the pod port one node port, and another protocol requests 61003: request one node port for all protocols
        "#]],
    );
}
