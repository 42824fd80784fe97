// SPDX-License-Identifier: Apache-2.0
//! Builds the xDS resources of a snapshot.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    sync::{Arc, LazyLock},
};

use axum::body::Bytes;
use envoy_types::{
    pb::{
        envoy::{
            config::{
                cluster::v3::{
                    CircuitBreakers, Cluster,
                    circuit_breakers::Thresholds,
                    cluster::{ClusterDiscoveryType, CommonLbConfig, DiscoveryType, EdsClusterConfig, LbPolicy},
                },
                core::v3::{
                    Address, AggregatedConfigSource, ApiVersion, ConfigSource, HealthStatus, Locality, Metadata,
                    SocketAddress,
                    address::Address as AddressKind,
                    config_source::ConfigSourceSpecifier,
                    socket_address::{PortSpecifier, Protocol as SocketProtocol},
                },
                endpoint::v3::{
                    ClusterLoadAssignment, Endpoint, LbEndpoint, LocalityLbEndpoints, lb_endpoint::HostIdentifier,
                },
                listener::v3::{ApiListener, Listener},
                route::v3::{
                    Route, RouteAction, RouteConfiguration, RouteMatch, VirtualHost, route::Action,
                    route_action::ClusterSpecifier, route_match::PathSpecifier,
                },
            },
            extensions::filters::{
                http::router::v3::Router,
                network::http_connection_manager::v3::{
                    HttpConnectionManager, HttpFilter, Rds, http_connection_manager::RouteSpecifier,
                    http_filter::ConfigType,
                },
            },
            r#type::v3::Percent,
        },
        google::protobuf::{Any, Duration, Struct, UInt32Value, Value, value::Kind as ValueKind},
    },
    util::pack_any,
};
use npl_agent::core::model::{ObjectKey, Protocol};
use prost::{Message as _, Name as _};

use super::{encode::Encoded, names};
use crate::core::snapshot::{Condition, Group, Member, PortKey, Snapshot, Version, WEIGHT};

/// A resource type of xDS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// `Cluster`. This type comes first, because a client requests the endpoints only of clusters that the client has
    /// received.
    Cluster,
    /// `ClusterLoadAssignment`: the endpoints of a cluster.
    Endpoints,
    /// `Listener`, for gRPC clients.
    Listener,
    /// `RouteConfiguration`, for gRPC clients.
    Routes,
}

impl Kind {
    pub(super) const ALL: [Self; 4] = [Self::Cluster, Self::Endpoints, Self::Listener, Self::Routes];

    pub(super) fn of_url(url: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.url() == url)
    }

    pub(super) fn url(self) -> String {
        match self {
            Self::Cluster => Cluster::type_url(),
            Self::Endpoints => ClusterLoadAssignment::type_url(),
            Self::Listener => Listener::type_url(),
            Self::Routes => RouteConfiguration::type_url(),
        }
    }

    /// Returns the short name of the type, for metrics.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Cluster => "cds",
            Self::Endpoints => "eds",
            Self::Listener => "lds",
            Self::Routes => "rds",
        }
    }

    /// Returns whether a state-of-the-world response must contain all subscribed resources of the type. For clusters
    /// and listeners, the client removes resources that are not in the response.
    pub(super) const fn is_complete(self) -> bool {
        matches!(self, Self::Cluster | Self::Listener)
    }
}

/// Builds and encodes the resource with this name; `None` if the resource does not exist.
///
/// If a Service port does not exist, the resource of its endpoints is an empty assignment. Without the empty
/// assignment, a client would wait for an assignment, or keep the last members of a removed Service.
pub(super) fn resource(kind: Kind, name: &str, snapshot: &Snapshot) -> Option<Encoded> {
    let group = names::find(snapshot, name);
    if !exists(kind, group) {
        return None;
    }
    let (head, shared) = match kind {
        Kind::Cluster => (cluster(name).value, Bytes::new()),
        Kind::Listener => (listener(name).value, Bytes::new()),
        Kind::Routes => (routes(name).value, Bytes::new()),
        Kind::Endpoints => {
            // An encoded message followed by further fields is an encoding of the message with these fields.
            let named = ClusterLoadAssignment { cluster_name: name.to_owned(), ..ClusterLoadAssignment::default() };
            (named.encode_to_vec(), group.map(endpoints).unwrap_or_default())
        }
    };
    Some(Encoded { type_url: kind.url(), head, shared })
}

/// Returns the version of the resource with this name, without building the resource; `None` if the resource does not
/// exist. `group` is the group to which the name refers.
///
/// All streams share the version of the canonical name, which the group keeps: for a client with thousands of clusters,
/// a look-up is much cheaper than a digest.
pub(super) fn version_of(kind: Kind, name: &str, group: Option<&Arc<Group>>) -> Option<Version> {
    let content = || match (kind, group) {
        (Kind::Endpoints, group) => {
            let members = group.map(|group| group.version).unwrap_or_default();
            of_content(kind, &format!("{name}\n{members}"))
        }
        (Kind::Cluster | Kind::Listener | Kind::Routes, _) => of_content(kind, name),
    };
    let canonical = group.filter(|group| names::is_canonical(name, group));
    let shared = canonical.and_then(|group| group.resource_versions.get(kind as usize));
    exists(kind, group).then(|| shared.map_or_else(content, |version| *version.get(content)))
}

fn exists(kind: Kind, group: Option<&Arc<Group>>) -> bool {
    kind == Kind::Endpoints || group.is_some_and(|group| group.key.protocol == Protocol::Tcp)
}

/// Computes the version of a resource without building the resource. The version is a digest of the input from which
/// the resource is built, and of a sample resource. Because of the sample, the version changes if a release of NPL
/// builds different content from the same input.
fn of_content(kind: Kind, input: &str) -> Version {
    static SAMPLES: LazyLock<BTreeMap<Kind, Version>> =
        LazyLock::new(|| Kind::ALL.into_iter().map(|kind| (kind, Version::of(&sample(kind)))).collect());
    let sample = SAMPLES.get(&kind).copied().unwrap_or_default();
    Version::of(format!("{sample}\n{input}").as_bytes())
}

/// Encodes a sample resource of this type. All processes of a release encode the sample in the same way.
fn sample(kind: Kind) -> Vec<u8> {
    const NAME: &str = "sample";
    match kind {
        Kind::Cluster => cluster(NAME).value,
        Kind::Listener => listener(NAME).value,
        Kind::Routes => routes(NAME).value,
        Kind::Endpoints => {
            let group = sample_group();
            // The metadata is a map, and the entries of a map are encoded in a random order. The metadata is therefore
            // left out here, and encoded separately in sorted order.
            let mut content = assignment(NAME, Some(&group), |_| None).encode_to_vec();
            let metadata = group.members.iter().flat_map(|member| metadata(member).filter_metadata);
            let fields: BTreeSet<String> = metadata
                .flat_map(|(filter, fields)| fields.fields.into_iter().map(move |field| format!("{filter} {field:?}")))
                .collect();
            content.extend(fields.into_iter().flat_map(String::into_bytes));
            content
        }
    }
}

/// Returns a group with one member in each condition.
fn sample_group() -> Arc<Group> {
    let member = |condition| Member {
        address: Ipv4Addr::LOCALHOST.into(),
        port: 1,
        pod: "pod".into(),
        node: "node".into(),
        zone: "zone".into(),
        condition,
        weight: WEIGHT,
    };
    let members = [Condition::Ready, Condition::NotReady, Condition::Draining].map(member).to_vec();
    let key = PortKey { service: ObjectKey::new("namespace", "service"), number: 1, protocol: Protocol::Tcp };
    Arc::new(Group::new(key, None, members))
}

/// Returns whether a wildcard subscription includes the resource of a group with the canonical name. Listeners and
/// routes are for gRPC clients, and are served only by name: a proxy that subscribes to all listeners would reject
/// listeners without an address.
pub(super) fn is_in_wildcard(kind: Kind, group: &Group) -> bool {
    matches!(kind, Kind::Cluster | Kind::Endpoints) && group.key.protocol == Protocol::Tcp
}

fn ads() -> ConfigSource {
    ConfigSource {
        resource_api_version: ApiVersion::V3.into(),
        config_source_specifier: Some(ConfigSourceSpecifier::Ads(AggregatedConfigSource {})),
        ..ConfigSource::default()
    }
}

/// The maximum number of concurrent retries of one Envoy to a cluster, equal to Envoy's default maximum of concurrent
/// requests. With Envoy's default of three retries, more than three requests to a Pod that has just stopped could fail.
const MOST_RETRIES: UInt32Value = UInt32Value { value: 1024 };

fn cluster(name: &str) -> Any {
    pack_any(Cluster {
        name: name.to_owned(),
        cluster_discovery_type: Some(ClusterDiscoveryType::Type(DiscoveryType::Eds.into())),
        eds_cluster_config: Some(EdsClusterConfig { eds_config: Some(ads()), service_name: String::new() }),
        connect_timeout: Some(Duration { seconds: 1, nanos: 0 }),
        lb_policy: LbPolicy::RoundRobin.into(),
        // The threshold 0 disables panic mode, because Envoy must not use draining members, even while most members are
        // draining.
        common_lb_config: Some(CommonLbConfig {
            healthy_panic_threshold: Some(Percent { value: 0.0 }),
            ..CommonLbConfig::default()
        }),
        ignore_health_on_host_removal: true,
        circuit_breakers: Some(CircuitBreakers {
            thresholds: vec![Thresholds { max_retries: Some(MOST_RETRIES), ..Thresholds::default() }],
            ..CircuitBreakers::default()
        }),
        ..Cluster::default()
    })
}

fn listener(name: &str) -> Any {
    let router = HttpFilter {
        name: "router".to_owned(),
        config_type: Some(ConfigType::TypedConfig(pack_any(Router::default()))),
        ..HttpFilter::default()
    };
    let rds = Rds { config_source: Some(ads()), route_config_name: name.to_owned() };
    let manager = HttpConnectionManager {
        route_specifier: Some(RouteSpecifier::Rds(rds)),
        http_filters: vec![router],
        ..HttpConnectionManager::default()
    };
    let api_listener = Some(ApiListener { api_listener: Some(pack_any(manager)) });
    pack_any(Listener { name: name.to_owned(), api_listener, ..Listener::default() })
}

fn routes(name: &str) -> Any {
    let all = RouteMatch { path_specifier: Some(PathSpecifier::Prefix(String::new())), ..RouteMatch::default() };
    let to_cluster =
        RouteAction { cluster_specifier: Some(ClusterSpecifier::Cluster(name.to_owned())), ..RouteAction::default() };
    let route = Route { r#match: Some(all), action: Some(Action::Route(to_cluster)), ..Route::default() };
    let host = VirtualHost {
        name: name.to_owned(),
        domains: vec!["*".to_owned()],
        routes: vec![route],
        ..VirtualHost::default()
    };
    pack_any(RouteConfiguration { name: name.to_owned(), virtual_hosts: vec![host], ..RouteConfiguration::default() })
}

/// Encodes the endpoints of a Service port, without the name of the assignment: all names of the port share the bytes.
fn endpoints(group: &Arc<Group>) -> Bytes {
    let encode = || assignment("", Some(group), |member| Some(metadata(member))).encode_to_vec().into();
    Bytes::from_owner(Arc::clone(group.encoded.get(encode)))
}

fn assignment(
    name: &str,
    group: Option<&Arc<Group>>,
    metadata: fn(&Member) -> Option<Metadata>,
) -> ClusterLoadAssignment {
    let mut by_zone: BTreeMap<&str, Vec<LbEndpoint>> = BTreeMap::new();
    for member in group.into_iter().flat_map(|group| &group.members) {
        let protocol = group.map_or(Protocol::Tcp, |group| group.key.protocol);
        by_zone.entry(&member.zone).or_default().push(endpoint(member, protocol, metadata(member)));
    }
    let endpoints = by_zone.into_iter().map(|(zone, lb_endpoints)| LocalityLbEndpoints {
        locality: Some(Locality { zone: zone.to_owned(), ..Locality::default() }),
        load_balancing_weight: weight(&lb_endpoints),
        lb_endpoints,
        ..LocalityLbEndpoints::default()
    });
    ClusterLoadAssignment {
        cluster_name: name.to_owned(),
        endpoints: endpoints.collect(),
        ..ClusterLoadAssignment::default()
    }
}

/// Returns the weight of a locality: the number of its ready members, so that each ready member gets the same share of
/// requests. gRPC divides the requests by the weights of the localities, and only then ignores members that are not
/// ready. A locality without ready members has no weight, because the weight 0 is invalid; gRPC ignores such a
/// locality.
fn weight(endpoints: &[LbEndpoint]) -> Option<UInt32Value> {
    let ready = endpoints.iter().filter(|endpoint| endpoint.health_status() == HealthStatus::Healthy).count();
    (ready > 0).then(|| UInt32Value { value: u32::try_from(ready).unwrap_or(u32::MAX) })
}

fn endpoint(member: &Member, protocol: Protocol, metadata: Option<Metadata>) -> LbEndpoint {
    let health = match member.condition {
        Condition::Ready => HealthStatus::Healthy,
        Condition::NotReady => HealthStatus::Unhealthy,
        Condition::Draining => HealthStatus::Draining,
    };
    let socket = SocketAddress {
        protocol: if protocol == Protocol::Udp { SocketProtocol::Udp } else { SocketProtocol::Tcp }.into(),
        address: member.address.to_string(),
        port_specifier: Some(PortSpecifier::PortValue(u32::from(member.port))),
        ..SocketAddress::default()
    };
    let address = Address { address: Some(AddressKind::SocketAddress(socket)) };
    LbEndpoint {
        health_status: health.into(),
        load_balancing_weight: Some(UInt32Value { value: u32::from(member.weight) }),
        metadata,
        host_identifier: Some(HostIdentifier::Endpoint(Endpoint { address: Some(address), ..Endpoint::default() })),
    }
}

/// Builds the metadata of an endpoint: the names of Pod and Node, for access logs.
fn metadata(member: &Member) -> Metadata {
    let text = |text: &str| Value { kind: Some(ValueKind::StringValue(text.to_owned())) };
    let fields = [("pod", &member.pod), ("node", &member.node)];
    let fields = fields.into_iter().map(|(key, name)| (key.to_owned(), text(name))).collect();
    let npl = ("npl".to_owned(), Struct { fields });
    Metadata { filter_metadata: [npl].into_iter().collect(), ..Metadata::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::tests::{annotation, pod, snapshot};

    #[test]
    fn a_version_depends_on_name_members_and_encoding() {
        let one = snapshot(vec![pod("a", "n1", &annotation(8080, "192.0.2.1", 61000))]);
        let other = snapshot(vec![pod("a", "n1", &annotation(8080, "192.0.2.1", 61001))]);
        for kind in Kind::ALL {
            let of = |name, snapshot| version_of(kind, name, names::find(snapshot, name)).unwrap();
            assert_ne!(of("web.default:http", &one), of("web.default:80", &one), "{kind:?}: the names differ");
            let is_equal = of("web.default:http", &one) == of("web.default:http", &other);
            assert_eq!(is_equal, kind != Kind::Endpoints, "{kind:?}: only endpoints have members");
            assert_ne!(
                of("web.default:http", &one),
                Version::of(b"web.default:http"),
                "{kind:?}: the version is not the digest of the name alone"
            );
        }
    }

    #[test]
    fn samples_are_equal_in_all_processes_and_have_all_content() {
        for kind in Kind::ALL {
            // Each HashMap has its own random seed, as if it were in a separate process, so repeated encodings show
            // whether the order of the entries matters.
            let samples: BTreeSet<Vec<u8>> = (0..50).map(|_| sample(kind)).collect();
            assert_eq!(samples.len(), 1, "{kind:?}");
        }
        let text = String::from_utf8_lossy(&sample(Kind::Endpoints)).into_owned();
        for content in ["sample", "127.0.0.1", "zone", "npl", "pod", "node"] {
            assert!(text.contains(content), "{content}");
        }
    }
}
