// SPDX-License-Identifier: Apache-2.0
//! Tests how the agent reacts if software other than the agent changes mappings, ports or annotations.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes them")]

use expect_test::expect;

use crate::core::tests::script::check;

#[test]
fn an_annotation_of_another_writer_is_corrected_on_every_pod() {
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
fn a_port_that_another_process_uses_is_skipped() {
    check(
        "range 61000-61005
         node 192.0.2.1
         service default/web app=web 8080/tcp 8080/udp
         steal 61000/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         pod default/web-1 app=web 10.0.0.6
         pod default/web-2 app=web 10.0.0.7
         return 61000/tcp
         wait 60s
         show",
        &expect![[r#"
            range 61000-61005
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
            pod default/web-1 app=web 10.0.0.6
                reserve 61003/tcp IPv4
                reserve 61004/udp IPv4
                map 61003/tcp IPv4 -> 10.0.0.6 8080
                map 61004/udp IPv4 -> 10.0.0.6 8080
                annotate default/web-1 8080=192.0.2.1:61003/tcp 8080=192.0.2.1:61004/udp
            pod default/web-2 app=web 10.0.0.7
                reserve 61000/udp IPv4
                reserve 61005/tcp IPv4
                map 61000/udp IPv4 -> 10.0.0.7 8080
                map 61005/tcp IPv4 -> 10.0.0.7 8080
                annotate default/web-2 8080=192.0.2.1:61000/udp 8080=192.0.2.1:61005/tcp
            return 61000/tcp
            wait 60s
            show
                61000/udp IPv4 of default/web-2: Active
                61001/udp IPv4 of default/web-0: Active
                61002/tcp IPv4 of default/web-0: Active
                61003/tcp IPv4 of default/web-1: Active
                61004/udp IPv4 of default/web-1: Active
                61005/tcp IPv4 of default/web-2: Active
                ProtocolsNotMerged: service default/web: pod port 8080 has several protocols and a node port for each; load balancers that ignore the protocol of an entry, such as AKO and F5 CIS, send every protocol to each of these node ports: set the agent's --protocol-pairing=merged
        "#]],
    );
}

#[test]
fn a_port_stolen_during_a_restart_is_served_until_its_successor_is_published() {
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
fn a_mapping_that_other_software_removed_is_restored_without_a_patch() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         lose 61000/tcp
         unbind 61000/tcp",
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
            unbind 61000/tcp
                reserve 61000/tcp IPv4
        "#]],
    );
}

#[test]
fn new_node_addresses_are_published_and_a_node_without_addresses_changes_nothing() {
    check(
        "service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         node external=203.0.113.1
         node external=203.0.113.1 192.0.2.1
         node
         pod default/b app=web 10.0.0.6
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
            node
            pod default/b app=web 10.0.0.6
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/b 8080=203.0.113.1:61001/tcp
            node 192.0.2.2
                annotate default/a 8080=192.0.2.2:61000/tcp
                annotate default/b 8080=192.0.2.2:61001/tcp
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
                withdraw default/a, 2 times
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

#[test]
fn a_terminating_pod_with_the_annotation_of_another_writer_gets_an_empty_list() {
    check(
        r#"node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         pod default/b app=other 10.0.0.6 terminating
         write default/b [{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp","protocols":["tcp"]}]"#,
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            pod default/b app=other 10.0.0.6 terminating
            write default/b [{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp","protocols":["tcp"]}]
                annotate default/b nothing
        "#]],
    );
}

#[test]
fn a_terminating_pod_whose_ports_are_taken_gets_an_empty_annotation() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         steal 61000/tcp &
         pod default/a app=other 10.0.0.6 terminating &
         start",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            steal 61000/tcp &
            pod default/a app=other 10.0.0.6 terminating &
            start
                reserve 61000/tcp IPv4
                annotate default/a nothing
                unmap 61000/tcp IPv4
        "#]],
    );
}

#[test]
fn an_entry_of_a_terminating_pod_with_a_wrong_pod_port_is_emptied() {
    check(
        r#"node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         pod default/a app=web 10.0.0.5 terminating
         unservice default/web
         write default/a [{"podPort":80,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp","protocols":["tcp"]}]"#,
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            pod default/a app=web 10.0.0.5 terminating
            unservice default/web
            write default/a [{"podPort":80,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp","protocols":["tcp"]}]
                annotate default/a nothing
        "#]],
    );
}

#[test]
fn writes_against_a_persistent_other_writer_are_delayed_and_the_writer_is_named() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         write default/web-0 nonsense
         write default/web-0 nonsense
         write default/web-0 nonsense
         show
         write default/web-0 nonsense
         wait 4s
         wait 1s
         write default/web-0 nonsense
         wait 9s
         wait 1s
         write default/web-0 nonsense
         wait 20s
         write default/web-0 nonsense
         wait 40s
         write default/web-0 nonsense
         wait 59s
         wait 1s
         write default/web-0 nonsense
         wait 59s
         wait 1s
         show
         wait 600s
         show
         write default/web-0 nonsense",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            write default/web-0 nonsense
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            write default/web-0 nonsense
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            write default/web-0 nonsense
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            show
                61000/tcp IPv4 of default/web-0: Active
            write default/web-0 nonsense
            wait 4s
            wait 1s
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            write default/web-0 nonsense
            wait 9s
            wait 1s
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            write default/web-0 nonsense
            wait 20s
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            write default/web-0 nonsense
            wait 40s
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            write default/web-0 nonsense
            wait 59s
            wait 1s
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            write default/web-0 nonsense
            wait 59s
            wait 1s
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            show
                61000/tcp IPv4 of default/web-0: Active
                AnnotationContested: pod default/web-0: field manager "antrea-agent" keeps changing the annotation that NPL writes, so the agent waits for up to a minute before it writes the annotation again: let only one controller publish node ports, for example disable NodePortLocal in Antrea
            wait 600s
            show
                61000/tcp IPv4 of default/web-0: Active
            write default/web-0 nonsense
                annotate default/web-0 8080=192.0.2.1:61000/tcp
        "#]],
    );
}
