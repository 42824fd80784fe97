// SPDX-License-Identifier: Apache-2.0
//! Tests which of the existing mappings, ports and annotations a restarted agent adopts.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes them")]

use expect_test::expect;

use crate::core::tests::script::check;

#[test]
fn a_restart_without_changes_only_reserves_ports() {
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
fn a_restart_applies_changes_that_happened_without_an_agent() {
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
fn after_a_reboot_mappings_get_the_ports_of_their_annotations() {
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
fn a_restart_in_the_middle_of_a_move_completes_the_move() {
    check(
        "range 61001-61002
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         range 61002-61003
         start
         wait 20s
         range 61001-61003
         start
         wait 29s
         wait 1s",
        &expect![[r#"
            range 61001-61002
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61001/tcp
            range 61002-61003
            start
                reserve 61001/tcp IPv4
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61002/tcp
            wait 20s
            range 61001-61003
            start
                reserve 61001/tcp IPv4
                reserve 61002/tcp IPv4
            wait 29s
            wait 1s
                unmap 61001/tcp IPv4
        "#]],
    );
}

#[test]
fn a_restarted_agent_does_not_begin_with_the_ports_that_were_freed_last() {
    check(
        "range 61000-61005
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5 &
         pod default/b app=web 10.0.0.6
         gone default/a
         start
         pod default/c app=web 10.0.0.7",
        &expect![[r#"
            range 61000-61005
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5 &
            pod default/b app=web 10.0.0.6
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
                annotate default/b 8080=192.0.2.1:61001/tcp
            gone default/a
                unmap 61000/tcp IPv4
            start
                reserve 61001/tcp IPv4
            pod default/c app=web 10.0.0.7
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.7 8080
                annotate default/c 8080=192.0.2.1:61002/tcp
        "#]],
    );
}

#[test]
fn a_restarted_agent_allocates_no_port_that_was_unmapped_within_the_quarantine() {
    check(
        "range 61000-61002
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5 &
         pod default/b app=web 10.0.0.6 &
         pod default/c app=web 10.0.0.7
         gone default/c
         wait 5s
         start
         pod default/d app=web 10.0.0.8
         wait 50s
         show
         wait 5s",
        &expect![[r#"
            range 61000-61002
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5 &
            pod default/b app=web 10.0.0.6 &
            pod default/c app=web 10.0.0.7
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
                reserve 61002/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                map 61002/tcp IPv4 -> 10.0.0.7 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
                annotate default/b 8080=192.0.2.1:61001/tcp
                annotate default/c 8080=192.0.2.1:61002/tcp
            gone default/c
                unmap 61002/tcp IPv4
            wait 5s
            start
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
            pod default/d app=web 10.0.0.8
            wait 50s
            show
                61000/tcp IPv4 of default/a: Active
                61001/tcp IPv4 of default/b: Active
                PortRangeExhausted: pod default/d: no IPv4 node port is free for pod port 8080/tcp: widen the agent's --port-range
            wait 5s
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.8 8080
                annotate default/d 8080=192.0.2.1:61002/tcp
        "#]],
    );
}

#[test]
fn a_port_that_an_annotation_still_names_at_the_start_is_quarantined_until_it_is_withdrawn() {
    check(
        "range 61000-61001
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         api down
         pod default/a app=web 10.0.0.5 finished
         wait 100s
         start
         pod default/b app=web 10.0.0.6
         pod default/c app=web 10.0.0.7
         api
         wait 59s
         wait 10s",
        &expect![[r#"
            range 61000-61001
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            api down
            pod default/a app=web 10.0.0.5 finished
                withdraw default/a
                unmap 61000/tcp IPv4
            wait 100s
                withdraw default/a, 100 times
            start
                reserve 61000/tcp IPv4
                withdraw default/a
            pod default/b app=web 10.0.0.6
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/b 8080=192.0.2.1:61001/tcp
            pod default/c app=web 10.0.0.7
            api
            wait 59s
                withdraw default/a
                annotate default/b 8080=192.0.2.1:61001/tcp
            wait 10s
                release 61000/tcp IPv4
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.7 8080
                annotate default/c 8080=192.0.2.1:61000/tcp
        "#]],
    );
}

#[test]
fn a_mapping_to_a_former_address_is_removed_when_its_port_is_lost() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         pod default/a app=web 10.0.0.6 &
         steal 61000/tcp &
         start",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            pod default/a app=web 10.0.0.6 &
            steal 61000/tcp &
            start
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
                unmap 61000/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/a 8080=192.0.2.1:61001/tcp
        "#]],
    );
}

#[test]
fn an_annotation_found_at_the_start_takes_no_port_from_another_pod() {
    check(
        r#"node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/b app=web 10.0.0.6
         pod default/a app=web 10.0.0.5 &
         write default/a [{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp","protocols":["tcp"]}] &
         start"#,
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/b app=web 10.0.0.6
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.6 8080
                annotate default/b 8080=192.0.2.1:61000/tcp
            pod default/a app=web 10.0.0.5 &
            write default/a [{"podPort":8080,"nodeIP":"192.0.2.1","nodePort":61000,"protocol":"tcp","protocols":["tcp"]}] &
            start
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61001/tcp
        "#]],
    );
}
