// SPDX-License-Identifier: Apache-2.0
//! Tests that NPL behaves like Antrea's NodePortLocal, with scenarios that the sibling files do not contain, and that
//! NPL avoids faults of Antrea.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes them")]

use expect_test::expect;

use crate::core::tests::script::check;

#[test]
fn a_load_balancer_is_served_and_an_external_name_is_not() {
    check(
        "node 192.0.2.1
         start
         pod default/web-0 app=web 10.0.0.5
         service default/web app=web 8080/tcp external-name
         service default/web app=web 8080/tcp loadbalancer
         service default/web app=web 8080/tcp",
        &expect![[r#"
            node 192.0.2.1
            start
            pod default/web-0 app=web 10.0.0.5
            service default/web app=web 8080/tcp external-name
            service default/web app=web 8080/tcp loadbalancer
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            service default/web app=web 8080/tcp
        "#]],
    );
}

#[test]
fn a_changed_selector_or_label_changes_which_pods_are_mapped() {
    check(
        "node 192.0.2.1
         start
         pod default/a app=a 10.0.0.5
         pod default/b app=b 10.0.0.6
         service default/web app=a 8080/tcp
         service default/web app=b 8080/tcp
         pod default/a app=b 10.0.0.5
         pod default/b app=c 10.0.0.6",
        &expect![[r#"
            node 192.0.2.1
            start
            pod default/a app=a 10.0.0.5
            pod default/b app=b 10.0.0.6
            service default/web app=a 8080/tcp
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            service default/web app=b 8080/tcp
                reserve 61001/tcp IPv4
                withdraw default/a
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/b 8080=192.0.2.1:61001/tcp
            pod default/a app=b 10.0.0.5
                annotate default/a 8080=192.0.2.1:61000/tcp
            pod default/b app=c 10.0.0.6
                withdraw default/b
        "#]],
    );
}

#[test]
fn a_port_that_two_services_request_has_one_mapping_until_neither_requests_it() {
    check(
        "node 192.0.2.1
         service default/by-number app=web 8080/tcp
         service default/by-name app=web http/tcp
         start
         pod default/web-0 app=web port=http:8080/tcp 10.0.0.5
         unservice default/by-number
         unservice default/by-name",
        &expect![[r#"
            node 192.0.2.1
            service default/by-number app=web 8080/tcp
            service default/by-name app=web http/tcp
            start
            pod default/web-0 app=web port=http:8080/tcp 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            unservice default/by-number
            unservice default/by-name
                withdraw default/web-0
        "#]],
    );
}

#[test]
fn a_service_without_families_gets_no_node_ports() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp no-family
         start
         pod default/web-0 app=web 10.0.0.5
         service default/web app=web 8080/tcp",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp no-family
            start
            pod default/web-0 app=web 10.0.0.5
            service default/web app=web 8080/tcp
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
        "#]],
    );
}

#[test]
fn only_targeted_ports_are_mapped_declared_or_not() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/declares-others app=web port=http:80/tcp port=http:8080/udp 10.0.0.5
         pod default/declares-it app=web port=http:8080/tcp 10.0.0.6",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/declares-others app=web port=http:80/tcp port=http:8080/udp 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/declares-others 8080=192.0.2.1:61000/tcp
            pod default/declares-it app=web port=http:8080/tcp 10.0.0.6
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/declares-it 8080=192.0.2.1:61001/tcp
        "#]],
    );
}

#[test]
fn an_irrelevant_change_of_a_pod_causes_no_op() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         pod default/web-0 app=web 10.0.0.5
         pod default/web-0 app=web restarted=twice 10.0.0.5",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            pod default/web-0 app=web 10.0.0.5
            pod default/web-0 app=web restarted=twice 10.0.0.5
        "#]],
    );
}

#[test]
fn an_annotation_of_a_new_pod_reserves_no_port() {
    check(
        r#"node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web
         write default/web-0 [{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61003,"protocol":"tcp","protocols":["tcp"]}]
         pod default/web-0 app=web 10.0.0.5"#,
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web
            write default/web-0 [{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61003,"protocol":"tcp","protocols":["tcp"]}]
                withdraw default/web-0
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
        "#]],
    );
}

#[test]
fn each_family_publishes_the_first_available_kind_of_address() {
    check(
        "node-ip external
         node external=203.0.113.1 192.0.2.1 2001:db8::1
         service default/web app=web 8080/tcp dual
         start
         pod default/web-0 app=web 10.0.0.5 2001:db8:1::5",
        &expect![[r#"
            node-ip external
            node external=203.0.113.1 192.0.2.1 2001:db8::1
            service default/web app=web 8080/tcp dual
            start
            pod default/web-0 app=web 10.0.0.5 2001:db8:1::5
                reserve 61000/tcp IPv4
                reserve 61000/tcp IPv6
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                map 61000/tcp IPv6 -> 2001:db8:1::5 8080
                annotate default/web-0 8080=2001:db8::1:61000/tcp 8080=203.0.113.1:61000/tcp
        "#]],
    );
}

#[test]
fn a_host_port_of_two_protocols_is_written_once() {
    check(
        "node 192.0.2.1
         service default/dns app=dns 53/tcp 53/udp
         start
         pod default/dns app=dns port=t:53/tcp@53 port=u:53/udp@53 10.0.0.5
         pod default/dns app=dns port=u:53/udp@53 port=t:53/tcp@53 10.0.0.5
         service default/dns app=dns 53/udp 53/tcp
         start",
        &expect![[r#"
            node 192.0.2.1
            service default/dns app=dns 53/tcp 53/udp
            start
            pod default/dns app=dns port=t:53/tcp@53 port=u:53/udp@53 10.0.0.5
                annotate default/dns 53=192.0.2.1:53/tcp 53=192.0.2.1:53/udp
            pod default/dns app=dns port=u:53/udp@53 port=t:53/tcp@53 10.0.0.5
            service default/dns app=dns 53/udp 53/tcp
            start
        "#]],
    );
}

#[test]
fn a_host_port_inside_the_range_is_published_after_a_restart_too() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web port=http:8080/tcp@61001 10.0.0.5
         start
         pod default/web-1 app=web 10.0.0.6
         pod default/web-2 app=web 10.0.0.7
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web port=http:8080/tcp@61001 10.0.0.5
                annotate default/web-0 8080=192.0.2.1:61001/tcp
            start
            pod default/web-1 app=web 10.0.0.6
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.6 8080
                annotate default/web-1 8080=192.0.2.1:61000/tcp
            pod default/web-2 app=web 10.0.0.7
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.7 8080
                annotate default/web-2 8080=192.0.2.1:61002/tcp
            show
                61000/tcp IPv4 of default/web-1: Active
                61002/tcp IPv4 of default/web-2: Active
        "#]],
    );
}

#[test]
fn an_annotation_with_two_node_ports_of_one_pod_port_keeps_one() {
    check(
        r#"node 192.0.2.1
         service default/web app=web 8080/tcp
         pod default/web-0 app=web 10.0.0.5
         write default/web-0 [{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61001,"protocol":"tcp"},{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61002,"protocol":"tcp"}]
         start
         show
         gone default/web-0
         wait 60s
         show"#,
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            pod default/web-0 app=web 10.0.0.5
            write default/web-0 [{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61001,"protocol":"tcp"},{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61002,"protocol":"tcp"}]
            start
                reserve 61001/tcp IPv4
                reserve 61002/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61001/tcp
            show
                61001/tcp IPv4 of default/web-0: Active
                61002/tcp IPv4 of default/web-0: Quarantined { until: Some(Moment(61000)) }
            gone default/web-0
                unmap 61001/tcp IPv4
            wait 60s
                release 61001/tcp IPv4
                release 61002/tcp IPv4
            show
        "#]],
    );
}
