// SPDX-License-Identifier: Apache-2.0
//! Tests when the agent writes and removes the allowed sources of a mapping: from the change of a Service's annotation
//! to the reuse of the node port.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes them")]

use expect_test::expect;

use crate::core::tests::script::check;

#[test]
fn sources_are_written_before_the_mapping_and_removed_after_it() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp allow:198.51.100.0/24,2001:db8::/32,203.0.113.7
         start
         pod default/a app=web 10.0.0.5
         gone default/a
         wait 100s",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp allow:198.51.100.0/24,2001:db8::/32,203.0.113.7
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                allow 61000/tcp IPv4 from 198.51.100.0/24 203.0.113.7/32
                map 61000/tcp IPv4 -> 10.0.0.5 8080, restricted
                annotate default/a 8080=192.0.2.1:61000/tcp
            gone default/a
                unmap 61000/tcp IPv4
                forget 61000/tcp IPv4 from 198.51.100.0/24 203.0.113.7/32
            wait 100s
                release 61000/tcp IPv4
        "#]],
    );
}

#[test]
fn a_changed_list_adds_before_it_removes_and_writes_no_mapping() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp allow:198.51.100.0/24,203.0.113.7
         start
         pod default/a app=web 10.0.0.5
         service default/web app=web 8080/tcp allow:198.51.100.0/24,192.0.2.0/24
         service default/web app=web 8080/tcp allow:198.51.0.0/16,192.0.2.0/24
         service default/web app=web 8080/tcp allow:",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp allow:198.51.100.0/24,203.0.113.7
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                allow 61000/tcp IPv4 from 198.51.100.0/24 203.0.113.7/32
                map 61000/tcp IPv4 -> 10.0.0.5 8080, restricted
                annotate default/a 8080=192.0.2.1:61000/tcp
            service default/web app=web 8080/tcp allow:198.51.100.0/24,192.0.2.0/24
                allow 61000/tcp IPv4 from 192.0.2.0/24
                forget 61000/tcp IPv4 from 203.0.113.7/32
            service default/web app=web 8080/tcp allow:198.51.0.0/16,192.0.2.0/24
                allow 61000/tcp IPv4 from 198.51.0.0/16
                forget 61000/tcp IPv4 from 198.51.100.0/24
            service default/web app=web 8080/tcp allow:
                forget 61000/tcp IPv4 from 192.0.2.0/24 198.51.0.0/16
        "#]],
    );
}

#[test]
fn adding_and_removing_a_list_changes_the_restriction_of_the_same_mapping() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         service default/web app=web 8080/tcp allow:198.51.100.0/24
         service default/web app=web 8080/tcp",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            service default/web app=web 8080/tcp allow:198.51.100.0/24
                allow 61000/tcp IPv4 from 198.51.100.0/24
                map 61000/tcp IPv4 -> 10.0.0.5 8080, restricted
            service default/web app=web 8080/tcp
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                forget 61000/tcp IPv4 from 198.51.100.0/24
        "#]],
    );
}

#[test]
fn a_client_is_allowed_if_any_service_of_the_port_allows_the_client() {
    check(
        "node 192.0.2.1
         service default/one app=web 8080/tcp allow:198.51.100.0/24
         service default/two app=web 8080/tcp allow:198.51.0.0/16,203.0.113.7
         start
         pod default/a app=web 10.0.0.5
         unservice default/one
         service default/three app=web 8080/tcp
         unservice default/three",
        &expect![[r#"
            node 192.0.2.1
            service default/one app=web 8080/tcp allow:198.51.100.0/24
            service default/two app=web 8080/tcp allow:198.51.0.0/16,203.0.113.7
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                allow 61000/tcp IPv4 from 198.51.0.0/16 203.0.113.7/32
                map 61000/tcp IPv4 -> 10.0.0.5 8080, restricted
                annotate default/a 8080=192.0.2.1:61000/tcp
            unservice default/one
            service default/three app=web 8080/tcp
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                forget 61000/tcp IPv4 from 198.51.0.0/16 203.0.113.7/32
            unservice default/three
                allow 61000/tcp IPv4 from 198.51.0.0/16 203.0.113.7/32
                map 61000/tcp IPv4 -> 10.0.0.5 8080, restricted
        "#]],
    );
}

#[test]
fn each_family_has_its_own_ranges_and_without_any_allows_no_source() {
    check(
        "node 192.0.2.1 2001:db8:1::1
         service default/web app=web 8080/tcp dual allow:198.51.100.0/24
         start
         pod default/a app=web 10.0.0.5 fd00::5",
        &expect![[r#"
            node 192.0.2.1 2001:db8:1::1
            service default/web app=web 8080/tcp dual allow:198.51.100.0/24
            start
            pod default/a app=web 10.0.0.5 fd00::5
                reserve 61000/tcp IPv4
                reserve 61000/tcp IPv6
                allow 61000/tcp IPv4 from 198.51.100.0/24
                map 61000/tcp IPv6 -> fd00::5 8080, restricted
                map 61000/tcp IPv4 -> 10.0.0.5 8080, restricted
                annotate default/a 8080=2001:db8:1::1:61000/tcp 8080=192.0.2.1:61000/tcp
        "#]],
    );
}

#[test]
fn a_draining_mapping_keeps_its_allowed_sources() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp allow:198.51.100.0/24
         start
         pod default/a app=web 10.0.0.5
         unservice default/web
         start
         wait 31s",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp allow:198.51.100.0/24
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                allow 61000/tcp IPv4 from 198.51.100.0/24
                map 61000/tcp IPv4 -> 10.0.0.5 8080, restricted
                annotate default/a 8080=192.0.2.1:61000/tcp
            unservice default/web
                withdraw default/a
            start
                reserve 61000/tcp IPv4
            wait 31s
                unmap 61000/tcp IPv4
                forget 61000/tcp IPv4 from 198.51.100.0/24
        "#]],
    );
}

#[test]
fn a_mapping_that_drains_although_a_service_requests_it_follows_the_list_of_the_service() {
    check(
        "node 192.0.2.1 2001:db8::1
         service default/web app=web 8080/tcp dual
         start
         pod default/a app=web 10.0.0.5 2001:db8:1::5
         node 192.0.2.1
         service default/web app=web 8080/tcp dual allow:198.51.100.7",
        &expect![[r#"
            node 192.0.2.1 2001:db8::1
            service default/web app=web 8080/tcp dual
            start
            pod default/a app=web 10.0.0.5 2001:db8:1::5
                reserve 61000/tcp IPv4
                reserve 61000/tcp IPv6
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                map 61000/tcp IPv6 -> 2001:db8:1::5 8080
                annotate default/a 8080=2001:db8::1:61000/tcp 8080=192.0.2.1:61000/tcp
            node 192.0.2.1
                annotate default/a 8080=192.0.2.1:61000/tcp
            service default/web app=web 8080/tcp dual allow:198.51.100.7
                allow 61000/tcp IPv4 from 198.51.100.7/32
                map 61000/tcp IPv6 -> 2001:db8:1::5 8080, restricted
                map 61000/tcp IPv4 -> 10.0.0.5 8080, restricted
        "#]],
    );
}

#[test]
fn sources_are_removed_with_a_mapping_that_cannot_be_corrected() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp allow:198.51.100.7
         start
         pod default/a app=web 10.0.0.5
         steal 61000/tcp &
         pod default/a app=other 10.0.0.6 &
         start",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp allow:198.51.100.7
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                allow 61000/tcp IPv4 from 198.51.100.7/32
                map 61000/tcp IPv4 -> 10.0.0.5 8080, restricted
                annotate default/a 8080=192.0.2.1:61000/tcp
            steal 61000/tcp &
            pod default/a app=other 10.0.0.6 &
            start
                reserve 61000/tcp IPv4
                withdraw default/a
                unmap 61000/tcp IPv4
                forget 61000/tcp IPv4 from 198.51.100.7/32
        "#]],
    );
}

#[test]
fn a_restart_writes_no_source_and_removes_orphaned_sources() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp allow:198.51.100.0/24
         start
         pod default/a app=web 10.0.0.5
         kernel-sources 61002/tcp 0.0.0.0/0 &
         start
         kernel-sources 61000/tcp 0.0.0.0/0
         kernel-sources 61001/tcp 0.0.0.0/0 &
         pod default/b app=web 10.0.0.6",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp allow:198.51.100.0/24
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                allow 61000/tcp IPv4 from 198.51.100.0/24
                map 61000/tcp IPv4 -> 10.0.0.5 8080, restricted
                annotate default/a 8080=192.0.2.1:61000/tcp
            kernel-sources 61002/tcp 0.0.0.0/0 &
            start
                reserve 61000/tcp IPv4
                forget 61002/tcp IPv4 from 0.0.0.0/0
            kernel-sources 61000/tcp 0.0.0.0/0
                allow 61000/tcp IPv4 from 198.51.100.0/24
                forget 61000/tcp IPv4 from 0.0.0.0/0
            kernel-sources 61001/tcp 0.0.0.0/0 &
            pod default/b app=web 10.0.0.6
                forget 61001/tcp IPv4 from 0.0.0.0/0
                reserve 61001/tcp IPv4
                allow 61001/tcp IPv4 from 198.51.100.0/24
                map 61001/tcp IPv4 -> 10.0.0.6 8080, restricted
                annotate default/b 8080=192.0.2.1:61001/tcp
        "#]],
    );
}

#[test]
fn a_full_map_drops_clients_of_missing_ranges_until_the_ranges_fit() {
    check(
        "node 192.0.2.1
         source-room 2
         service default/web app=web 8080/tcp allow:198.51.100.1,198.51.100.2
         service default/more app=more 8080/tcp allow:203.0.113.1
         start
         pod default/a app=web 10.0.0.5
         pod default/b app=more 10.0.0.6
         show
         service default/web app=web 8080/tcp allow:198.51.100.1
         show",
        &expect![[r#"
            node 192.0.2.1
            source-room 2
            service default/web app=web 8080/tcp allow:198.51.100.1,198.51.100.2
            service default/more app=more 8080/tcp allow:203.0.113.1
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                allow 61000/tcp IPv4 from 198.51.100.1/32 198.51.100.2/32
                map 61000/tcp IPv4 -> 10.0.0.5 8080, restricted
                annotate default/a 8080=192.0.2.1:61000/tcp
            pod default/b app=more 10.0.0.6
                reserve 61001/tcp IPv4
                allow 61001/tcp IPv4 from 203.0.113.1/32
                map 61001/tcp IPv4 -> 10.0.0.6 8080, restricted
                annotate default/b 8080=192.0.2.1:61001/tcp
            show
                61000/tcp IPv4 of default/a: Active
                61001/tcp IPv4 of default/b: Active
                SourceRangesExhausted: pod default/b: the node's IPv4 map of allowed sources is full, so some allowed clients of node port 61001/tcp are dropped: shorten allowed-source-ranges of services with pods on this node
            service default/web app=web 8080/tcp allow:198.51.100.1
                forget 61000/tcp IPv4 from 198.51.100.2/32
                allow 61001/tcp IPv4 from 203.0.113.1/32
            show
                61000/tcp IPv4 of default/a: Active
                61001/tcp IPv4 of default/b: Active
        "#]],
    );
}

#[test]
fn a_list_with_errors_is_reported_and_its_valid_ranges_are_served() {
    check(
        r#"node 192.0.2.1
         service default/web app=web 8080/tcp allow:198.51.100.0/24,10.0.0.0/33,any
         start
         pod default/a app=web 10.0.0.5
         pod default/b app=web hostnet 192.0.2.1
         show"#,
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp allow:198.51.100.0/24,10.0.0.0/33,any
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                allow 61000/tcp IPv4 from 198.51.100.0/24
                map 61000/tcp IPv4 -> 10.0.0.5 8080, restricted
                annotate default/a 8080=192.0.2.1:61000/tcp
            pod default/b app=web hostnet 192.0.2.1
                annotate default/b 8080=192.0.2.1:8080/tcp
            show
                61000/tcp IPv4 of default/a: Active
                SourceRangesNotEnforced: pod default/b: host port 8080/tcp bypasses NPL, so allowed-source-ranges is not enforced: remove the host port, or restrict it in the node's firewall
                UnreadableSourceRange: service default/web: entry 2 of allowed-source-ranges, "10.0.0.0/33", and 1 more: each is not an address or a CIDR range and allows no client; write it as 192.0.2.0/24 or 2001:db8::/32
        "#]],
    );
}

#[test]
fn a_changed_list_is_applied_although_another_process_has_the_port() {
    check(
        "range 61000-61001
         node 192.0.2.1
         service default/web app=web 8080/tcp allow:198.51.100.0/24
         start
         pod default/a app=web 10.0.0.5
         steal 61000/tcp &
         steal 61001/tcp &
         start
         service default/web app=web 8080/tcp allow:203.0.113.7
         service default/web app=web 8080/tcp",
        &expect![[r#"
            range 61000-61001
            node 192.0.2.1
            service default/web app=web 8080/tcp allow:198.51.100.0/24
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                allow 61000/tcp IPv4 from 198.51.100.0/24
                map 61000/tcp IPv4 -> 10.0.0.5 8080, restricted
                annotate default/a 8080=192.0.2.1:61000/tcp
            steal 61000/tcp &
            steal 61001/tcp &
            start
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
            service default/web app=web 8080/tcp allow:203.0.113.7
                allow 61000/tcp IPv4 from 203.0.113.7/32
                forget 61000/tcp IPv4 from 198.51.100.0/24
            service default/web app=web 8080/tcp
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                forget 61000/tcp IPv4 from 203.0.113.7/32
        "#]],
    );
}
