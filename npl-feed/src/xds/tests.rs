// SPDX-License-Identifier: Apache-2.0

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    marker::PhantomData,
    mem,
};

use envoy_types::pb::{
    envoy::{
        config::{
            cluster::v3::Cluster,
            core::v3::{HealthStatus, address::Address as AddressKind, socket_address::Protocol as SocketProtocol},
            endpoint::v3::{ClusterLoadAssignment, LbEndpoint, LocalityLbEndpoints, lb_endpoint::HostIdentifier},
            listener::v3::Listener,
            route::v3::RouteConfiguration,
        },
        service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse},
    },
    google::{protobuf::Any, rpc::Status as RpcStatus},
};
use npl_agent::core::model::Protocol;
use proptest::{prelude::*, sample::subsequence};
use prost::Message as _;

use super::{
    delta,
    encode::Reply,
    names,
    resources::Kind,
    session::{Session, Subscribed, Trigger},
    sotw,
};
use crate::{
    client_memory::Part,
    core::{
        model::{Change, NamedPort, Pod},
        snapshot::Snapshot,
        state::State,
        tests::{annotation, cluster, pod, service},
        work::{self, Operation},
    },
};

type StateOfTheWorld = Decoding<sotw::StateOfTheWorld, DiscoveryResponse>;
type Delta = Decoding<delta::Delta, DeltaDiscoveryResponse>;

/// A session whose encoded responses are decoded, as a client decodes them.
#[derive(Default)]
struct Decoding<S, R> {
    session: S,
    /// The snapshot of the last response.
    last: Snapshot,
    response: PhantomData<R>,
}

struct Handled<R> {
    kind: &'static str,
    event: &'static str,
    response: Option<(&'static str, R)>,
}

impl<S: Session, R: prost::Message + Default> Decoding<S, R> {
    /// Handles a request that has the protocol's complete message type, as a client sends it.
    fn on_request(&mut self, request: &impl prost::Message, snapshot: &Snapshot) -> Handled<R> {
        let Subscribed { kind, event, due } = self.session.subscribe(&received(request));
        self.last = snapshot.clone();
        let reply = due.and_then(|(kind, trigger)| Some((kind, self.session.respond(kind, snapshot, trigger)?)));
        Handled { kind, event, response: reply.map(Self::decode) }
    }

    fn on_snapshot(&mut self, snapshot: &Snapshot) -> Vec<(&'static str, R)> {
        let services = snapshot.services_changed_since(&mem::replace(&mut self.last, snapshot.clone()));
        let replies = self.session.kinds().into_iter();
        let trigger = Trigger::Snapshot(&services);
        let replies = replies.filter_map(|kind| Some((kind, self.session.respond(kind, snapshot, trigger)?)));
        replies.map(Self::decode).collect()
    }

    fn decode((kind, reply): (Kind, Reply)) -> (&'static str, R) {
        let message = bytes_of(reply);
        let (start, content) = message.split_at(5);
        assert_eq!(start, [&[0][..], &u32::try_from(content.len()).unwrap().to_be_bytes()].concat());
        (kind.as_str(), R::decode(content).unwrap())
    }
}

/// Returns the bytes that are sent for a reply.
fn bytes_of(reply: Reply) -> Vec<u8> {
    let parts = reply.into_message().into_iter();
    parts
        .flat_map(|part| match part {
            Part::Own(bytes) | Part::Shared(bytes) => bytes,
        })
        .collect()
}

/// Decodes a request as the feed decodes it.
fn received<T: prost::Message + Default>(request: &impl prost::Message) -> T {
    T::decode(&*request.encode_to_vec()).unwrap()
}

pub(super) const NAME: &str = "web.default:http";

pub(super) fn pods() -> Vec<Pod> {
    vec![pod("a", "n1", &annotation(8080, "192.0.2.1", 61000)), pod("b", "n2", &annotation(8080, "192.0.2.2", 61000))]
}

/// Returns a cluster with the Services `web` and `api`, which have different members.
fn two_services() -> State {
    let mut state = cluster(pods());
    state.apply(Change::Service(Box::new(service("api", 9090))), 0);
    state.refresh();
    state
}

fn without_b(state: &mut State) -> Snapshot {
    let mut changed = pods().remove(1);
    changed.is_ready = false;
    state.apply(Change::Pod(Box::new(changed)), 0);
    state.refresh().unwrap()
}

fn ask(kind: Kind, names: &[&str]) -> DiscoveryRequest {
    let resource_names = names.iter().map(|name| (*name).to_owned()).collect();
    DiscoveryRequest { type_url: kind.url(), resource_names, ..DiscoveryRequest::default() }
}

fn decode<T: prost::Message + Default>(resource: &Any) -> T {
    T::decode(&*resource.value).unwrap()
}

/// A locality's weight is the number of its ready members, because gRPC divides the requests by these weights before it
/// ignores the members that are not ready.
#[test]
fn endpoints_have_address_port_zone_weight_and_health() {
    let in_west = |name: &str, port| pod(name, "n1", &annotation(8080, "192.0.2.1", port));
    let mut changed = pods();
    changed[1].object.is_terminating = true;
    for (name, port) in [("c", 61001), ("d", 61002)] {
        let mut draining = in_west(name, port);
        draining.object.is_terminating = true;
        changed.push(draining);
    }
    let mut unready = in_west("e", 61003);
    unready.is_ready = false;
    changed.push(unready);
    changed.push(in_west("f", 61004));
    let mut state = cluster(changed);
    state.refresh();
    let mut session = StateOfTheWorld::default();
    let (_, response) = session.on_request(&ask(Kind::Endpoints, &[NAME]), &state.snapshot()).response.unwrap();
    let assignment: ClusterLoadAssignment = decode(&response.resources[0]);
    assert_eq!(assignment.cluster_name, NAME);
    let [no_zone, west] = &assignment.endpoints[..] else { panic!("{assignment:?}") };
    let shown = |locality: &LocalityLbEndpoints| {
        let zone = locality.locality.as_ref().unwrap().zone.clone();
        let health: Vec<_> = locality.lb_endpoints.iter().map(LbEndpoint::health_status).collect();
        (zone, locality.load_balancing_weight.map(|weight| weight.value), health)
    };
    use HealthStatus::{Draining, Healthy, Unhealthy};
    assert_eq!(shown(no_zone), (String::new(), None, vec![Draining]));
    assert_eq!(shown(west), ("west".to_owned(), Some(2), vec![Healthy, Draining, Draining, Unhealthy, Healthy]));
    let debug = format!("{:?}", west.lb_endpoints[1]);
    assert!(debug.contains("PortValue(61001)") && debug.contains("192.0.2.1"), "{debug}");
}

/// xDS has no SCTP addresses: with the address type TCP, a proxy would connect to the SCTP port by TCP.
#[test]
fn an_sctp_port_has_no_endpoints() {
    let entry = annotation(8080, "192.0.2.1", 61000);
    for protocol in Protocol::ALL {
        let annotation = entry.replace("tcp", &protocol.to_string());
        let mut state = cluster(vec![pod("a", "n1", &annotation)]);
        let mut changed = service("web", 8080);
        changed.ports[0].target.protocol = protocol;
        state.apply(Change::Service(Box::new(changed)), 0);
        let snapshot = state.refresh().unwrap();
        assert_eq!(snapshot.groups().map(|group| group.members.len()).collect::<Vec<_>>(), [1]);
        for name in [NAME, "web.default:80", "web.default"] {
            let response = StateOfTheWorld::default().on_request(&ask(Kind::Endpoints, &[name]), &snapshot).response;
            let assignment: ClusterLoadAssignment = decode(&response.unwrap().1.resources[0]);
            let expected: &[&str] = match protocol {
                Protocol::Tcp => &["Tcp"],
                Protocol::Udp => &["Udp"],
                Protocol::Sctp => &[],
            };
            let endpoints = assignment.endpoints.iter().flat_map(|locality| &locality.lb_endpoints);
            let protocols: Vec<_> = endpoints.map(socket_protocol).collect();
            assert_eq!(protocols, expected, "{protocol} {name}");
        }
    }
}

fn socket_protocol(endpoint: &LbEndpoint) -> &'static str {
    let Some(HostIdentifier::Endpoint(endpoint)) = &endpoint.host_identifier else { panic!("{endpoint:?}") };
    let address = endpoint.address.as_ref().and_then(|address| address.address.as_ref());
    let Some(AddressKind::SocketAddress(socket)) = address else { panic!("{address:?}") };
    if socket.protocol == i32::from(SocketProtocol::Tcp) { "Tcp" } else { "Udp" }
}

#[test]
fn a_grpc_client_finds_listener_routes_cluster_and_endpoints() {
    let snapshot = two_services().snapshot();
    let mut session = StateOfTheWorld::default();
    let mut get = |kind: Kind| {
        let (_, response) = session.on_request(&ask(kind, &["web.default:80"]), &snapshot).response.unwrap();
        assert_eq!((response.type_url.clone(), response.resources.len()), (kind.url(), 1));
        assert_eq!(response.resources[0].type_url, kind.url());
        response.resources[0].clone()
    };
    let listener: Listener = decode(&get(Kind::Listener));
    assert!(listener.name == "web.default:80" && listener.api_listener.is_some());
    let routes: RouteConfiguration = decode(&get(Kind::Routes));
    assert_eq!(routes.virtual_hosts[0].domains, ["*"]);
    let cluster: Cluster = decode(&get(Kind::Cluster));
    assert_eq!(cluster.name, "web.default:80");
    let endpoints: ClusterLoadAssignment = decode(&get(Kind::Endpoints));
    assert_eq!(endpoints.endpoints.iter().map(|it| it.lb_endpoints.len()).sum::<usize>(), 2);
}

#[test]
fn a_wildcard_gets_all_clusters_and_no_listener() {
    let snapshot = two_services().snapshot();
    let mut session = StateOfTheWorld::default();
    let (_, response) = session.on_request(&ask(Kind::Cluster, &[]), &snapshot).response.unwrap();
    let names: Vec<String> = response.resources.iter().map(|it| decode::<Cluster>(it).name).collect();
    assert_eq!(names, ["api.default:http", NAME]);
    let (_, response) = session.on_request(&ask(Kind::Listener, &[]), &snapshot).response.unwrap();
    assert!(response.resources.is_empty());
}

/// The responses to many clients that do not read take little memory, because the responses share the encoded
/// endpoints.
#[test]
fn clients_share_the_encoded_endpoints() {
    let snapshot = two_services().snapshot();
    let subscribe = DeltaDiscoveryRequest {
        type_url: Kind::Endpoints.url(),
        resource_names_subscribe: vec![NAME.to_owned(), "web.default:80".to_owned()],
        ..DeltaDiscoveryRequest::default()
    };
    fn parts<S: Session>(request: &impl prost::Message, snapshot: &Snapshot) -> Vec<Part> {
        let mut session = S::default();
        session.subscribe(&received(request));
        session.respond(Kind::Endpoints, snapshot, Trigger::Request).unwrap().into_message()
    }
    let one = parts::<sotw::StateOfTheWorld>(&ask(Kind::Endpoints, &[NAME]), &snapshot);
    let all = parts::<delta::Delta>(&subscribe, &snapshot);
    let shared = |parts: &[Part]| -> Vec<_> {
        let shared = parts.iter().filter_map(|part| match part {
            Part::Shared(bytes) => Some(bytes.clone()),
            Part::Own(_) => None,
        });
        shared.collect()
    };
    let (one, all) = (shared(&one), shared(&all));
    assert_eq!((one.len(), all.len()), (1, 2));
    assert!(all.iter().all(|part| part.as_ptr() == one[0].as_ptr() && part.len() > 100));
}

#[test]
fn one_changed_service_pushes_one_resource() {
    let mut state = two_services();
    let before = state.snapshot();
    let mut sotw = StateOfTheWorld::default();
    sotw.on_request(&ask(Kind::Cluster, &[]), &before);
    sotw.on_request(&ask(Kind::Endpoints, &[NAME, "api.default:http"]), &before);
    let mut delta = Delta::default();
    let wanted = ["api.default:http".to_owned(), NAME.to_owned()].to_vec();
    let subscribe = DeltaDiscoveryRequest {
        type_url: Kind::Endpoints.url(),
        resource_names_subscribe: wanted,
        ..DeltaDiscoveryRequest::default()
    };
    assert_eq!(delta.on_request(&subscribe, &before).response.unwrap().1.resources.len(), 2);

    let after = without_b(&mut state);
    let pushed = sotw.on_snapshot(&after);
    assert_eq!(pushed.len(), 1, "clusters are unchanged");
    assert_eq!((pushed[0].0, pushed[0].1.resources.len()), ("eds", 1));
    let pushed = delta.on_snapshot(&after);
    let names: Vec<_> = pushed.iter().flat_map(|(_, it)| &it.resources).map(|it| it.name.as_str()).collect();
    assert_eq!(names, [NAME]);
    assert!(sotw.on_snapshot(&after).is_empty() && delta.on_snapshot(&after).is_empty());
}

fn subscribe_to_endpoints(names: &[String]) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        type_url: Kind::Endpoints.url(),
        resource_names_subscribe: names.to_vec(),
        ..DeltaDiscoveryRequest::default()
    }
}

#[test]
fn of_thousands_of_clusters_only_the_changed_one_is_pushed() {
    const OTHERS: usize = 3000;
    let mut state = cluster(pods());
    for number in 0..OTHERS {
        state.apply(Change::Service(Box::new(service(&format!("api-{number}"), 9090))), 0);
    }
    state.refresh();
    let before = state.snapshot();
    let all: Vec<String> = before.groups().map(|group| names::of(group)).collect();
    let subscribe = subscribe_to_endpoints(&all);
    let (mut sotw, mut delta) = (StateOfTheWorld::default(), Delta::default());
    let clusters = sotw.on_request(&ask(Kind::Cluster, &[]), &before).response.unwrap().1;
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let endpoints = sotw.on_request(&ask(Kind::Endpoints, &all), &before).response.unwrap().1;
    let by_delta = delta.on_request(&subscribe, &before).response.unwrap().1;
    let sent = [clusters.resources.len(), endpoints.resources.len(), by_delta.resources.len()];
    assert_eq!(sent, [OTHERS + 1; 3]);

    let after = without_b(&mut state);
    let pushed: Vec<_> = sotw.on_snapshot(&after).into_iter().flat_map(|(_, it)| it.resources).collect();
    assert_eq!(pushed.iter().map(|it| decode::<ClusterLoadAssignment>(it).cluster_name).collect::<Vec<_>>(), [NAME]);
    let pushed: Vec<_> = delta.on_snapshot(&after).into_iter().flat_map(|(_, it)| it.resources).collect();
    assert_eq!(pushed.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), [NAME]);
}

/// If one of thousands of clusters changes, each stream looks up only this cluster and its endpoints. All streams
/// together compute one digest for each resource type, because the streams share the version of a changed resource.
#[test]
fn one_change_computes_one_digest_for_all_streams() {
    const OTHERS: usize = 3000;
    const STREAMS: usize = 5;
    // The first stream of a process may also compute the digests of four sample resources and of the sample group.
    const SAMPLES: usize = 5;
    let mut state = cluster(pods());
    for number in 0..OTHERS {
        let mut other = service(&format!("api-{number}"), 9090);
        other.object.selector = [("app".to_owned(), format!("api-{number}"))].into();
        state.apply(Change::Service(Box::new(other)), 0);
    }
    state.refresh();
    let before = state.snapshot();
    let all: Vec<String> = before.groups().map(|group| names::of(group)).collect();
    let subscribe = subscribe_to_endpoints(&all);
    let wildcard = DeltaDiscoveryRequest { type_url: Kind::Cluster.url(), ..DeltaDiscoveryRequest::default() };
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let mut streams: Vec<(StateOfTheWorld, Delta)> = Vec::new();
    let mut connect = || {
        let (mut sotw, mut delta) = (StateOfTheWorld::default(), Delta::default());
        sotw.on_request(&ask(Kind::Cluster, &[]), &before);
        sotw.on_request(&ask(Kind::Endpoints, &all), &before);
        delta.on_request(&wildcard, &before);
        delta.on_request(&subscribe, &before);
        streams.push((sotw, delta));
    };
    let first = work::during(Operation::Digest, &mut connect);
    let resources = 2 * (OTHERS + 1);
    assert!((resources..=resources + SAMPLES).contains(&first), "{first} digests for the first clients");
    let more = work::during(Operation::Digest, || (1..STREAMS).for_each(|_| connect()));
    assert_eq!(more, 0, "further clients share the versions");

    let mut changed = pods().remove(1);
    changed.is_ready = false;
    state.apply(Change::Pod(Box::new(changed)), 0);
    let mut after = Snapshot::default();
    let of_snapshot = work::during(Operation::Digest, || after = state.refresh().unwrap());
    assert_eq!(of_snapshot, 3, "one for the group, two for the snapshot");
    let (mut digests, mut comparisons) = (0, 0);
    let mut push = || {
        comparisons = work::during(Operation::Comparison, || {
            for (sotw, delta) in &mut streams {
                let [(_, response)] = &sotw.on_snapshot(&after)[..] else { panic!("one response") };
                let nonce = response.nonce.clone();
                sotw.on_request(&DiscoveryRequest { response_nonce: nonce, ..ask(Kind::Endpoints, &all) }, &after);
                let [(_, response)] = &delta.on_snapshot(&after)[..] else { panic!("one response") };
                let ack = DeltaDiscoveryRequest {
                    type_url: response.type_url.clone(),
                    response_nonce: response.nonce.clone(),
                    ..DeltaDiscoveryRequest::default()
                };
                delta.on_request(&ack, &after);
            }
        });
    };
    let look_ups = work::during(Operation::LookUp, || digests = work::during(Operation::Digest, &mut push));
    assert_eq!(digests, 2, "one for the cluster, one for its endpoints");
    assert_eq!(comparisons, 1, "all streams share the comparison with the previous snapshot");
    // Each stream looks up the cluster, and the endpoints once for the version and once for the response.
    assert_eq!(look_ups, 3 * 2 * STREAMS);
}

#[test]
fn an_ack_and_a_nack_are_not_answered_and_a_stale_nonce_is_ignored() {
    let mut state = two_services();
    let snapshot = state.snapshot();
    let mut session = StateOfTheWorld::default();
    let request = ask(Kind::Endpoints, &[NAME]);
    let (_, response) = session.on_request(&request, &snapshot).response.unwrap();
    let ack = DiscoveryRequest { response_nonce: response.nonce, ..request.clone() };
    let handled = session.on_request(&ack, &snapshot);
    assert_eq!((handled.event, handled.response.is_some()), ("ack", false));
    let nack = DiscoveryRequest { error_detail: Some(RpcStatus::default()), ..ack.clone() };
    let handled = session.on_request(&nack, &snapshot);
    assert_eq!((handled.event, handled.response.is_some()), ("nack", false), "the same content is not sent again");
    let after = without_b(&mut state);
    assert_eq!(session.on_snapshot(&after).len(), 1);
    let handled = session.on_request(&ack, &after);
    assert_eq!((handled.event, handled.response.is_some()), ("stale", false));
}

#[test]
fn delta_does_not_answer_an_ack_or_a_nack_and_pushes_the_next_change() {
    let mut state = two_services();
    let snapshot = state.snapshot();
    let mut session = Delta::default();
    let subscribe = DeltaDiscoveryRequest {
        type_url: Kind::Endpoints.url(),
        resource_names_subscribe: vec![NAME.to_owned()],
        ..DeltaDiscoveryRequest::default()
    };
    let handled = session.on_request(&subscribe, &snapshot);
    let (_, response) = handled.response.unwrap();
    assert_eq!((handled.event, response.resources.len()), ("subscribe", 1));
    let ack = DeltaDiscoveryRequest {
        type_url: response.type_url,
        response_nonce: response.nonce,
        ..DeltaDiscoveryRequest::default()
    };
    let nack = DeltaDiscoveryRequest { error_detail: Some(RpcStatus::default()), ..ack.clone() };
    let handled = session.on_request(&nack, &snapshot);
    assert_eq!((handled.kind, handled.event), ("eds", "nack"));
    assert!(handled.response.is_none() && session.on_snapshot(&snapshot).is_empty(), "the content is not sent again");
    let pushed = session.on_snapshot(&without_b(&mut state));
    assert_eq!(pushed.iter().map(|(kind, it)| (*kind, it.resources.len())).collect::<Vec<_>>(), [("eds", 1)]);
    let handled = session.on_request(&ack, &state.snapshot());
    assert_eq!((handled.event, handled.response.is_some()), ("ack", false));
}

#[test]
fn a_service_that_is_removed_has_empty_endpoints_and_no_cluster() {
    let mut state = two_services();
    let before = state.snapshot();
    let mut sotw = StateOfTheWorld::default();
    sotw.on_request(&ask(Kind::Cluster, &[]), &before);
    sotw.on_request(&ask(Kind::Endpoints, &[NAME]), &before);
    let mut delta = Delta::default();
    let all = DeltaDiscoveryRequest { type_url: Kind::Cluster.url(), ..DeltaDiscoveryRequest::default() };
    assert_eq!(delta.on_request(&all, &before).response.unwrap().1.resources.len(), 2);

    state.apply(Change::ServiceGone(service("web", 1).object.key), 0);
    let after = state.refresh().unwrap();
    let pushed = sotw.on_snapshot(&after);
    assert_eq!(
        pushed.iter().map(|(kind, it)| (*kind, it.resources.len())).collect::<Vec<_>>(),
        [("cds", 1), ("eds", 1)]
    );
    assert!(decode::<ClusterLoadAssignment>(&pushed[1].1.resources[0]).endpoints.is_empty());
    let pushed = delta.on_snapshot(&after);
    assert_eq!(pushed[0].1.removed_resources, [NAME]);
    assert!(pushed[0].1.resources.is_empty());
}

#[test]
fn delta_reports_absent_names_once_and_keeps_what_a_client_has_after_a_reconnect() {
    let snapshot = two_services().snapshot();
    let request = |names: &[&str]| DeltaDiscoveryRequest {
        type_url: Kind::Cluster.url(),
        resource_names_subscribe: names.iter().map(|name| (*name).to_owned()).collect(),
        ..DeltaDiscoveryRequest::default()
    };
    let mut session = Delta::default();
    let first = session.on_request(&request(&["none.default:http", NAME]), &snapshot).response.unwrap().1;
    assert_eq!(
        (first.removed_resources.as_slice(), first.resources.len()),
        (["none.default:http".to_owned()].as_slice(), 1)
    );
    assert!(session.on_snapshot(&snapshot).is_empty());
    let known = [(NAME.to_owned(), first.resources[0].version.clone())].into_iter().collect();
    let again = DeltaDiscoveryRequest { initial_resource_versions: known, ..request(&[NAME]) };
    let answer = Delta::default().on_request(&again, &snapshot).response.unwrap().1;
    assert!(answer.resources.is_empty() && answer.removed_resources.is_empty());
    let mut unsubscribe = request(&[]);
    unsubscribe.resource_names_unsubscribe = vec![NAME.to_owned()];
    assert!(session.on_request(&unsubscribe, &snapshot).response.is_none());
}

fn delta_request(kind: Kind, subscribe: &[&str], unsubscribe: &[&str]) -> DeltaDiscoveryRequest {
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    DeltaDiscoveryRequest {
        type_url: kind.url(),
        resource_names_subscribe: owned(subscribe),
        resource_names_unsubscribe: owned(unsubscribe),
        ..DeltaDiscoveryRequest::default()
    }
}

fn names_of(response: &DeltaDiscoveryResponse) -> Vec<&str> {
    response.resources.iter().map(|resource| resource.name.as_str()).collect()
}

/// The asterisk subscribes to all clusters in addition to the named ones, and can be unsubscribed from like a name.
#[test]
fn delta_subscribes_to_the_asterisk_and_unsubscribes_from_it() {
    const ALIAS: &str = "web.default:80";
    let mut state = two_services();
    let snapshot = state.snapshot();
    let mut session = Delta::default();
    let first = session.on_request(&delta_request(Kind::Cluster, &["*", ALIAS], &[]), &snapshot).response.unwrap().1;
    assert_eq!(names_of(&first), ["api.default:http", ALIAS, NAME]);
    // The client does not know whether the wildcard includes the name, so the server sends the resource again.
    let again = session.on_request(&delta_request(Kind::Cluster, &[NAME], &[]), &snapshot).response.unwrap().1;
    assert_eq!(names_of(&again), [NAME]);
    let kept = session.on_request(&delta_request(Kind::Cluster, &[], &[NAME]), &snapshot).response.unwrap().1;
    assert_eq!((names_of(&kept), kept.removed_resources.len()), (vec![NAME], 0));
    let ended = session.on_request(&delta_request(Kind::Cluster, &[], &["*"]), &snapshot).response.unwrap().1;
    assert_eq!(
        (ended.resources.len(), ended.removed_resources),
        (0, vec!["api.default:http".to_owned(), NAME.to_owned()])
    );
    state.apply(Change::ServiceGone(service("api", 1).object.key), 0);
    state.apply(Change::Service(Box::new(service("new", 9090))), 0);
    assert!(session.on_snapshot(&state.refresh().unwrap()).is_empty(), "only the named cluster is left");
    state.apply(Change::ServiceGone(service("web", 1).object.key), 0);
    let pushed = session.on_snapshot(&state.refresh().unwrap());
    assert_eq!(pushed[0].1.removed_resources, [ALIAS]);
}

/// After a reconnect, a client with the asterisk gets only the resources that it does not have, and the names of the
/// resources that no longer exist.
#[test]
fn delta_with_the_asterisk_keeps_what_a_client_has_after_a_reconnect() {
    let snapshot = two_services().snapshot();
    let subscribe = delta_request(Kind::Cluster, &["*"], &[]);
    let first = Delta::default().on_request(&subscribe, &snapshot).response.unwrap().1;
    let mut known: HashMap<String, String> =
        first.resources.iter().map(|resource| (resource.name.clone(), resource.version.clone())).collect();
    let again = DeltaDiscoveryRequest { initial_resource_versions: known.clone(), ..subscribe.clone() };
    let answer = Delta::default().on_request(&again, &snapshot).response.unwrap().1;
    assert_eq!((answer.resources.len(), answer.removed_resources.len()), (0, 0));
    known.insert(NAME.to_owned(), "old".to_owned());
    known.insert("gone.default:http".to_owned(), "old".to_owned());
    let again = DeltaDiscoveryRequest { initial_resource_versions: known, ..subscribe };
    let answer = Delta::default().on_request(&again, &snapshot).response.unwrap().1;
    assert_eq!(
        (names_of(&answer), answer.removed_resources.as_slice()),
        (vec![NAME], &["gone.default:http".to_owned()][..])
    );
}

#[test]
fn state_of_the_world_subscribes_to_the_asterisk_and_unsubscribes_from_it() {
    const ALIAS: &str = "web.default:80";
    let mut state = two_services();
    let mut session = StateOfTheWorld::default();
    let clusters = |response: &DiscoveryResponse| -> Vec<String> {
        response.resources.iter().map(|it| decode::<Cluster>(it).name).collect()
    };
    let first = session.on_request(&ask(Kind::Cluster, &["*", ALIAS]), &state.snapshot()).response.unwrap().1;
    assert_eq!(clusters(&first), ["api.default:http", ALIAS, NAME]);
    let narrower = DiscoveryRequest { response_nonce: first.nonce, ..ask(Kind::Cluster, &[ALIAS]) };
    assert!(session.on_request(&narrower, &state.snapshot()).response.is_none(), "the client has the cluster");
    state.apply(Change::ServiceGone(service("api", 1).object.key), 0);
    assert!(session.on_snapshot(&state.refresh().unwrap()).is_empty(), "only the named cluster is left");
    state.apply(Change::ServiceGone(service("web", 1).object.key), 0);
    let pushed = session.on_snapshot(&state.refresh().unwrap());
    assert_eq!(pushed.iter().map(|(_, response)| clusters(response)).collect::<Vec<_>>(), [Vec::<String>::new()]);
}

/// The resources that a client has, by kind and name.
type Received = BTreeMap<(Kind, String), (Cluster, ClusterLoadAssignment)>;

fn content(kind: Kind, resource: &Any) -> (Cluster, ClusterLoadAssignment) {
    match kind {
        Kind::Cluster => (decode(resource), ClusterLoadAssignment::default()),
        Kind::Endpoints => (Cluster::default(), decode(resource)),
        Kind::Listener | Kind::Routes => panic!("not in this test"),
    }
}

fn hold_all(held: &mut Received, kind: Kind, response: &DiscoveryResponse) {
    if kind.is_complete() {
        held.retain(|(known, _), _| *known != kind);
    }
    for resource in &response.resources {
        let content = content(kind, resource);
        let name = if kind == Kind::Cluster { &content.0.name } else { &content.1.cluster_name };
        held.insert((kind, name.clone()), content);
    }
}

fn hold_changes(held: &mut Received, kind: Kind, response: &DeltaDiscoveryResponse) {
    for resource in &response.resources {
        held.insert((kind, resource.name.clone()), content(kind, resource.resource.as_ref().unwrap()));
    }
    for name in &response.removed_resources {
        held.remove(&(kind, name.clone()));
    }
}

const ASKED: [&str; 6] = ["*", "api.default", "api.default:http", "web.default", "web.default:80", NAME];
const KINDS: [Kind; 2] = [Kind::Cluster, Kind::Endpoints];

/// Changes the cluster: the readiness of a Pod, the existence of a Service, or the target of a Service.
fn toggle(state: &mut State, number: usize) {
    let snapshot = state.snapshot();
    let has = |name| snapshot.service("default", name).next().is_some();
    let key = |name| service(name, 1).object.key;
    match number {
        0 => {
            let mut changed = pods().remove(1);
            changed.is_ready = snapshot.groups().any(|group| group.ready().count() < group.members.len());
            state.apply(Change::Pod(Box::new(changed)), 0);
        }
        1 if has("web") => state.apply(Change::ServiceGone(key("web")), 0),
        1 => state.apply(Change::Service(Box::new(service("web", 8080))), 0),
        2 if has("api") => state.apply(Change::ServiceGone(key("api")), 0),
        2 => state.apply(Change::Service(Box::new(service("api", 9090))), 0),
        _ => {
            let mut second = service("api", 8080);
            second.ports.push(NamedPort { name: Some("more".into()), number: 81, ..second.ports[0].clone() });
            state.apply(Change::Service(Box::new(second)), 0);
        }
    }
    state.refresh();
}

proptest! {
    /// After any changes of the cluster and of its subscriptions, a client has the same resources as a client that
    /// connects now.
    #[test]
    fn a_client_has_the_same_resources_as_a_new_client(
        steps in prop::collection::vec((0..4_usize, prop::option::of(subsequence(ASKED.to_vec(), 1..=6))), 1..20)
    ) {
        let mut state = two_services();
        let (mut sotw, mut delta) = (StateOfTheWorld::default(), Delta::default());
        let mut held = (Received::new(), Received::new());
        let (mut names, mut nonces) = (Vec::new(), BTreeMap::new());
        for (number, wanted) in [(3, Some(vec!["*"]))].into_iter().chain(steps) {
            toggle(&mut state, number);
            let snapshot = state.snapshot();
            for (_, response) in sotw.on_snapshot(&snapshot) {
                let kind = Kind::of_url(&response.type_url).unwrap();
                hold_all(&mut held.0, kind, &response);
                nonces.insert(kind, response.nonce);
            }
            for (_, response) in delta.on_snapshot(&snapshot) {
                hold_changes(&mut held.1, Kind::of_url(&response.type_url).unwrap(), &response);
            }
            if let Some(wanted) = wanted {
                for kind in KINDS {
                    // A client drops the resources of names from which it unsubscribes.
                    let is_wildcard = kind.is_complete() && wanted.contains(&"*");
                    held.0.retain(|(known, name), _| *known != kind || is_wildcard || wanted.contains(&name.as_str()));
                    let response_nonce = nonces.get(&kind).cloned().unwrap_or_default();
                    let request = DiscoveryRequest { response_nonce, ..ask(kind, &wanted) };
                    if let Some((_, response)) = sotw.on_request(&request, &snapshot).response {
                        hold_all(&mut held.0, kind, &response);
                        nonces.insert(kind, response.nonce);
                    }
                    let only = |these: &[&'static str], others: &[&'static str]| -> Vec<&'static str> {
                        these.iter().copied().filter(|name| !others.contains(name)).collect()
                    };
                    let (new, old) = (only(&wanted, &names), only(&names, &wanted));
                    held.1.retain(|(known, name), _| *known != kind || !old.contains(&name.as_str()));
                    if let Some((_, response)) = delta.on_request(&delta_request(kind, &new, &old), &snapshot).response {
                        hold_changes(&mut held.1, kind, &response);
                    }
                }
                names = wanted;
            }
            let mut expected = (Received::new(), Received::new());
            for kind in KINDS {
                let response = StateOfTheWorld::default().on_request(&ask(kind, &names), &snapshot).response.unwrap().1;
                hold_all(&mut expected.0, kind, &response);
                let response = Delta::default().on_request(&delta_request(kind, &names, &[]), &snapshot).response.unwrap().1;
                hold_changes(&mut expected.1, kind, &response);
            }
            prop_assert_eq!(&held, &expected);
        }
    }
}

pub(super) fn text() -> impl Strategy<Value = String> {
    prop_oneof![Just(NAME.to_owned()), Just("*".to_owned()), "\\PC{0,12}", "[a-z.:]{0,16}"]
}

pub(super) fn url() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => proptest::sample::select(Kind::ALL.to_vec()).prop_map(Kind::url),
        1 => "\\PC{0,20}",
    ]
}

proptest! {
    /// Malformed requests in any sequence cause no panic, and each request causes at most one response. After the
    /// malformed requests, the session still pushes the current members of its subscribed names.
    #[test]
    fn malformed_requests_cause_no_panic(
        requests in prop::collection::vec(
            (url(), prop::collection::vec(text(), 0..4), "[0-9]{0,3}", any::<bool>(), prop::collection::vec(text(), 0..3)), 0..12)
    ) {
        let mut state = two_services();
        let before = state.snapshot();
        let (mut sotw, mut delta) = (StateOfTheWorld::default(), Delta::default());
        for (type_url, names, nonce, is_refused, others) in requests {
            let error_detail = is_refused.then(RpcStatus::default);
            let request = DiscoveryRequest {
                type_url: type_url.clone(), resource_names: names.clone(), response_nonce: nonce.clone(),
                error_detail: error_detail.clone(), ..DiscoveryRequest::default()
            };
            sotw.on_request(&request, &before);
            let request = DeltaDiscoveryRequest {
                type_url, resource_names_subscribe: names, resource_names_unsubscribe: others.clone(),
                response_nonce: nonce, error_detail,
                initial_resource_versions: others.into_iter().map(|name| (name, "x".to_owned())).collect(),
                ..DeltaDiscoveryRequest::default()
            };
            delta.on_request(&request, &before);
        }
        let subscribe = DeltaDiscoveryRequest {
            type_url: Kind::Endpoints.url(), resource_names_subscribe: vec![NAME.to_owned()],
            ..DeltaDiscoveryRequest::default()
        };
        delta.on_request(&subscribe, &before);
        sotw.on_request(&ask(Kind::Endpoints, &[NAME]), &before);
        let after = without_b(&mut state);
        let pushed: BTreeSet<_> = delta.on_snapshot(&after).into_iter().flat_map(|(_, it)| it.resources).map(|it| it.name).collect();
        prop_assert!(pushed.contains(NAME));
        prop_assert!(sotw.on_snapshot(&after).iter().any(|(kind, it)| *kind == "eds" && !it.resources.is_empty()));
    }

    /// Random bytes cause no panic: the decoder rejects bytes that are not a valid message, and the session handles
    /// every valid message.
    #[test]
    fn random_bytes_cause_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let snapshot = two_services().snapshot();
        if let Ok(request) = DiscoveryRequest::decode(&*bytes) {
            StateOfTheWorld::default().on_request(&request, &snapshot);
        }
        if let Ok(request) = DeltaDiscoveryRequest::decode(&*bytes) {
            Delta::default().on_request(&request, &snapshot);
        }
    }
}
