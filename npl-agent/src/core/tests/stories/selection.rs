// SPDX-License-Identifier: Apache-2.0
//! Tests which Pod ports Services request, and which of these ports are published.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes them")]

use expect_test::expect;

use crate::core::tests::script::check;

#[test]
fn a_pod_is_mapped_before_it_is_published_and_unselected_pods_are_not_mapped() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web
         pod default/web-0 app=web 10.0.0.5
         pod default/other app=other 10.0.0.6
         pod elsewhere/web-0 app=web 10.0.0.7
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            pod default/other app=other 10.0.0.6
            pod elsewhere/web-0 app=web 10.0.0.7
            show
                61000/tcp IPv4 of default/web-0: Active
        "#]],
    );
}

#[test]
fn services_on_which_npl_does_not_act_cause_no_op() {
    check(
        "node 192.0.2.1
         start
         pod default/web-0 app=web 10.0.0.5
         service default/off app=web 8080/tcp off
         service default/nodeport app=web 8080/tcp nodeport
         service default/everything 8080/tcp
         service default/web app=web 8080/tcp
         service default/web app=web 8080/tcp nodeport",
        &expect![[r#"
            node 192.0.2.1
            start
            pod default/web-0 app=web 10.0.0.5
            service default/off app=web 8080/tcp off
            service default/nodeport app=web 8080/tcp nodeport
            service default/everything 8080/tcp
            service default/web app=web 8080/tcp
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            service default/web app=web 8080/tcp nodeport
                withdraw default/web-0
        "#]],
    );
}

#[test]
fn ports_of_all_services_of_a_pod_are_published_in_one_patch() {
    check(
        "node 192.0.2.1
         service default/one app=web 8080/tcp dns/udp
         service default/two app=web tier=front http/tcp 9090/tcp
         start
         pod default/web-0 app=web tier=front port=http:8080/tcp port=dns:53/udp port=dns:5353/udp 10.0.0.5
         unservice default/one
         unservice default/two",
        &expect![[r#"
            node 192.0.2.1
            service default/one app=web 8080/tcp dns/udp
            service default/two app=web tier=front http/tcp 9090/tcp
            start
            pod default/web-0 app=web tier=front port=http:8080/tcp port=dns:53/udp port=dns:5353/udp 10.0.0.5
                reserve 61000/udp IPv4
                reserve 61001/udp IPv4
                reserve 61002/tcp IPv4
                reserve 61003/tcp IPv4
                map 61000/udp IPv4 -> 10.0.0.5 53
                map 61001/udp IPv4 -> 10.0.0.5 5353
                map 61002/tcp IPv4 -> 10.0.0.5 8080
                map 61003/tcp IPv4 -> 10.0.0.5 9090
                annotate default/web-0 53=192.0.2.1:61000/udp 5353=192.0.2.1:61001/udp 8080=192.0.2.1:61002/tcp 9090=192.0.2.1:61003/tcp
            unservice default/one
                annotate default/web-0 8080=192.0.2.1:61002/tcp 9090=192.0.2.1:61003/tcp
            unservice default/two
                withdraw default/web-0
        "#]],
    );
}

#[test]
fn a_name_that_the_pod_does_not_have_is_a_problem_of_that_port_alone() {
    check(
        "node 192.0.2.1
         service default/web app=web http/tcp 9090/tcp 99/sctp
         start
         pod default/web-0 app=web port=http:80/udp 10.0.0.5
         show
         pod default/web-0 app=web port=http:80/tcp 10.0.0.5
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web http/tcp 9090/tcp 99/sctp
            start
            pod default/web-0 app=web port=http:80/udp 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 9090
                annotate default/web-0 9090=192.0.2.1:61000/tcp
            show
                61000/tcp IPv4 of default/web-0: Active
                UnresolvedTargetPort: pod default/web-0: no container port is named "http" with protocol tcp, as the targetPort of service default/web requires: add the name to a container port, or change the targetPort
                UnsupportedProtocol: service default/web: protocol sctp is not among the agent's --protocols, so ports of this protocol get no node port; the service's other ports are served: add sctp to --protocols
            pod default/web-0 app=web port=http:80/tcp 10.0.0.5
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 80
                annotate default/web-0 9090=192.0.2.1:61000/tcp 80=192.0.2.1:61001/tcp
            show
                61000/tcp IPv4 of default/web-0: Active
                61001/tcp IPv4 of default/web-0: Active
                UnsupportedProtocol: service default/web: protocol sctp is not among the agent's --protocols, so ports of this protocol get no node port; the service's other ports are served: add sctp to --protocols
        "#]],
    );
}

#[test]
fn host_ports_and_ports_of_the_host_network_are_published_without_a_mapping() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp 9090/tcp 53/udp
         start
         pod default/both app=web port=a:8080/tcp@80 port=b:53/udp@53 port=c:9090/tcp@198.51.100.7:90 10.0.0.5
         pod default/host app=web hostnet 192.0.2.1
         pod default/here app=web port=a:8080/tcp@192.0.2.1:81 port=b:9090/udp@9090 10.0.0.6",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp 9090/tcp 53/udp
            start
            pod default/both app=web port=a:8080/tcp@80 port=b:53/udp@53 port=c:9090/tcp@198.51.100.7:90 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 9090
                annotate default/both 53=192.0.2.1:53/udp 8080=192.0.2.1:80/tcp 9090=192.0.2.1:61000/tcp
            pod default/host app=web hostnet 192.0.2.1
                annotate default/host 53=192.0.2.1:53/udp 8080=192.0.2.1:8080/tcp 9090=192.0.2.1:9090/tcp
            pod default/here app=web port=a:8080/tcp@192.0.2.1:81 port=b:9090/udp@9090 10.0.0.6
                reserve 61001/udp IPv4
                reserve 61002/tcp IPv4
                map 61001/udp IPv4 -> 10.0.0.6 53
                map 61002/tcp IPv4 -> 10.0.0.6 9090
                annotate default/here 8080=192.0.2.1:81/tcp 53=192.0.2.1:61001/udp 9090=192.0.2.1:61002/tcp
        "#]],
    );
}

#[test]
fn a_host_port_is_not_allocated_and_a_conflict_is_reported() {
    check(
        "range 61000-61002
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=none port=x:1/tcp@61000 10.0.0.5
         pod default/b app=web 10.0.0.6
         pod default/c app=web port=x:8080/tcp@61001 10.0.0.7
         show
         gone default/b",
        &expect![[r#"
            range 61000-61002
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=none port=x:1/tcp@61000 10.0.0.5
            pod default/b app=web 10.0.0.6
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/b 8080=192.0.2.1:61001/tcp
            pod default/c app=web port=x:8080/tcp@61001 10.0.0.7
            show
                61001/tcp IPv4 of default/b: Active
                HostPortConflict: pod default/c: host port 61001/tcp is in use as the node port of another pod: choose a host port outside the agent's --port-range
            gone default/b
                unmap 61001/tcp IPv4
                annotate default/c 8080=192.0.2.1:61001/tcp
        "#]],
    );
}

#[test]
fn a_host_port_takes_the_port_of_a_pod_that_cannot_be_reached() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/b app=web 10.0.0.5
         pod default/a app=other 10.0.0.5
         pod default/c app=web port=x:8080/tcp@61000 10.0.0.7
         show
         wait 30s
         gone default/a",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/b app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/b 8080=192.0.2.1:61000/tcp
            pod default/a app=other 10.0.0.5
                withdraw default/b
                unmap 61000/tcp IPv4
            pod default/c app=web port=x:8080/tcp@61000 10.0.0.7
            show
                61000/tcp IPv4 of default/b: Draining { until: Some(Moment(31000)) }
                AddressConflict: pod default/b: pod default/a has the same address 10.0.0.5 and gets the traffic: delete one of the two pods
                HostPortConflict: pod default/c: host port 61000/tcp is in use as the node port of another pod: choose a host port outside the agent's --port-range
            wait 30s
                annotate default/c 8080=192.0.2.1:61000/tcp
            gone default/a
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/b 8080=192.0.2.1:61001/tcp
        "#]],
    );
}

#[test]
fn families_follow_service_pod_and_node() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp dual
         start
         pod default/a app=web 10.0.0.5 2001:db8::5
         show
         node external=192.0.2.1 2001:db8::1
         service default/web app=web 8080/tcp ipv6
         wait 30s
         pod default/a app=web 10.0.0.5",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp dual
            start
            pod default/a app=web 10.0.0.5 2001:db8::5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            show
                61000/tcp IPv4 of default/a: Active
                NoNodeAddress: pod default/a: the node has no IPv6 address to publish: add an IPv6 address to the node, or name an address of the node with --node-ip
            node external=192.0.2.1 2001:db8::1
                reserve 61000/tcp IPv6
                map 61000/tcp IPv6 -> 2001:db8::5 8080
                annotate default/a 8080=2001:db8::1:61000/tcp 8080=192.0.2.1:61000/tcp
            service default/web app=web 8080/tcp ipv6
                annotate default/a 8080=2001:db8::1:61000/tcp
            wait 30s
                unmap 61000/tcp IPv4
            pod default/a app=web 10.0.0.5
                withdraw default/a
                unmap 61000/tcp IPv6
        "#]],
    );
}

#[test]
fn an_unsupported_family_is_reported_once_for_the_service() {
    check(
        "only-ipv4
         node 192.0.2.1 2001:db8::1
         service default/web app=web 8080/tcp ipv6
         start
         pod default/a app=web 10.0.0.5 2001:db8::5
         show
         service default/web app=web 8080/tcp dual
         show",
        &expect![[r#"
            only-ipv4
            node 192.0.2.1 2001:db8::1
            service default/web app=web 8080/tcp ipv6
            start
            pod default/a app=web 10.0.0.5 2001:db8::5
            show
                UnsupportedFamily: service default/web: the agent does not serve family IPv6: add another family to spec.ipFamilies
            service default/web app=web 8080/tcp dual
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            show
                61000/tcp IPv4 of default/a: Active
        "#]],
    );
}

#[test]
fn a_service_problem_is_reported_once_on_nodes_with_its_pods() {
    check(
        "node 192.0.2.1
         service default/web app=web 99/sctp
         start
         pod default/other app=other 10.0.0.5
         show
         pod default/web-0 app=web 10.0.0.6
         pod default/web-1 app=web 10.0.0.7
         show
         gone default/web-0
         gone default/web-1
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 99/sctp
            start
            pod default/other app=other 10.0.0.5
            show
            pod default/web-0 app=web 10.0.0.6
            pod default/web-1 app=web 10.0.0.7
            show
                UnsupportedProtocol: service default/web: protocol sctp is not among the agent's --protocols, so ports of this protocol get no node port; the service's other ports are served: add sctp to --protocols
            gone default/web-0
            gone default/web-1
            show
        "#]],
    );
}

#[test]
fn sctp_is_served_if_protocols_names_it_and_withdrawn_otherwise() {
    check(
        "node 192.0.2.1
         protocols tcp sctp
         service default/web app=web 99/tcp 99/sctp
         start
         pod default/web-0 app=web 10.0.0.5
         show
         protocols tcp udp
         start
         wait 30s
         show",
        &expect![[r#"
            node 192.0.2.1
            protocols tcp sctp
            service default/web app=web 99/tcp 99/sctp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                reserve 61001/sctp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 99
                map 61001/sctp IPv4 -> 10.0.0.5 99
                annotate default/web-0 99=192.0.2.1:61000/tcp 99=192.0.2.1:61001/sctp
            show
                61000/tcp IPv4 of default/web-0: Active
                61001/sctp IPv4 of default/web-0: Active
                ProtocolsNotMerged: service default/web: pod port 99 has several protocols and a node port for each; load balancers that ignore the protocol of an entry, such as AKO and F5 CIS, send every protocol to each of these node ports: set the agent's --protocol-pairing=merged
            protocols tcp udp
            start
                reserve 61000/tcp IPv4
                reserve 61001/sctp IPv4
                annotate default/web-0 99=192.0.2.1:61000/tcp
            wait 30s
                unmap 61001/sctp IPv4
            show
                61000/tcp IPv4 of default/web-0: Active
                61001/sctp IPv4 of default/web-0: Quarantined { until: Some(Moment(91000)) }
                UnsupportedProtocol: service default/web: protocol sctp is not among the agent's --protocols, so ports of this protocol get no node port; the service's other ports are served: add sctp to --protocols
        "#]],
    );
}

#[test]
fn a_number_that_a_service_has_as_a_node_port_is_not_allocated() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         service default/ingress app=ingress nodeport 61000
         service default/health app=health loadbalancer off 61001
         start
         pod default/web-0 app=web 10.0.0.5
         unservice default/ingress
         service default/health app=health loadbalancer off
         pod default/web-1 app=web 10.0.0.6
         pod default/web-2 app=web 10.0.0.7",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            service default/ingress app=ingress nodeport 61000
            service default/health app=health loadbalancer off 61001
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61002/tcp
            unservice default/ingress
            service default/health app=health loadbalancer off
            pod default/web-1 app=web 10.0.0.6
                reserve 61003/tcp IPv4
                map 61003/tcp IPv4 -> 10.0.0.6 8080
                annotate default/web-1 8080=192.0.2.1:61003/tcp
            pod default/web-2 app=web 10.0.0.7
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.7 8080
                annotate default/web-2 8080=192.0.2.1:61000/tcp
        "#]],
    );
}

#[test]
fn a_mapping_leaves_the_number_of_a_later_service_before_the_old_port_is_withdrawn() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         service default/ingress app=ingress nodeport 61000
         wait 30s
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            service default/ingress app=ingress nodeport 61000
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61001/tcp
            wait 30s
                unmap 61000/tcp IPv4
            show
                61000/tcp IPv4 of default/web-0: Quarantined { until: Some(Moment(91000)) }
                61001/tcp IPv4 of default/web-0: Active
        "#]],
    );
}

#[test]
fn a_mapping_that_cannot_leave_the_number_of_a_service_is_reported_on_both() {
    check(
        "range 61000-61001
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         pod default/web-1 app=web 10.0.0.6
         service default/ingress app=ingress nodeport 61000
         show
         gone default/web-1
         wait 60s
         show",
        &expect![[r#"
            range 61000-61001
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            pod default/web-1 app=web 10.0.0.6
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/web-1 8080=192.0.2.1:61001/tcp
            service default/ingress app=ingress nodeport 61000
            show
                61000/tcp IPv4 of default/web-0: Active
                61001/tcp IPv4 of default/web-1: Active
                NodePortConflict: pod default/web-0: node port 61000 is also a nodePort or healthCheckNodePort of service default/ingress, whose clients reach this pod, since no other node port is free: widen the agent's --port-range, or give the service a nodePort outside of it
                NodePortShadowed: service default/ingress: nodePort or healthCheckNodePort 61000 leads to pod default/web-0 on the pod's node, since no other node port is free: choose a port outside the agent's --port-range
            gone default/web-1
                unmap 61001/tcp IPv4
            wait 60s
                release 61001/tcp IPv4
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61001/tcp
            show
                61000/tcp IPv4 of default/web-0: Draining { until: Some(Moment(91000)) }
                61001/tcp IPv4 of default/web-0: Active
        "#]],
    );
}

/// The case of spidernet-io/spiderpool#2039: replies of Pods on macvlan, ipvlan and underlay bridges bypass the Node,
/// so these Pods get no node port.
#[test]
fn a_pod_on_the_nodes_own_network_is_not_published_and_the_problem_names_the_device() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         beside-node 192.0.2.77@eth0
         pod default/macvlan app=web 192.0.2.77
         pod default/veth app=web 10.0.0.5
         show
         beside-node
         beside-node 192.0.2.77@eth0
         wait 30s",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            beside-node 192.0.2.77@eth0
            pod default/macvlan app=web 192.0.2.77
            pod default/veth app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/veth 8080=192.0.2.1:61000/tcp
            show
                61000/tcp IPv4 of default/veth: Active
                PodOnNodeNetwork: pod default/macvlan: the pod's address 192.0.2.77 is on the network of the node's device eth0, so the pod would answer clients of a node port directly and with its own address: let the load balancer use the pod's address, or attach the pod to a network behind the node
            beside-node
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 192.0.2.77 8080
                annotate default/macvlan 8080=192.0.2.1:61001/tcp
            beside-node 192.0.2.77@eth0
                withdraw default/macvlan
            wait 30s
                unmap 61001/tcp IPv4
        "#]],
    );
}
