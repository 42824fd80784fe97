// SPDX-License-Identifier: Apache-2.0
//! Tests the chains of conditions for Pods and Services: for each kind of fault, the first broken link must be the
//! expected link.

use npl_common::{reason::Reason, stats::MappingStats};

use super::{
    script::{key, node, pod, service},
    world::{World, settings},
};
use crate::core::{
    model::{Frontend, Protocol},
    view::{AgentView, DeviceView},
    why::{Chain, Explanation, Holds, Link, Question, Traffic, add_traffic, explain},
};

fn view() -> AgentView {
    let device = DeviceView { name: "eth0".to_owned(), is_attached: true, reason: "has a Node address".to_owned() };
    AgentView { devices: vec![device], reaches_clients: true, ..AgentView::default() }
}

fn why(world: &World, question: &str) -> Explanation {
    explain(&world.state, &view(), &question.parse().unwrap())
}

/// Returns the first broken link of the only chain, with the link's finding.
#[track_caller]
fn broken(world: &World, question: &str) -> (Link, String) {
    let Explanation { chains, .. } = why(world, question);
    assert_eq!(chains.len(), 1, "{chains:#?}");
    let first = chains[0].first_broken().unwrap_or_else(|| panic!("no link is broken: {chains:#?}"));
    assert!(first.page.as_ref().is_some_and(|page| page.starts_with("docs/")), "{first:?}");
    (first.link, first.found.clone())
}

#[track_caller]
fn assert_broken(world: &World, question: &str, link: Link, words: &str) {
    let (found, text) = broken(world, question);
    assert!(found == link && text.contains(words), "{found}: {text}");
}

/// Creates a Node with an enabled Service and a Pod that the Service selects.
fn served() -> World {
    let mut world = World::new(settings("61000-61003"));
    world.put_node(node(&["192.0.2.1"]));
    world.put_service(service(&["a/web", "app=x", "8080/tcp"]));
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    world.start();
    world.settle();
    world
}

#[test]
fn every_link_of_a_published_pod_holds() {
    let world = served();
    let Explanation { chains, .. } = why(&world, "pod/a/p");
    let links: Vec<_> = chains[0].links.iter().map(|link| (link.link, link.holds)).collect();
    let expected = [
        (Link::Enabled, Holds::Yes),
        (Link::Selected, Holds::Yes),
        (Link::Address, Holds::Yes),
        (Link::PortResolved, Holds::Yes),
        (Link::Family, Holds::Yes),
        (Link::NodePort, Holds::Yes),
        (Link::KernelEntry, Holds::Yes),
        (Link::Annotation, Holds::Yes),
        (Link::ReadinessGate, Holds::Info),
        (Link::Device, Holds::Yes),
    ];
    assert_eq!((chains.len(), links.as_slice()), (1, &expected[..]));
    assert!(why(&world, "service/a/web").is_served());
    assert_eq!(why(&world, "service/a/web"), why(&world, "pod/a/p:8080"));
}

#[test]
fn a_namespace_that_the_agent_does_not_read_is_named() {
    let mut world = served();
    world.settings.namespaces = "shop,billing".parse().unwrap();
    world.start();
    world.settle();
    let words = "the agent's --namespaces excludes the namespace a: the agent reads only Services of billing,shop";
    for question in ["pod/a/p", "pod/a/p:8080", "service/a/web"] {
        assert_broken(&world, question, Link::Enabled, words);
    }
    assert_broken(&world, "service/shop/web", Link::Enabled, "the Service does not exist");
}

#[test]
fn before_the_lists_nothing_is_known() {
    let mut world = served();
    world.start_without_lists();
    assert_broken(&world, "pod/a/p", Link::Agent, "waits for the API server's lists");
}

#[test]
fn a_service_that_is_not_enabled_is_the_first_broken_link() {
    let mut world = served();
    world.put_service(service(&["a/web", "app=x", "8080/tcp", "off"]));
    world.settle();
    assert_broken(&world, "service/a/web", Link::Enabled, "is not exactly");
    assert_broken(&world, "pod/a/p", Link::Enabled, "no Service in namespace a is enabled");
}

#[test]
fn a_label_that_differs_is_named() {
    let mut world = served();
    world.put_pod(pod(&["a/q", "app=y", "10.0.0.6"], None));
    world.put_pod(pod(&["a/r", "tier=y", "10.0.0.7"], None));
    world.settle();
    assert_broken(&world, "pod/a/q", Link::Selected, "web selects app=x, and the Pod has app=y");
    assert_broken(&world, "pod/a/r", Link::Selected, "the Pod has no label app");
    world.remove_pod(&key("a/p"));
    world.settle();
    assert_broken(&world, "service/a/web", Link::Selected, "no Pod of this Node has the labels app=x");
}

#[test]
fn a_pod_that_is_elsewhere_or_finished_has_no_chain() {
    let mut world = served();
    assert_broken(&world, "pod/a/nobody", Link::Pod, "runs on another Node");
    world.put_pod(pod(&["a/q", "app=x", "10.0.0.6", "finished"], None));
    world.settle();
    assert_broken(&world, "pod/a/q", Link::Pod, "has finished");
}

#[test]
fn an_absent_or_shared_address_is_named() {
    let mut world = served();
    world.put_pod(pod(&["a/q", "app=x"], None));
    world.put_pod(pod(&["a/r", "app=x", "10.0.0.5"], None));
    world.settle();
    assert_broken(&world, "pod/a/q", Link::Address, "no address yet");
    assert_broken(&world, "pod/a/p", Link::Address, "pod a/r has the same address");
}

/// The agent decides for each IP family. The address of the other family is served.
#[test]
fn an_address_on_the_nodes_network_or_of_another_pod_breaks_only_the_chains_of_its_family() {
    let mut world = World::new(settings("61000-61003"));
    world.put_node(node(&["192.0.2.1", "2001:db8::1"]));
    world.put_service(service(&["a/web", "app=x", "8080/tcp", "dual"]));
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5", "2001:db8::5"], None));
    world.start();
    world.settle();
    let assert_only_ipv6_broken = |world: &World, words: &str| {
        let Explanation { chains, .. } = why(world, "pod/a/p");
        let (v4, v6): (Vec<_>, Vec<_>) = chains.iter().partition(|chain| chain.subject.contains("IPv4"));
        assert!(v4.len() == 1 && v6.len() == 1, "{chains:#?}");
        assert_eq!(v4[0].first_broken(), None, "{:#?}", v4[0]);
        assert!(v4[0].frontend.is_some(), "{:#?}", v4[0]);
        let broken = v6[0].first_broken().unwrap();
        assert!(broken.link == Link::Address && broken.found.contains(words), "{broken:?}");
    };
    world.state.set_pods_on_node_network([("2001:db8::5".parse().unwrap(), "eth0".to_owned())].into());
    world.settle();
    assert_only_ipv6_broken(&world, "on the network of the node's device eth0");

    world.state.set_pods_on_node_network([].into());
    world.put_pod(pod(&["a/q", "app=x", "10.0.0.6", "2001:db8::5"], None));
    world.settle();
    assert_only_ipv6_broken(&world, "pod a/q has the same address");

    // A Service of the other family only is served.
    world.put_service(service(&["a/web", "app=x", "8080/tcp"]));
    world.settle();
    let Explanation { chains, .. } = why(&world, "pod/a/p");
    assert!(chains.len() == 1 && chains[0].first_broken().is_none(), "{chains:#?}");
}

#[test]
fn a_target_port_that_does_not_resolve_is_named() {
    let mut world = served();
    world.put_service(service(&["a/web", "app=x", "http/tcp"]));
    world.settle();
    assert_broken(&world, "pod/a/p", Link::PortResolved, "http");
    world.put_service(service(&["a/web", "app=x", "8080/sctp"]));
    world.settle();
    assert_broken(&world, "pod/a/p", Link::PortResolved, "sctp");
    assert_broken(&world, "pod/a/p:9", Link::PortResolved, "requests port 9");
}

#[test]
fn a_family_that_only_pod_or_node_has_is_named() {
    let mut world = served();
    world.put_service(service(&["a/web", "app=x", "8080/tcp", "ipv6"]));
    world.settle();
    assert_broken(&world, "pod/a/p", Link::Family, "no address of the Service's families: IPv6");
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5", "2001:db8::5"], None));
    world.settle();
    assert_broken(&world, "pod/a/p", Link::Family, "the node has no IPv6 address");
}

#[test]
fn an_exhausted_port_range_is_named() {
    let mut world = World::new(settings("61000-61001"));
    world.put_node(node(&["192.0.2.1"]));
    world.put_service(service(&["a/web", "app=x", "8080/tcp"]));
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    world.put_pod(pod(&["a/o", "app=x", "10.0.0.4"], None));
    world.put_pod(pod(&["a/q", "app=x", "10.0.0.6"], None));
    world.start();
    world.settle();
    assert_broken(&world, "pod/a/q", Link::NodePort, "--port-range");
    assert!(why(&world, "pod/a/p").is_served());
}

#[test]
fn a_refused_request_is_named_and_breaks_no_chain() {
    let mut world = served();
    world.put_pod(pod(&["a/q", "app=x", "10.0.0.6", "request=8080=22"], None));
    world.settle();
    let answer = why(&world, "pod/a/q");
    assert!(answer.is_served());
    let text = format!("{answer:?}");
    assert!(text.contains("is allocated; pod port 8080/tcp does not get the requested node port 22"), "{text}");
}

#[test]
fn a_mapping_that_the_kernel_lacks_is_named() {
    let mut world = served();
    world.real.mappings.clear();
    world.state.observe(world.real.clone());
    assert_broken(&world, "pod/a/p", Link::KernelEntry, "the kernel has no mapping of 61000/tcp IPv4");
    world.settle();
    assert!(why(&world, "pod/a/p").is_served());
}

#[test]
fn an_annotation_that_the_api_server_rejects_is_named() {
    let mut world = served();
    world.is_api_down = true;
    world.put_pod(pod(&["a/q", "app=x", "10.0.0.6"], None));
    world.settle();
    assert_broken(&world, "pod/a/q", Link::Annotation, "does not name the node port yet");
}

#[test]
fn a_closed_gate_is_named() {
    let mut world = served();
    world.put_service(service(&["a/named", "app=x", "http/tcp"]));
    world.put_pod(pod(&["a/q", "app=x", "10.0.0.6", "gated"], None));
    world.settle();
    let chains = why(&world, "pod/a/q").chains;
    let links = chains.iter().map(|chain| chain.first_broken().unwrap().link);
    assert_eq!(links.collect::<Vec<_>>(), [Link::ReadinessGate, Link::PortResolved]);
    // The gate may stay closed although every port is published, so the text does not name unpublished ports as the
    // cause.
    assert_eq!(
        chains[0].first_broken().unwrap().found,
        "closed, so the Pod is not ready; its containers are not ready either"
    );
}

#[test]
fn a_node_without_programs_on_an_uplink_is_named() {
    let world = served();
    let view = AgentView { reaches_clients: false, devices: Vec::new(), ..view() };
    let Explanation { chains, .. } = explain(&world.state, &view, &"pod/a/p".parse().unwrap());
    assert_eq!(chains[0].first_broken().map(|link| link.link), Some(Link::Device));
}

#[test]
fn before_the_first_uplink_the_absence_of_an_uplink_is_the_first_broken_link() {
    let mut world = World::new(settings("61000-61003"));
    world.put_node(node(&["192.0.2.1"]));
    world.put_service(service(&["a/web", "app=x", "8080/tcp"]));
    world.put_pod(pod(&["a/p", "app=x", "10.0.0.5"], None));
    world.start();
    let view = AgentView { reaches_clients: false, devices: Vec::new(), ..view() };
    for question in ["pod/a/p", "service/a/web"] {
        let Explanation { chains, .. } = explain(&world.state, &view, &question.parse().unwrap());
        let first = chains[0].first_broken().unwrap();
        assert!(first.link == Link::Device && first.found.contains("--devices"), "{first:?}");
    }
}

#[test]
fn a_host_port_needs_no_kernel_entry() {
    let mut world = served();
    world.put_pod(pod(&["a/q", "app=x", "10.0.0.6", "port=web:8080/tcp@9090"], None));
    world.settle();
    let Explanation { chains, .. } = why(&world, "pod/a/q");
    assert_eq!(chains[0].frontend.map(|it: Frontend| (it.node_port.0, it.protocol)), Some((9090, Protocol::Tcp)));
    assert_eq!(chains[0].first_broken(), None);
}

/// Appends the two links about traffic with these numbers of packets to a chain. Returns whether [`Link::LastPacket`]
/// holds, and the findings of both links.
fn with_traffic(request_packets: u64, reply_packets: u64) -> (Holds, String, String) {
    let mut chain: Chain = why(&served(), "pod/a/p").chains.remove(0);
    let stats = MappingStats { request_packets, reply_packets, ..MappingStats::ZERO };
    let reasons = [(Reason::SourceRefused, 3), (Reason::Truncated, 4), (Reason::NoMapping, 0)];
    let last_packet_millis = (reply_packets > 0).then_some(4_000);
    add_traffic(&mut chain, &Traffic { stats: Some(stats), last_packet_millis, reasons: &reasons });
    let [.., packet, refusal] = chain.links.as_slice() else { panic!("{chain:?}") };
    assert_eq!((packet.link, refusal.link, refusal.holds), (Link::LastPacket, Link::LastRefusal, Holds::Info));
    (packet.holds, packet.found.clone(), refusal.found.clone())
}

#[test]
fn requests_without_replies_break_the_chain_and_silence_does_not() {
    let (holds, text, refusals) = with_traffic(0, 0);
    assert!(holds == Holds::Info && text.contains("no client has sent"), "{text}");
    assert_eq!(refusals, "packets of the whole Node, by reason: source_refused 3");
    assert!(matches!(with_traffic(5, 0), (Holds::No, text, _) if text.contains("does not answer")));
    let (holds, text, _) = with_traffic(5, 4);
    assert_eq!((holds, text.as_str()), (Holds::Yes, "5 request packets and 4 reply packets, the last one 4 s ago"));
}

#[test]
fn the_object_of_a_question_is_read_as_kubectl_writes_it() {
    for (text, path) in [("pod/a/p", "pod/a/p"), ("pods/a/p:8080", "pod/a/p/8080"), ("svc/a/web", "service/a/web")] {
        assert_eq!(text.parse::<Question>().map(|question| question.path()), Ok(path.to_owned()));
    }
    for text in
        ["", "p", "pod/p", "pod/a/", "pod/a/p:0", "pod/a/p:x", "service/a/web:80", "node/a/b", "pod/a/b/c", "pod/a/%2e"]
    {
        assert!(text.parse::<Question>().is_err(), "{text}");
    }
}
