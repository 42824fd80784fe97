// SPDX-License-Identifier: Apache-2.0
//! What a new agent finds, and what others do behind its back.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes them")]

use expect_test::expect;

use crate::core::tests::script::check;

#[test]
fn a_foreign_annotation_is_put_right_on_any_pod() {
    check(
        r#"node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         pod default/other app=other 10.0.0.6
         write default/web-0 nonsense
         write default/web-0 nothing
         write default/web-0 [ {"nodePort":61000, "podPort":8080, "nodeIP":"192.0.2.1", "protocols":["tcp"], "protocol":"tcp"} ]
         write default/other [{"podPort":8080,"nodeIP":"192.0.2.9","nodePort":61000,"protocol":"tcp","protocols":["tcp"]}]
         write default/other []
         write default/other null"#,
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            pod default/other app=other 10.0.0.6
            write default/web-0 nonsense
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            write default/web-0 nothing
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            write default/web-0 [ {"nodePort":61000, "podPort":8080, "nodeIP":"192.0.2.1", "protocols":["tcp"], "protocol":"tcp"} ]
            write default/other [{"podPort":8080,"nodeIP":"192.0.2.9","nodePort":61000,"protocol":"tcp","protocols":["tcp"]}]
                withdraw default/other
            write default/other []
                withdraw default/other
            write default/other null
                withdraw default/other
        "#]],
    );
}

#[test]
fn a_port_of_another_process_is_left_for_the_next() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp 8080/udp
         steal 61000/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp 8080/udp
            steal 61000/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                reserve 61001/udp IPv4
                reserve 61002/tcp IPv4
                map 61001/udp IPv4 -> 10.0.0.5 8080
                map 61002/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61001/udp 8080=192.0.2.1:61002/tcp
            show
                61001/udp IPv4 of default/web-0: Active
                61002/tcp IPv4 of default/web-0: Active
        "#]],
    );
}

#[test]
fn a_restart_with_nothing_changed_does_nothing_but_reserve() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp 9090/tcp
         start
         pod default/a app=web 10.0.0.5
         pod default/b app=web 10.0.0.6
         start
         wait 600s",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp 9090/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                map 61001/tcp IPv4 -> 10.0.0.5 9090
                annotate default/a 8080=192.0.2.1:61000/tcp 9090=192.0.2.1:61001/tcp
            pod default/b app=web 10.0.0.6
                reserve 61002/tcp IPv4
                reserve 61003/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.6 8080
                map 61003/tcp IPv4 -> 10.0.0.6 9090
                annotate default/b 8080=192.0.2.1:61002/tcp 9090=192.0.2.1:61003/tcp
            start
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
                reserve 61002/tcp IPv4
                reserve 61003/tcp IPv4
            wait 600s
        "#]],
    );
}

#[test]
fn a_restart_finds_what_changed_meanwhile() {
    check(
        "range 61000-61005
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         pod default/b app=web 10.0.0.6
         pod default/c app=web 10.0.0.7
         gone default/a &
         pod default/b app=web 10.0.0.9 &
         pod default/c app=other 10.0.0.7 &
         pod default/d app=web 10.0.0.5 &
         start
         wait 100s",
        &expect![[r#"
            range 61000-61005
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            pod default/b app=web 10.0.0.6
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/b 8080=192.0.2.1:61001/tcp
            pod default/c app=web 10.0.0.7
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.7 8080
                annotate default/c 8080=192.0.2.1:61002/tcp
            gone default/a &
            pod default/b app=web 10.0.0.9 &
            pod default/c app=other 10.0.0.7 &
            pod default/d app=web 10.0.0.5 &
            start
                reserve 61001/tcp IPv4
                reserve 61002/tcp IPv4
                reserve 61003/tcp IPv4
                unmap 61000/tcp IPv4
                reserve 61000/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.9 8080
                map 61003/tcp IPv4 -> 10.0.0.5 8080
                withdraw default/c
                annotate default/d 8080=192.0.2.1:61003/tcp
            wait 100s
                unmap 61002/tcp IPv4
                release 61000/tcp IPv4
                release 61002/tcp IPv4
        "#]],
    );
}

#[test]
fn a_reboot_loses_the_mappings_and_keeps_the_ports() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         pod default/b app=web 10.0.0.6
         gone default/a
         lose 61001/tcp &
         pod default/b app=web &
         start
         pod default/b app=web 10.0.0.6",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            pod default/b app=web 10.0.0.6
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/b 8080=192.0.2.1:61001/tcp
            gone default/a
                unmap 61000/tcp IPv4
            lose 61001/tcp &
            pod default/b app=web &
            start
                reserve 61001/tcp IPv4
                withdraw default/b
            pod default/b app=web 10.0.0.6
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/b 8080=192.0.2.1:61001/tcp
        "#]],
    );
}

#[test]
fn a_new_port_range_moves_mappings_one_by_one_without_a_gap() {
    check(
        "range 61000-61001
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         pod default/b app=web 10.0.0.6
         range 61001-61002
         start
         wait 100s",
        &expect![[r#"
            range 61000-61001
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            pod default/b app=web 10.0.0.6
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/b 8080=192.0.2.1:61001/tcp
            range 61001-61002
            start
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61002/tcp
            wait 100s
                unmap 61000/tcp IPv4
                release 61000/tcp IPv4
        "#]],
    );
}

#[test]
fn a_port_stolen_during_a_restart_goes_on_until_its_successor_is_published() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         steal 61000/tcp
         start
         wait 100s",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            steal 61000/tcp
            start
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61001/tcp
            wait 100s
                unmap 61000/tcp IPv4
                reserve 61000/tcp IPv4
        "#]],
    );
}

#[test]
fn a_mapping_that_somebody_removed_is_put_back_without_a_write() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         lose 61000/tcp",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            lose 61000/tcp
                map 61000/tcp IPv4 -> 10.0.0.5 8080
        "#]],
    );
}

#[test]
fn new_node_addresses_are_written_and_no_address_changes_nothing() {
    check(
        "service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         node external=203.0.113.1
         node external=203.0.113.1 192.0.2.1
         node
         node 192.0.2.2",
        &expect![[r#"
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
            node external=203.0.113.1
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=203.0.113.1:61000/tcp
            node external=203.0.113.1 192.0.2.1
                annotate default/a 8080=192.0.2.1:61000/tcp
            node
            node 192.0.2.2
                annotate default/a 8080=192.0.2.2:61000/tcp
        "#]],
    );
}

#[test]
fn writes_wait_for_the_api_server_and_the_drain_waits_for_the_write() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         api down
         unservice default/web
         wait 2s
         show
         api up
         wait 1s
         wait 31s",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            api down
            unservice default/web
                withdraw default/a
            wait 2s
                withdraw default/a
                withdraw default/a
            show
                61000/tcp IPv4 of default/a: Draining { until: None }
            api up
            wait 1s
                withdraw default/a
            wait 31s
                unmap 61000/tcp IPv4
        "#]],
    );
}
