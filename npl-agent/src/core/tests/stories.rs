// SPDX-License-Identifier: Apache-2.0
//! What happens, told line by line.

use expect_test::expect;

use super::script::check;

#[test]
fn a_pod_is_mapped_before_it_is_published_and_others_are_left_alone() {
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
fn services_that_are_not_for_npl_do_nothing() {
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
fn ports_of_all_services_are_united_and_written_at_once() {
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
                UnsupportedProtocol: service default/web: protocol sctp is not served by this agent; its other ports are
                UnresolvedTargetPort: pod default/web-0: no container port is named "http" with protocol tcp, as service default/web asks; name one so
            pod default/web-0 app=web port=http:80/tcp 10.0.0.5
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 80
                annotate default/web-0 9090=192.0.2.1:61000/tcp 80=192.0.2.1:61001/tcp
            show
                61000/tcp IPv4 of default/web-0: Active
                61001/tcp IPv4 of default/web-0: Active
                UnsupportedProtocol: service default/web: protocol sctp is not served by this agent; its other ports are
        "#]],
    );
}

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
fn a_port_that_is_wanted_again_is_the_same_port_again() {
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
fn a_pod_that_is_gone_is_unmapped_at_once_and_its_port_rests() {
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
                PortRangeExhausted: pod default/web-1: no IPv4 node port is free for pod port 8080/tcp; widen the port range of the agent
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
fn a_new_address_keeps_the_node_port_and_a_lost_one_withdraws() {
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
fn host_ports_and_the_host_network_are_echoed() {
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
fn a_host_port_is_neither_allocated_nor_hidden_in_silence() {
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
                HostPortConflict: pod default/c: host port 61001/tcp is in use for another pod; choose one outside the agent's port range
            gone default/b
                unmap 61001/tcp IPv4
                annotate default/c 8080=192.0.2.1:61001/tcp
        "#]],
    );
}

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
fn exhaustion_is_told_and_ends_with_the_first_free_port() {
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
                reserve 61000/tcp IPv4
                reserve 61000/udp IPv4
                reserve 61001/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 9090
                map 61000/udp IPv4 -> 10.0.0.5 53
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/a 9090=192.0.2.1:61000/tcp 53=192.0.2.1:61000/udp 8080=192.0.2.1:61001/tcp
            pod default/b app=web 10.0.0.6
                reserve 61001/udp IPv4
                map 61001/udp IPv4 -> 10.0.0.6 53
                annotate default/b 53=192.0.2.1:61001/udp
            show
                61000/tcp IPv4 of default/a: Active
                61000/udp IPv4 of default/a: Active
                61001/tcp IPv4 of default/a: Active
                61001/udp IPv4 of default/b: Active
                PortRangeExhausted: pod default/b: no IPv4 node port is free for pod port 8080/tcp; widen the port range of the agent
                PortRangeExhausted: pod default/b: no IPv4 node port is free for pod port 9090/tcp; widen the port range of the agent
            gone default/a
                unmap 61000/tcp IPv4
                unmap 61000/udp IPv4
                unmap 61001/tcp IPv4
            wait 60s
                release 61000/tcp IPv4
                release 61000/udp IPv4
                release 61001/tcp IPv4
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.6 8080
                map 61001/tcp IPv4 -> 10.0.0.6 9090
                annotate default/b 8080=192.0.2.1:61000/tcp 9090=192.0.2.1:61001/tcp 53=192.0.2.1:61001/udp
            show
                61000/tcp IPv4 of default/b: Active
                61001/tcp IPv4 of default/b: Active
                61001/udp IPv4 of default/b: Active
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
                NoNodeAddress: pod default/a: the node has no IPv6 address to publish; give it one or name it with --node-ip
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
fn a_family_that_is_not_served_is_told_once_for_the_service() {
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
                UnsupportedFamily: service default/web: family IPv6 is not served by this agent; add another to spec.ipFamilies
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
            show
                61000/tcp IPv4 of default/a: Active
                AddressConflict: pod default/b: address 10.0.0.5 is also that of pod default/a, which is served; delete one of the two pods
            pod default/a app=web 10.0.0.5 terminating
                reserve 61001/tcp IPv4
                unmap 61000/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/b 8080=192.0.2.1:61001/tcp
            show
                61000/tcp IPv4 of default/a: Active
                61001/tcp IPv4 of default/b: Active
                AddressConflict: pod default/a: address 10.0.0.5 is also that of pod default/b, which is served; delete one of the two pods
            gone default/a
            show
                61000/tcp IPv4 of default/a: Quarantined { until: Some(Moment(61000)) }
                61001/tcp IPv4 of default/b: Active
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
