// SPDX-License-Identifier: Apache-2.0
//! Tests which address of the Node the annotations publish.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes them")]

use expect_test::expect;

use crate::core::tests::script::check;

#[test]
fn a_node_address_is_kept_while_it_is_listed_in_any_order() {
    check(
        "node 192.0.2.1 192.0.2.2
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         node 192.0.2.2 192.0.2.1
         node 192.0.2.2 external=192.0.2.1
         node 192.0.2.1 192.0.2.2
         node 192.0.2.2 192.0.2.3
         node 192.0.2.3 192.0.2.2",
        &expect![[r#"
            node 192.0.2.1 192.0.2.2
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            node 192.0.2.2 192.0.2.1
            node 192.0.2.2 external=192.0.2.1
            node 192.0.2.1 192.0.2.2
            node 192.0.2.2 192.0.2.3
                annotate default/web-0 8080=192.0.2.2:61000/tcp
            node 192.0.2.3 192.0.2.2
        "#]],
    );
}

#[test]
fn the_first_listed_node_address_in_a_range_is_published() {
    check(
        "node-ip 10.0.0.0/8,192.0.2.0/24
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         node 198.51.100.1 192.0.2.2 external=10.1.2.3
         node 198.51.100.1 192.0.2.2",
        &expect![[r#"
            node-ip 10.0.0.0/8,192.0.2.0/24
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
            node 198.51.100.1 192.0.2.2 external=10.1.2.3
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=10.1.2.3:61000/tcp
            node 198.51.100.1 192.0.2.2
                annotate default/web-0 8080=192.0.2.2:61000/tcp
        "#]],
    );
}

/// The case of kubernetes/cloud-provider-openstack#280: a cloud controller removes all addresses of a Node for a while.
/// A Pod that is created in this time is published, too, because the addresses still belong to the machine.
#[test]
fn a_node_that_lists_no_address_for_a_while_keeps_its_node_ports() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         node
         pod default/web-1 app=web 10.0.0.6
         node 192.0.2.1
         node 192.0.2.2",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            node
            pod default/web-1 app=web 10.0.0.6
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/web-1 8080=192.0.2.1:61001/tcp
            node 192.0.2.1
            node 192.0.2.2
                annotate default/web-0 8080=192.0.2.2:61000/tcp
                annotate default/web-1 8080=192.0.2.2:61001/tcp
        "#]],
    );
}
