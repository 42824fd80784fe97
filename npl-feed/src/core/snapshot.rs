// SPDX-License-Identifier: Apache-2.0
//! Defines the snapshot that xDS, DNS and HTTP serve: the members of each Service port. The version of a snapshot is
//! the digest of its content.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Write as _},
    net::IpAddr,
    sync::{Arc, OnceLock},
};

use npl_agent::core::model::{ObjectKey, Protocol, ServiceKey};
use ring::digest;

use super::work::{self, Operation};

/// The version of a snapshot or group: the first 16 bytes of the SHA-256 of the content, displayed as 32 hexadecimal
/// digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Version(u128);

impl Version {
    /// Computes the version from the serialized content.
    pub fn of(content: &[u8]) -> Self {
        work::count(Operation::Digest, 1);
        let digest = digest::digest(&digest::SHA256, content);
        let bytes = digest.as_ref().first_chunk::<16>().copied().unwrap_or_default();
        Self(u128::from_be_bytes(bytes))
    }

    /// Returns the first 32 bits of the digest, which serve as the serial of the SOA record.
    pub const fn serial(self) -> u32 {
        let [a, b, c, d, ..] = self.0.to_be_bytes();
        u32::from_be_bytes([a, b, c, d])
    }

    /// Returns the index of Consul's blocking queries: the first 63 bits of the digest. The lowest of these bits is set
    /// to 1, because the index must not be 0.
    pub const fn index(self) -> u64 {
        ((self.0 >> u64::BITS) as u64 >> 1) | 1
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The maximum length in bytes of a name that consists of a namespace, a Service, a port and two separators. The names
/// of namespaces and Services have at most 63 bytes, and the names of ports have at most 15 bytes.
pub const LONGEST_NAME: usize = 63 + 63 + 15 + 2;

/// The key of a Service port: Service, number and protocol.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortKey {
    /// The namespace and name of the Service.
    pub service: ServiceKey,
    /// The number of the Service port.
    pub number: u16,
    /// The protocol of the Service port.
    pub protocol: Protocol,
}

/// Whether load balancers may send requests to a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Condition {
    /// The Pod is ready: load balancers may send new requests to the member.
    Ready,
    /// The Pod is not ready: load balancers should send no requests to the member.
    NotReady,
    /// The Pod is being deleted, or the annotation entry was withdrawn. The member answers requests in progress; load
    /// balancers should send the member no new requests.
    Draining,
}

impl Condition {
    /// Returns the name of the condition in the answers of the feed's interfaces.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::NotReady => "not_ready",
            Self::Draining => "draining",
        }
    }
}

/// One port of one Pod, with the node address and node port through which clients outside the cluster reach the Pod
/// port.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Member {
    /// The address of the Node.
    pub address: IpAddr,
    /// The node port, in host byte order.
    pub port: u16,
    /// The name of the Pod.
    pub pod: Arc<str>,
    /// The name of the Node.
    pub node: Arc<str>,
    /// The zone of the Node; empty if the Node has no zone.
    pub zone: Arc<str>,
    /// Whether load balancers may send requests to the member.
    pub condition: Condition,
    /// The weight of the member for load balancing, relative to the weights of the same port's members.
    pub weight: u16,
}

/// The weight of every member: all Pods of a Service get the same share of requests.
pub const WEIGHT: u16 = 1;

/// The members of one Service port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The key of the Service port.
    pub key: PortKey,
    /// The name of the Service port; `None` if the port has no name.
    pub name: Option<Arc<str>>,
    /// The members, sorted by address and port.
    pub members: Vec<Member>,
    /// The digest of the group's key, name and members.
    pub version: Version,
    /// The encoded members, which all xDS clients share.
    pub encoded: Derived<Arc<[u8]>>,
    /// By resource type: the versions of the xDS resources with the group's canonical name, which all xDS clients
    /// share.
    pub resource_versions: [Derived<Version>; 4],
}

/// A value that is computed at its first use, and kept as long as its owner exists. The value is derived from the
/// owner, so all values count as equal, and comparisons of owners ignore the value.
#[derive(Debug, Clone)]
pub struct Derived<T>(OnceLock<T>);

impl<T> Derived<T> {
    /// Returns the value, which `compute` computes at the first use.
    pub fn get(&self, compute: impl FnOnce() -> T) -> &T {
        self.0.get_or_init(compute)
    }
}

impl<T> Default for Derived<T> {
    fn default() -> Self {
        Self(OnceLock::new())
    }
}

impl<T> PartialEq for Derived<T> {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl<T> Eq for Derived<T> {}

impl Group {
    /// Creates a group: sorts the members and computes the version.
    pub fn new(key: PortKey, name: Option<Arc<str>>, mut members: Vec<Member>) -> Self {
        members.sort_unstable();
        members.dedup();
        members.shrink_to_fit();
        let mut content =
            format!("{}\n{}\n{}\n{}\n", key.service, key.number, key.protocol, name.as_deref().unwrap_or(""));
        for Member { address, port, pod, node, zone, condition, weight } in &members {
            // The serialized fields end in line feeds. The serialization is unambiguous, because Kubernetes names
            // contain no line feed.
            let condition = condition.as_str();
            let _infallible = write!(content, "{address} {port} {pod}\n{node}\n{zone}\n{condition} {weight}\n");
        }
        let version = Version::of(content.as_bytes());
        Self { key, name, members, version, encoded: Derived::default(), resource_versions: Default::default() }
    }

    /// Returns the name of the Service port, or the port's number if the port has no name.
    pub fn port_text(&self) -> String {
        self.name.as_deref().map_or_else(|| self.key.number.to_string(), str::to_owned)
    }

    /// Returns the ready members. Load balancers may send new requests only to ready members.
    pub fn ready(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.condition == Condition::Ready)
    }
}

/// The members of all Service ports.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    groups: BTreeMap<PortKey, Arc<Group>>,
    version: Version,
    version_of_names: Version,
    /// The addresses and node ports of all members, sorted.
    addresses: Derived<Vec<(IpAddr, u16)>>,
    /// The version of an earlier snapshot, and the Services whose groups differ from the groups of the earlier
    /// snapshot.
    changes: Derived<(Version, Arc<BTreeSet<ServiceKey>>)>,
}

impl Snapshot {
    /// Creates the snapshot and computes its version.
    pub fn new(groups: BTreeMap<PortKey, Arc<Group>>) -> Self {
        let versions: String = groups.values().map(|group| group.version.to_string()).collect();
        let names: Vec<String> =
            groups.values().map(|group| format!("{}\n{}", group.key.service, group.port_text())).collect();
        let (version, version_of_names) = (Version::of(versions.as_bytes()), Version::of(names.join("\n").as_bytes()));
        Self { groups, version, version_of_names, addresses: Derived::default(), changes: Derived::default() }
    }

    /// Returns the digest of the names of all Services and Service ports.
    pub const fn version_of_names(&self) -> Version {
        self.version_of_names
    }

    /// Returns the version of the snapshot, which is the digest of all groups.
    pub const fn version(&self) -> Version {
        self.version
    }

    /// Returns the groups of all Service ports, sorted by key.
    pub fn groups(&self) -> impl Iterator<Item = &Arc<Group>> {
        work::count(Operation::Listing, 1);
        self.groups.values()
    }

    /// Returns the Services whose groups differ from the groups of an earlier snapshot of the same cluster. The result
    /// of the first comparison, which is usually with the previous snapshot, is kept, so that all streams share this
    /// result.
    pub fn services_changed_since(&self, earlier: &Self) -> Arc<BTreeSet<ServiceKey>> {
        let (version, shared) = self.changes.get(|| (earlier.version, Arc::new(self.compare(earlier))));
        if *version == earlier.version { Arc::clone(shared) } else { Arc::new(self.compare(earlier)) }
    }

    /// Compares the groups by their addresses in memory, because [`super::state::State`] keeps unchanged groups.
    fn compare(&self, earlier: &Self) -> BTreeSet<ServiceKey> {
        work::count(Operation::Comparison, 1);
        let mut changed = BTreeSet::new();
        let (mut new, mut old) = (self.groups.iter().peekable(), earlier.groups.iter().peekable());
        loop {
            let order = match (new.peek(), old.peek()) {
                (Some((new, _)), Some((old, _))) => new.cmp(old),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (None, None) => return changed,
            };
            let new = if order == Ordering::Greater { None } else { new.next() };
            let old = if order == Ordering::Less { None } else { old.next() };
            let is_kept = new.zip(old).is_some_and(|((_, new), (_, old))| Arc::ptr_eq(new, old));
            changed.extend(new.or(old).filter(|_| !is_kept).map(|(key, _)| key.service.clone()));
        }
    }

    /// Returns whether a Service of the namespace has a group.
    pub fn has_namespace(&self, namespace: &str) -> bool {
        let first = PortKey { service: ObjectKey::new(namespace, ""), number: 0, protocol: Protocol::Tcp };
        self.groups.range(first..).next().is_some_and(|(key, _)| *key.service.namespace == *namespace)
    }

    /// Returns whether a member has the address and, if `port` is given, the node port.
    pub fn has_address(&self, address: IpAddr, port: Option<u16>) -> bool {
        let known = self.addresses.get(|| {
            let members = self.groups().flat_map(|group| &group.members);
            let mut all: Vec<(IpAddr, u16)> = members.map(|member| (member.address, member.port)).collect();
            all.sort_unstable();
            all
        });
        let first = known.partition_point(|it| *it < (address, port.unwrap_or(0)));
        known.get(first).is_some_and(|it| it.0 == address && port.is_none_or(|port| it.1 == port))
    }

    /// Returns the groups of one Service, sorted by port number and protocol.
    pub fn service(&self, namespace: &str, name: &str) -> impl Iterator<Item = &Arc<Group>> {
        let service = ObjectKey::new(namespace, name);
        let first = PortKey { service: service.clone(), number: 0, protocol: Protocol::Tcp };
        self.groups.range(first..).take_while(move |(key, _)| key.service == service).map(|(_, group)| group)
    }

    /// Returns the group of the Service port with this name, which may consist of digits. If no port has this name,
    /// returns the group of the port with this number. If ports of several protocols have the number, TCP takes
    /// precedence over UDP and SCTP.
    pub fn port(&self, namespace: &str, service: &str, port: &str) -> Option<&Arc<Group>> {
        named_or_numbered(self.service(namespace, service), port)
    }

    /// Returns the group of the Service port with this protocol and name. If no port has this name, returns the group
    /// of the port with this protocol and number.
    pub fn port_of(&self, namespace: &str, service: &str, protocol: Protocol, port: &str) -> Option<&Arc<Group>> {
        let groups = self.service(namespace, service);
        named_or_numbered(groups.filter(|group| group.key.protocol == protocol), port)
    }
}

fn named_or_numbered<'a>(groups: impl Iterator<Item = &'a Arc<Group>>, port: &str) -> Option<&'a Arc<Group>> {
    let number = port.parse::<u16>().ok().filter(|number| number.to_string() == port);
    let mut by_number = None;
    for group in groups {
        if group.name.as_deref() == Some(port) {
            return Some(group);
        }
        if by_number.is_none() && number == Some(group.key.number) {
            by_number = Some(group);
        }
    }
    by_number
}
