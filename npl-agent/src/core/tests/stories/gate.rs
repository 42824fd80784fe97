// SPDX-License-Identifier: Apache-2.0
//! Tests when the agent opens the readiness gate of a Pod.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes them")]

use expect_test::expect;

use crate::core::tests::script::check;

#[test]
fn a_gate_is_opened_after_all_node_ports_are_published() {
    check(
        "range 61000-61001
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web gated
         pod default/web-0 app=web gated 10.0.0.5
         pod default/other app=other gated
         pod default/other app=other gated-ready
         pod default/web-1 app=web gated 10.0.0.6
         pod default/web-2 app=web gated 10.0.0.7
         service default/web app=web 8080/tcp off
         pod default/web-2 app=web gated-ready 10.0.0.7
         wait 90s",
        &expect![[r#"
            range 61000-61001
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web gated
            pod default/web-0 app=web gated 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
                open the gate of default/web-0
            pod default/other app=other gated
            pod default/other app=other gated-ready
                open the gate of default/other: NoNodePorts
            pod default/web-1 app=web gated 10.0.0.6
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/web-1 8080=192.0.2.1:61001/tcp
                open the gate of default/web-1
            pod default/web-2 app=web gated 10.0.0.7
            service default/web app=web 8080/tcp off
                withdraw default/web-0
                withdraw default/web-1
            pod default/web-2 app=web gated-ready 10.0.0.7
                open the gate of default/web-2: NoNodePorts
            wait 90s
                unmap 61000/tcp IPv4
                unmap 61001/tcp IPv4
                release 61000/tcp IPv4
                release 61001/tcp IPv4
        "#]],
    );
}

#[test]
fn the_gate_of_a_pod_with_a_conflicting_host_port_waits_for_its_containers() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         pod default/web-1 app=web gated port=p:8080/tcp@61000 10.0.0.6
         pod default/web-1 app=web gated-ready port=p:8080/tcp@61000 10.0.0.6",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            pod default/web-1 app=web gated port=p:8080/tcp@61000 10.0.0.6
            pod default/web-1 app=web gated-ready port=p:8080/tcp@61000 10.0.0.6
                open the gate of default/web-1: NoNodePorts
        "#]],
    );
}

/// The agent never closes a readiness gate, so a Pod that is ready stays ready while no agent runs. A Pod that is
/// created while no agent runs becomes ready after an agent has started.
#[test]
fn a_gate_stays_open_across_restarts_and_opens_after_the_start_for_a_pod_created_meanwhile() {
    check(
        "node 192.0.2.1
         service default/web app=web 8080/tcp
         pod default/web-0 app=web gated 10.0.0.5
         start
         start
         wait 90s",
        &expect![[r#"
            node 192.0.2.1
            service default/web app=web 8080/tcp
            pod default/web-0 app=web gated 10.0.0.5
            start
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
                open the gate of default/web-0
            start
                reserve 61000/tcp IPv4
            wait 90s
        "#]],
    );
}
