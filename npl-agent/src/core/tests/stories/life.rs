// SPDX-License-Identifier: Apache-2.0
//! Tests which events of Pods, Services and the Node end a mapping, and which do not.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes them")]

use expect_test::expect;

use crate::core::tests::script::check;

#[test]
fn withdrawal_comes_before_the_drain_and_the_drain_before_the_quarantine() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp 9090/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         service default/web app=web 8080/tcp
         wait 29s
         show
         wait 1s
         wait 59s
         show
         wait 1s
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp 9090/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                map 61001/tcp IPv4 -> 10.0.0.5 9090
                annotate default/web-0 8080=192.0.2.1:61000/tcp 9090=192.0.2.1:61001/tcp
            service default/web app=web 8080/tcp
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            wait 29s
            show
                61000/tcp IPv4 of default/web-0: Active
                61001/tcp IPv4 of default/web-0: Draining { until: Some(Moment(31000)) }
            wait 1s
                unmap 61001/tcp IPv4
            wait 59s
            show
                61000/tcp IPv4 of default/web-0: Active
                61001/tcp IPv4 of default/web-0: Quarantined { until: Some(Moment(91000)) }
            wait 1s
                release 61001/tcp IPv4
            show
                61000/tcp IPv4 of default/web-0: Active
        "#]],
    );
}

#[test]
fn a_pod_port_that_is_requested_again_keeps_its_node_port() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         service default/web app=web 8080/tcp off
         wait 20s
         service default/web app=web 8080/tcp
         service default/web app=web 8080/tcp off
         wait 40s
         service default/web app=web 8080/tcp",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            service default/web app=web 8080/tcp off
                withdraw default/web-0
            wait 20s
            service default/web app=web 8080/tcp
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            service default/web app=web 8080/tcp off
                withdraw default/web-0
            wait 40s
                unmap 61000/tcp IPv4
            service default/web app=web 8080/tcp
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
        "#]],
    );
}

#[test]
fn a_deleted_pod_is_unmapped_at_once_and_its_port_is_quarantined() {
    check(
        "range 61000-61001
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         gone default/web-0 &
         pod default/web-0 uid=second app=web 10.0.0.5
         pod default/web-1 app=web 10.0.0.6
         show
         wait 60s",
        &expect![[r#"
            range 61000-61001
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            gone default/web-0 &
            pod default/web-0 uid=second app=web 10.0.0.5
                reserve 61001/tcp IPv4
                unmap 61000/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61001/tcp
            pod default/web-1 app=web 10.0.0.6
            show
                61000/tcp IPv4 of default/web-0: Quarantined { until: Some(Moment(61000)) }
                61001/tcp IPv4 of default/web-0: Active
                PortRangeExhausted: pod default/web-1: no IPv4 node port is free for pod port 8080/tcp: widen the agent's --port-range
            wait 60s
                release 61000/tcp IPv4
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.6 8080
                annotate default/web-1 8080=192.0.2.1:61000/tcp
        "#]],
    );
}

#[test]
fn a_finished_pod_is_withdrawn_and_a_terminating_one_is_not() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/job app=web 10.0.0.5 &
         pod default/web app=web 10.0.0.6
         pod default/job app=web 10.0.0.5 finished
         pod default/web app=web 10.0.0.6 terminating
         unservice default/web
         wait 60s
         pod default/web app=web 10.0.0.6 terminating finished",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/job app=web 10.0.0.5 &
            pod default/web app=web 10.0.0.6
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/job 8080=192.0.2.1:61000/tcp
                annotate default/web 8080=192.0.2.1:61001/tcp
            pod default/job app=web 10.0.0.5 finished
                withdraw default/job
                unmap 61000/tcp IPv4
            pod default/web app=web 10.0.0.6 terminating
            unservice default/web
            wait 60s
                release 61000/tcp IPv4
            pod default/web app=web 10.0.0.6 terminating finished
                unmap 61001/tcp IPv4
        "#]],
    );
}

#[test]
fn a_new_pod_address_keeps_the_node_port_and_a_lost_address_withdraws_it() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         pod default/web-0 app=web 10.0.0.9
         pod default/web-0 app=web
         wait 600s
         pod default/web-0 app=web 10.0.0.7",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            pod default/web-0 app=web 10.0.0.9
                map 61000/tcp IPv4 -> 10.0.0.9 8080
            pod default/web-0 app=web
                withdraw default/web-0
                unmap 61000/tcp IPv4
            wait 600s
            pod default/web-0 app=web 10.0.0.7
                map 61000/tcp IPv4 -> 10.0.0.7 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
        "#]],
    );
}

#[test]
fn exhaustion_is_reported_and_ends_with_the_first_free_port() {
    check(
        "range 61000-61001
         node 192.0.2.1
         service default/web app=web 8080/tcp 9090/tcp 53/udp
         start
         pod default/a app=web 10.0.0.5
         pod default/b app=web 10.0.0.6
         show
         gone default/a
         wait 60s
         show",
        &expect![[r#"
            range 61000-61001
            node 192.0.2.1
            service default/web app=web 8080/tcp 9090/tcp 53/udp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/udp IPv4
                reserve 61001/tcp IPv4
                map 61000/udp IPv4 -> 10.0.0.5 53
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 53=192.0.2.1:61000/udp 8080=192.0.2.1:61001/tcp
            pod default/b app=web 10.0.0.6
            show
                61000/udp IPv4 of default/a: Active
                61001/tcp IPv4 of default/a: Active
                PortRangeExhausted: pod default/a: no IPv4 node port is free for pod port 9090/tcp: widen the agent's --port-range
                PortRangeExhausted: pod default/b: no IPv4 node port is free for pod port 53/udp: widen the agent's --port-range
                PortRangeExhausted: pod default/b: no IPv4 node port is free for pod port 8080/tcp: widen the agent's --port-range
                PortRangeExhausted: pod default/b: no IPv4 node port is free for pod port 9090/tcp: widen the agent's --port-range
            gone default/a
                unmap 61000/udp IPv4
                unmap 61001/tcp IPv4
            wait 60s
                release 61000/udp IPv4
                release 61001/tcp IPv4
                reserve 61000/udp IPv4
                reserve 61001/tcp IPv4
                map 61000/udp IPv4 -> 10.0.0.6 53
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/b 53=192.0.2.1:61000/udp 8080=192.0.2.1:61001/tcp
            show
                61000/udp IPv4 of default/b: Active
                61001/tcp IPv4 of default/b: Active
                PortRangeExhausted: pod default/b: no IPv4 node port is free for pod port 9090/tcp: widen the agent's --port-range
        "#]],
    );
}

#[test]
fn of_two_pods_with_one_address_one_is_served() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         pod default/b app=web 10.0.0.5
         show
         pod default/a app=web 10.0.0.5 terminating
         show
         gone default/a
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/a app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            pod default/b app=web 10.0.0.5
                reserve 61001/tcp IPv4
                withdraw default/a
                unmap 61000/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/b 8080=192.0.2.1:61001/tcp
            show
                61000/tcp IPv4 of default/a: Active
                61001/tcp IPv4 of default/b: Active
                AddressConflict: pod default/a: pod default/b has the same address 10.0.0.5 and gets the traffic: delete one of the two pods
            pod default/a app=web 10.0.0.5 terminating
            show
                61000/tcp IPv4 of default/a: Active
                61001/tcp IPv4 of default/b: Active
                AddressConflict: pod default/a: pod default/b has the same address 10.0.0.5 and gets the traffic: delete one of the two pods
            gone default/a
            show
                61000/tcp IPv4 of default/a: Quarantined { until: Some(Moment(61000)) }
                61001/tcp IPv4 of default/b: Active
        "#]],
    );
}

#[test]
fn of_two_pods_that_swap_addresses_the_newest_claim_holds_an_address() {
    check(
        "node 192.0.2.1
         service default/a app=a 8080/tcp
         service default/b app=b 8080/tcp
         start
         pod default/b uid=1 app=b 10.0.0.6
         pod default/a uid=2 app=a 10.0.0.5
         pod default/a uid=2 app=a 10.0.0.6
         show
         start
         show
         pod default/b uid=1 app=b 10.0.0.5
         pod default/a uid=2 app=a 10.0.0.6",
        &expect![[r#"
            node 192.0.2.1
            service default/a app=a 8080/tcp
            service default/b app=b 8080/tcp
            start
            pod default/b uid=1 app=b 10.0.0.6
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.6 8080
                annotate default/b 8080=192.0.2.1:61000/tcp
            pod default/a uid=2 app=a 10.0.0.5
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61001/tcp
            pod default/a uid=2 app=a 10.0.0.6
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                withdraw default/b
                unmap 61000/tcp IPv4
            show
                61000/tcp IPv4 of default/b: Active
                61001/tcp IPv4 of default/a: Active
                AddressConflict: pod default/b: pod default/a has the same address 10.0.0.6 and gets the traffic: delete one of the two pods
            start
                reserve 61001/tcp IPv4
            show
                61001/tcp IPv4 of default/a: Active
                AddressConflict: pod default/b: pod default/a has the same address 10.0.0.6 and gets the traffic: delete one of the two pods
            pod default/b uid=1 app=b 10.0.0.5
                reserve 61002/tcp IPv4
                map 61002/tcp IPv4 -> 10.0.0.5 8080
                annotate default/b 8080=192.0.2.1:61002/tcp
            pod default/a uid=2 app=a 10.0.0.6
        "#]],
    );
}

#[test]
fn a_claim_that_arrived_without_an_agent_is_newer_than_the_mapping_of_the_other_pod() {
    check(
        "node 192.0.2.1
         service default/a app=a 8080/tcp
         service default/b app=b 8080/tcp
         start
         pod default/a uid=2 app=a 10.0.0.5
         pod default/b uid=1 app=b 10.0.0.6
         pod default/a uid=2 app=a 10.0.0.6 &
         start
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/a app=a 8080/tcp
            service default/b app=b 8080/tcp
            start
            pod default/a uid=2 app=a 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61000/tcp
            pod default/b uid=1 app=b 10.0.0.6
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/b 8080=192.0.2.1:61001/tcp
            pod default/a uid=2 app=a 10.0.0.6 &
            start
                reserve 61000/tcp IPv4
                withdraw default/b
                unmap 61001/tcp IPv4
                reserve 61001/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.6 8080
            show
                61000/tcp IPv4 of default/a: Active
                61001/tcp IPv4 of default/b: Active
                AddressConflict: pod default/b: pod default/a has the same address 10.0.0.6 and gets the traffic: delete one of the two pods
        "#]],
    );
}

#[test]
fn a_pod_that_gets_the_address_of_another_pod_is_served_instead() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/b app=web 10.0.0.5
         pod default/a app=web 10.0.0.5
         pod default/a app=web 10.0.0.5 finished",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/b app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/b 8080=192.0.2.1:61000/tcp
            pod default/a app=web 10.0.0.5
                reserve 61001/tcp IPv4
                withdraw default/b
                unmap 61000/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 8080=192.0.2.1:61001/tcp
            pod default/a app=web 10.0.0.5 finished
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                withdraw default/a
                unmap 61001/tcp IPv4
                annotate default/b 8080=192.0.2.1:61000/tcp
        "#]],
    );
}

#[test]
fn a_port_stays_quarantined_while_an_annotation_names_it() {
    check(
        "range 61000-61001
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/a app=web 10.0.0.5
         pod default/b app=web 10.0.0.6
         pod default/c app=web 10.0.0.7
         api down
         pod default/a app=web 10.0.0.5 finished
         pod default/b app=web 10.0.0.6 finished terminating
         wait 100s
         api up
         wait 61s
         show
         gone default/b
         show",
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
            pod default/c app=web 10.0.0.7
            api down
            pod default/a app=web 10.0.0.5 finished
                withdraw default/a
                unmap 61000/tcp IPv4
            pod default/b app=web 10.0.0.6 finished terminating
                unmap 61001/tcp IPv4
            wait 100s
                withdraw default/a, 100 times
            api up
            wait 61s
                withdraw default/a
                release 61000/tcp IPv4
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.7 8080
                annotate default/c 8080=192.0.2.1:61000/tcp
            show
                61000/tcp IPv4 of default/c: Active
                61001/tcp IPv4 of default/b: Quarantined { until: None }
            gone default/b
            show
                61000/tcp IPv4 of default/c: Active
                61001/tcp IPv4 of default/b: Quarantined { until: Some(Moment(222000)) }
        "#]],
    );
}

#[test]
fn a_retiring_agent_withdraws_and_drains_all_mappings() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         retire
         start
         service default/web app=web 8080/tcp 9090/tcp
         wait 29s
         show
         wait 1s
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            retire
            start
                reserve 61000/tcp IPv4
                withdraw default/web-0
            service default/web app=web 8080/tcp 9090/tcp
            wait 29s
            show
                61000/tcp IPv4 of default/web-0: Draining { until: Some(Moment(31000)) }
            wait 1s
                unmap 61000/tcp IPv4
            show
                61000/tcp IPv4 of default/web-0: Quarantined { until: Some(Moment(91000)) }
                retired
        "#]],
    );
}

#[test]
fn a_port_with_recent_datagrams_is_allocated_last_until_they_cease() {
    check(
        "range 61000-61002
         node 192.0.2.1
         service default/dns app=dns 53/udp
         start
         send 61000/udp
         pod default/dns-0 app=dns 10.0.0.5
         pod default/dns-1 app=dns 10.0.0.6
         pod default/dns-2 app=dns 10.0.0.7
         show
         gone default/dns-0
         cease 61000/udp
         gone default/dns-2
         wait 60s
         send 61001/udp
         wait 60s
         pod default/dns-3 app=dns 10.0.0.8
         pod default/dns-4 app=dns 10.0.0.9",
        &expect![[r#"
            range 61000-61002
            node 192.0.2.1
            service default/dns app=dns 53/udp
            start
            send 61000/udp
            pod default/dns-0 app=dns 10.0.0.5
                reserve 61000/udp IPv4
                reserve 61001/udp IPv4
                map 61001/udp IPv4 -> 10.0.0.5 53
                annotate default/dns-0 53=192.0.2.1:61001/udp
            pod default/dns-1 app=dns 10.0.0.6
                reserve 61002/udp IPv4
                map 61002/udp IPv4 -> 10.0.0.6 53
                annotate default/dns-1 53=192.0.2.1:61002/udp
            pod default/dns-2 app=dns 10.0.0.7
                reserve 61000/udp IPv4
                map 61000/udp IPv4 -> 10.0.0.7 53
                annotate default/dns-2 53=192.0.2.1:61000/udp
            show
                61000/udp IPv4 of default/dns-2: Active
                61001/udp IPv4 of default/dns-0: Active
                61002/udp IPv4 of default/dns-1: Active
            gone default/dns-0
                unmap 61001/udp IPv4
            cease 61000/udp
            gone default/dns-2
                unmap 61000/udp IPv4
            wait 60s
                release 61000/udp IPv4
                release 61001/udp IPv4
            send 61001/udp
            wait 60s
            pod default/dns-3 app=dns 10.0.0.8
                reserve 61000/udp IPv4
                map 61000/udp IPv4 -> 10.0.0.8 53
                annotate default/dns-3 53=192.0.2.1:61000/udp
            pod default/dns-4 app=dns 10.0.0.9
                reserve 61001/udp IPv4
                reserve 61001/udp IPv4
                map 61001/udp IPv4 -> 10.0.0.9 53
                annotate default/dns-4 53=192.0.2.1:61001/udp
        "#]],
    );
}

#[test]
fn a_published_port_is_reserved_again_despite_recent_traffic() {
    check(
        "range 61000-61002
         node 192.0.2.1
         service default/dns app=dns 53/udp
         start
         pod default/dns-0 app=dns 10.0.0.5
         send 61000/udp
         lose 61000/udp
         start",
        &expect![[r#"
            range 61000-61002
            node 192.0.2.1
            service default/dns app=dns 53/udp
            start
            pod default/dns-0 app=dns 10.0.0.5
                reserve 61000/udp IPv4
                map 61000/udp IPv4 -> 10.0.0.5 53
                annotate default/dns-0 53=192.0.2.1:61000/udp
            send 61000/udp
            lose 61000/udp
                map 61000/udp IPv4 -> 10.0.0.5 53
            start
                reserve 61000/udp IPv4
        "#]],
    );
}
