// SPDX-License-Identifier: Apache-2.0
//! Tests that a node port number belongs to only one Pod. AKO and F5 CIS ignore the protocol of an annotation entry, so
//! their TCP pools also contain the node ports of UDP entries. In addition, load balancers keep sending to a withdrawn
//! node port for some time.

#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes them")]

use expect_test::expect;
use proptest::{collection::vec, prelude::*};

use super::{
    chaos::Chaos,
    events::{AGENT_WEIGHT, Event, agent_event, cluster_event, frontend, happen, start, start_with},
    script::{check, key, node, pod, service},
    world::{World, settings},
};
use crate::core::model::{Backend, Family, Frontend, NodePort, PodPort, Protocol, settings::ProtocolPairing};

/// Events of a cluster in which only the agent writes annotations and mappings. No Pod has a `hostPort`: a user may
/// choose a `hostPort` that another Pod had as its node port recently, and the agent cannot prevent this.
fn event() -> impl Strategy<Value = Event> {
    let cluster_event = cluster_event().prop_map(|mut event| {
        if let Event::Pod(pod) = &mut event {
            pod.ports.iter_mut().for_each(|port| port.host_port = None);
        }
        event
    });
    prop_oneof![
        16 => cluster_event,
        2 => prop::option::weighted(0.3, frontend()).prop_map(Event::Restart),
        AGENT_WEIGHT => agent_event(),
        4 => Just(Event::Settle),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// If a Pod's annotation names a port number, or named it recently, this number leads to no other Pod, even if all
    /// protocols of a Pod port share one number.
    #[test]
    fn a_merged_number_that_one_pod_has_or_had_recently_never_leads_to_another(events in vec(event(), 0..60)) {
        let mut chaos = start_with(ProtocolPairing::Merged);
        chaos.world.is_undisturbed = true;
        for event in events {
            happen(&mut chaos, event);
        }
        chaos.settle();
    }

    /// If a published or recently withdrawn annotation entry of a Pod names a port number, this number leads to no
    /// other Pod, by any protocol, even if the agent restarts in between.
    #[test]
    fn a_number_that_one_pod_has_or_had_recently_never_leads_to_another(events in vec(event(), 0..60)) {
        let mut chaos = start();
        chaos.world.is_undisturbed = true;
        for event in events {
            happen(&mut chaos, event);
        }
        chaos.settle();
    }
}

/// A new Service has the number of the Pod's node port as its `nodePort`, so the Pod must move to another number. The
/// node port is draining at that time, so the Pod moves only when a Service selects the Pod again.
#[test]
fn a_draining_pod_leaves_the_number_of_a_service_when_it_is_selected_again() {
    let mut chaos = start();
    chaos.put_service(service(&["a/s", "app=x", "8080/tcp"]));
    chaos.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    chaos.settle();
    let numbers = |chaos: &Chaos| -> Vec<_> {
        chaos.world.published(&key("a/p")).iter().map(|entry| entry.node_port.0).collect()
    };
    assert_eq!(numbers(&chaos), [61_000]);
    let former = chaos.world.pods[&key("a/p")].clone();
    chaos.put_pod(pod(&["a/p", "app=x", "10.0.0.5", "terminating"], Some(&former)));
    chaos.world.remove_service(&key("a/s"));
    chaos.put_service(service(&["a/t", "app=y", "80/tcp", "61000"]));
    chaos.settle();
    assert_eq!(numbers(&chaos), [61_000], "the annotation of a terminating Pod is not withdrawn");
    chaos.put_service(service(&["a/s", "app=x", "8080/tcp"]));
    chaos.settle();
    assert_eq!(numbers(&chaos), [61_001]);
}

#[test]
fn a_number_that_two_pods_share_after_an_upgrade_is_left_to_one_of_them() {
    let mut world = World::new(settings("61000-61003"));
    world.put_node(node(&["192.0.2.1"]));
    world.put_service(service(&["a/s", "app=x", "53/tcp"]));
    world.put_service(service(&["a/t", "app=y", "53/udp"]));
    for (name, app, ip, protocol) in
        [("a/p", "app=x", "10.0.0.5", Protocol::Tcp), ("a/q", "app=y", "10.0.0.6", Protocol::Udp)]
    {
        let pod = pod(&[name, app, ip], None);
        let frontend = Frontend { family: Family::V4, node_port: NodePort(61_000), protocol };
        let generation = pod.uid.generation();
        let backend = Backend { pod_ip: pod.ips[0], pod_port: PodPort(53), generation, is_restricted: false };
        world.real.mappings.insert(frontend, backend);
        world.put_pod(pod);
    }
    world.start();
    world.settle();
    world.assert_published_works();
    let numbers = ["a/p", "a/q"].map(|name| world.published(&key(name)).first().unwrap().node_port);
    assert_eq!(numbers, [NodePort(61_000), NodePort(61_001)]);
    let usages = world.state.port_usages(Family::V4).map(|(_, usage)| (usage.active, usage.draining, usage.free));
    assert_eq!(
        usages.collect::<Vec<_>>()[..2],
        [(1, 0, 2), (1, 1, 2)],
        "61000 counts as one number, although two Pods have a claim to it"
    );
    world.wait(30_000);
    let left: Vec<_> = world.real.mappings.keys().map(|frontend| (frontend.node_port.0, frontend.protocol)).collect();
    assert_eq!(left, [(61_000, Protocol::Tcp), (61_001, Protocol::Udp)]);
}

#[test]
fn both_families_of_a_port_share_a_number_and_other_ports_do_not() {
    check(
        "range 61000-61001
         node 192.0.2.1 2001:db8:1::1
         service default/dns app=dns 53/tcp 53/udp dual
         start
         pod default/dns-0 app=dns 10.0.0.5 2001:db8::5
         pod default/dns-1 app=dns 10.0.0.6 2001:db8::6
         show",
        &expect![[r#"
            range 61000-61001
            node 192.0.2.1 2001:db8:1::1
            service default/dns app=dns 53/tcp 53/udp dual
            start
            pod default/dns-0 app=dns 10.0.0.5 2001:db8::5
                reserve 61000/tcp IPv4
                reserve 61001/udp IPv4
                reserve 61000/tcp IPv6
                reserve 61001/udp IPv6
                map 61000/tcp IPv4 -> 10.0.0.5 53
                map 61001/udp IPv4 -> 10.0.0.5 53
                map 61000/tcp IPv6 -> 2001:db8::5 53
                map 61001/udp IPv6 -> 2001:db8::5 53
                annotate default/dns-0 53=2001:db8:1::1:61000/tcp 53=2001:db8:1::1:61001/udp 53=192.0.2.1:61000/tcp 53=192.0.2.1:61001/udp
            pod default/dns-1 app=dns 10.0.0.6 2001:db8::6
            show
                61000/tcp IPv4 of default/dns-0: Active
                61001/udp IPv4 of default/dns-0: Active
                61000/tcp IPv6 of default/dns-0: Active
                61001/udp IPv6 of default/dns-0: Active
                PortRangeExhausted: pod default/dns-1: no IPv4 node port is free for pod port 53/tcp: widen the agent's --port-range
                PortRangeExhausted: pod default/dns-1: no IPv6 node port is free for pod port 53/tcp: widen the agent's --port-range
                PortRangeExhausted: pod default/dns-1: no IPv4 node port is free for pod port 53/udp: widen the agent's --port-range
                PortRangeExhausted: pod default/dns-1: no IPv6 node port is free for pod port 53/udp: widen the agent's --port-range
                ProtocolsNotMerged: service default/dns: pod port 53 has several protocols and a node port for each; load balancers that ignore the protocol of an entry, such as AKO and F5 CIS, send every protocol to each of these node ports: set the agent's --protocol-pairing=merged
        "#]],
    );
}

#[test]
fn the_protocols_of_one_pod_port_share_a_number_if_no_other_is_free() {
    check(
        "range 61000-61001
         node 192.0.2.1
         service default/web app=web 8080/tcp 8080/udp 9090/tcp
         steal 61000/tcp
         start
         pod default/web-0 app=web 10.0.0.5",
        &expect![[r#"
            range 61000-61001
            node 192.0.2.1
            service default/web app=web 8080/tcp 8080/udp 9090/tcp
            steal 61000/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                reserve 61001/udp IPv4
                reserve 61001/tcp IPv4
                map 61001/udp IPv4 -> 10.0.0.5 8080
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61001/tcp 8080=192.0.2.1:61001/udp
        "#]],
    );
}

#[test]
fn merged_protocols_share_a_number_that_is_free_for_all_of_them() {
    check(
        "pairing merged
         range 61000-61005
         node 192.0.2.1 2001:db8:1::1
         service default/dns app=dns 53/tcp 53/udp dual
         steal 61000/udp
         start
         pod default/dns-0 app=dns 10.0.0.5 2001:db8::5
         pod default/dns-1 app=dns 10.0.0.6
         show",
        &expect![[r#"
            pairing merged
            range 61000-61005
            node 192.0.2.1 2001:db8:1::1
            service default/dns app=dns 53/tcp 53/udp dual
            steal 61000/udp
            start
            pod default/dns-0 app=dns 10.0.0.5 2001:db8::5
                reserve 61000/tcp IPv4
                reserve 61000/udp IPv4
                reserve 61000/tcp IPv6
                reserve 61000/udp IPv6
                reserve 61001/tcp IPv4
                reserve 61001/udp IPv4
                map 61000/tcp IPv6 -> 2001:db8::5 53
                map 61000/udp IPv6 -> 2001:db8::5 53
                release 61000/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 53
                map 61001/udp IPv4 -> 10.0.0.5 53
                annotate default/dns-0 53=2001:db8:1::1:61000/tcp+udp 53=192.0.2.1:61001/tcp+udp
            pod default/dns-1 app=dns 10.0.0.6
                reserve 61002/tcp IPv4
                reserve 61002/udp IPv4
                map 61002/tcp IPv4 -> 10.0.0.6 53
                map 61002/udp IPv4 -> 10.0.0.6 53
                annotate default/dns-1 53=192.0.2.1:61002/tcp+udp
            show
                61001/tcp IPv4 of default/dns-0: Active
                61001/udp IPv4 of default/dns-0: Active
                61002/tcp IPv4 of default/dns-1: Active
                61002/udp IPv4 of default/dns-1: Active
                61000/tcp IPv6 of default/dns-0: Active
                61000/udp IPv6 of default/dns-0: Active
        "#]],
    );
}

#[test]
fn merging_moves_one_protocol_to_the_number_of_the_other() {
    check(
        "node 192.0.2.1
         service default/dns app=dns 53/tcp 53/udp
         start
         pod default/dns-0 app=dns 10.0.0.5
         show
         pairing merged
         start
         wait 30s
         show
         pairing separate
         start
         show",
        &expect![[r#"
            node 192.0.2.1
            service default/dns app=dns 53/tcp 53/udp
            start
            pod default/dns-0 app=dns 10.0.0.5
                reserve 61000/tcp IPv4
                reserve 61001/udp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 53
                map 61001/udp IPv4 -> 10.0.0.5 53
                annotate default/dns-0 53=192.0.2.1:61000/tcp 53=192.0.2.1:61001/udp
            show
                61000/tcp IPv4 of default/dns-0: Active
                61001/udp IPv4 of default/dns-0: Active
                ProtocolsNotMerged: service default/dns: pod port 53 has several protocols and a node port for each; load balancers that ignore the protocol of an entry, such as AKO and F5 CIS, send every protocol to each of these node ports: set the agent's --protocol-pairing=merged
            pairing merged
            start
                reserve 61000/tcp IPv4
                reserve 61000/udp IPv4
                reserve 61001/udp IPv4
                map 61000/udp IPv4 -> 10.0.0.5 53
                annotate default/dns-0 53=192.0.2.1:61000/tcp+udp
            wait 30s
                unmap 61001/udp IPv4
            show
                61000/tcp IPv4 of default/dns-0: Active
                61000/udp IPv4 of default/dns-0: Active
                61001/udp IPv4 of default/dns-0: Quarantined { until: Some(Moment(91000)) }
            pairing separate
            start
                reserve 61000/tcp IPv4
                reserve 61000/udp IPv4
                annotate default/dns-0 53=192.0.2.1:61000/tcp 53=192.0.2.1:61000/udp
            show
                61000/tcp IPv4 of default/dns-0: Active
                61000/udp IPv4 of default/dns-0: Active
                ProtocolsNotMerged: service default/dns: pod port 53 has several protocols and a node port for each; load balancers that ignore the protocol of an entry, such as AKO and F5 CIS, send every protocol to each of these node ports: set the agent's --protocol-pairing=merged
        "#]],
    );
}

#[test]
fn a_host_port_of_another_protocol_belongs_to_its_pod_alone() {
    check(
        "range 61000-61002
         node 192.0.2.1
         service default/web app=web 8080/tcp
         service default/dns app=dns 53/udp
         start
         pod default/dns-0 app=dns port=dns:53/udp@61000 10.0.0.5
         pod default/web-0 app=web 10.0.0.6
         pod default/dns-1 app=dns port=dns:53/udp@61001 10.0.0.7
         show",
        &expect![[r#"
            range 61000-61002
            node 192.0.2.1
            service default/web app=web 8080/tcp
            service default/dns app=dns 53/udp
            start
            pod default/dns-0 app=dns port=dns:53/udp@61000 10.0.0.5
                annotate default/dns-0 53=192.0.2.1:61000/udp
            pod default/web-0 app=web 10.0.0.6
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/web-0 8080=192.0.2.1:61001/tcp
            pod default/dns-1 app=dns port=dns:53/udp@61001 10.0.0.7
            show
                61001/tcp IPv4 of default/web-0: Active
                HostPortConflict: pod default/dns-1: host port 61001/udp is in use as the node port of another pod: choose a host port outside the agent's --port-range
        "#]],
    );
}

#[test]
fn a_tcp_port_with_recent_traffic_is_allocated_last() {
    check(
        "range 61000-61001
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         pod default/web-0 app=web 10.0.0.5
         gone default/web-0
         send 61000/tcp
         wait 60s
         pod default/web-1 app=web 10.0.0.6
         gone default/web-1
         wait 60s
         pod default/web-2 app=web 10.0.0.7
         pod default/web-3 app=web 10.0.0.8",
        &expect![[r#"
            range 61000-61001
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61000/tcp
            gone default/web-0
                unmap 61000/tcp IPv4
            send 61000/tcp
            wait 60s
                release 61000/tcp IPv4
            pod default/web-1 app=web 10.0.0.6
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.6 8080
                annotate default/web-1 8080=192.0.2.1:61001/tcp
            gone default/web-1
                unmap 61001/tcp IPv4
            wait 60s
                release 61001/tcp IPv4
            pod default/web-2 app=web 10.0.0.7
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.7 8080
                annotate default/web-2 8080=192.0.2.1:61001/tcp
            pod default/web-3 app=web 10.0.0.8
                reserve 61000/tcp IPv4
                map 61000/tcp IPv4 -> 10.0.0.8 8080
                annotate default/web-3 8080=192.0.2.1:61000/tcp
        "#]],
    );
}

#[test]
fn a_number_with_traffic_of_one_protocol_is_allocated_last_for_every_protocol() {
    check(
        "range 61000-61001
         node 192.0.2.1
         service default/web app=web 8080/tcp
         start
         send 61000/udp
         pod default/web-0 app=web 10.0.0.5",
        &expect![[r#"
            range 61000-61001
            node 192.0.2.1
            service default/web app=web 8080/tcp
            start
            send 61000/udp
            pod default/web-0 app=web 10.0.0.5
                reserve 61000/tcp IPv4
                reserve 61001/tcp IPv4
                map 61001/tcp IPv4 -> 10.0.0.5 8080
                annotate default/web-0 8080=192.0.2.1:61001/tcp
        "#]],
    );
}
