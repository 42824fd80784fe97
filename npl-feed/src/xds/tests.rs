// SPDX-License-Identifier: Apache-2.0

use std::{collections::BTreeSet, marker::PhantomData};

use envoy_types::pb::{
    envoy::{
        config::{
            cluster::v3::Cluster, core::v3::HealthStatus, endpoint::v3::ClusterLoadAssignment, listener::v3::Listener,
            route::v3::RouteConfiguration,
        },
        service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse},
    },
    google::{protobuf::Any, rpc::Status as RpcStatus},
};
use proptest::prelude::*;
use prost::Message as _;

use super::{
    delta,
    encode::Reply,
    names,
    resources::Kind,
    session::{Session, Subscribed},
    sotw,
};
use crate::{
    client_memory::Part,
    core::{
        model::{Change, Pod},
        snapshot::Snapshot,
        state::State,
        tests::{annotation, cluster, pod, service},
    },
};

type StateOfTheWorld = Decoding<sotw::StateOfTheWorld, DiscoveryResponse>;
type Delta = Decoding<delta::Delta, DeltaDiscoveryResponse>;

/// A session whose encoded responses are decoded, as a client decodes them.
#[derive(Default)]
struct Decoding<S, R> {
    session: S,
    response: PhantomData<R>,
}

struct Handled<R> {
    kind: &'static str,
    event: &'static str,
    response: Option<(&'static str, R)>,
}

impl<S: Session, R: prost::Message + Default> Decoding<S, R> {
    /// Handles a request of the complete message type, as it arrives from a client.
    fn on_request(&mut self, request: &impl prost::Message, snapshot: &Snapshot) -> Handled<R> {
        let Subscribed { kind, event, due } = self.session.subscribe(&received(request));
        let reply = due.and_then(|(kind, is_due)| Some((kind, self.session.respond(kind, snapshot, is_due)?)));
        Handled { kind, event, response: reply.map(Self::decode) }
    }

    fn on_snapshot(&mut self, snapshot: &Snapshot) -> Vec<(&'static str, R)> {
        let replies = self.session.kinds().into_iter();
        let replies = replies.filter_map(|kind| Some((kind, self.session.respond(kind, snapshot, false)?)));
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

#[test]
fn endpoints_have_address_port_zone_weight_and_health() {
    let mut changed = pods();
    changed[0].is_ready = false;
    changed[1].object.is_terminating = true;
    let mut state = cluster(changed);
    state.refresh();
    let mut session = StateOfTheWorld::default();
    let (_, response) = session.on_request(&ask(Kind::Endpoints, &[NAME]), &state.snapshot()).response.unwrap();
    let assignment: ClusterLoadAssignment = decode(&response.resources[0]);
    assert_eq!(assignment.cluster_name, NAME);
    let shown: Vec<_> = assignment
        .endpoints
        .iter()
        .flat_map(|locality| {
            let zone = locality.locality.as_ref().unwrap().zone.clone();
            let weight = locality.load_balancing_weight.unwrap().value;
            locality.lb_endpoints.iter().map(move |endpoint| {
                let debug = format!("{:?}", endpoint.host_identifier);
                (zone.clone(), weight, endpoint.health_status(), debug.contains("PortValue(61000)"))
            })
        })
        .collect();
    assert_eq!(
        shown,
        [(String::new(), 1, HealthStatus::Draining, true), ("west".to_owned(), 1, HealthStatus::Unhealthy, true)]
    );
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

/// The responses to many clients that do not read take little memory, because they share the encoded endpoints.
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
        session.respond(Kind::Endpoints, snapshot, true).unwrap().into_message()
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
    let subscribe = DeltaDiscoveryRequest {
        type_url: Kind::Endpoints.url(),
        resource_names_subscribe: all.clone(),
        ..DeltaDiscoveryRequest::default()
    };
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
    /// Malformed requests in any sequence cause no panic, and each causes at most one response. After the malformed
    /// requests, the session still pushes the current members of its subscribed names.
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
