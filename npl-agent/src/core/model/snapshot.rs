// SPDX-License-Identifier: Apache-2.0
//! The cluster objects that concern this Node, as last reported by the watches, and the Pods that a change affects.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::IpAddr,
};

use super::{
    Node, NodePort, ObjectKey, Pod, PodKey, PodUid, Service, ServiceKey, ServiceUid,
    namespaces::{Namespaces, ServiceScope},
};

/// A change of the cluster that a watch reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The API server's store was restored from a backup: resource versions have decreased. A [`Self::Pods`] change
    /// follows.
    StoreRestored,
    /// A list of all Pods of this Node. Known Pods that are not in the list were deleted.
    Pods(Vec<Pod>),
    /// A Pod was created or changed.
    Pod(Pod),
    /// A Pod was deleted.
    PodGone(PodKey, PodUid),
    /// A list of the Services of one scope that are active ([`Service::is_active`]) or have a `nodePort` or
    /// `healthCheckNodePort`. A known Service of the scope that is not in the list was deleted, or no longer meets
    /// either condition.
    Services(ServiceScope, Vec<Service>),
    /// A Service was created or changed.
    Service(Service),
    /// A Service was deleted.
    ServiceGone(ServiceKey),
    /// This Node was created or changed.
    Node(Node),
    /// The API server has no object for this Node.
    NodeGone,
}

impl Change {
    /// Removes the Services from a change: a list of Services becomes an empty list, and a created or changed Service
    /// becomes a deleted Service. All other changes stay the same.
    pub(in crate::core) fn without_services(self) -> Self {
        match self {
            Self::Services(scope, _) => Self::Services(scope, Vec::new()),
            Self::Service(service) => Self::ServiceGone(service.key),
            other @ (Self::StoreRestored
            | Self::Pods(_)
            | Self::Pod(_)
            | Self::PodGone(..)
            | Self::ServiceGone(_)
            | Self::Node(_)
            | Self::NodeGone) => other,
        }
    }
}

/// The Pods and port numbers that a change affects.
#[derive(Debug, Default)]
pub(in crate::core) struct Touched {
    /// Pods whose assignment may change.
    pub(in crate::core) pods: BTreeSet<PodKey>,
    /// Port numbers that became, or are no longer, a `nodePort` or `healthCheckNodePort` of a Service.
    pub(in crate::core) service_ports: BTreeSet<NodePort>,
    /// Pods that were deleted, with their uids, because a new Pod may have the same name.
    pub(in crate::core) gone: Vec<(PodKey, PodUid)>,
}

/// A Service with its `nodePort`s and its `healthCheckNodePort`, which kube-proxy serves on every Node.
#[derive(Debug)]
struct NodePortService {
    uid: ServiceUid,
    node_ports: BTreeSet<NodePort>,
}

/// A Pod's claim to an IP address. A newer claim is greater than an older claim. [`Snapshot::holder`] compares the
/// claims of Pods with the same address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct AddressClaim {
    /// The number of times that the API server's store had been restored before the first event in which the Pod has
    /// the address. Resource versions from before and after a restore cannot be compared: restored objects have lower
    /// resource versions.
    restores: u64,
    /// The Pod's resource version in the first event in which the Pod has the address.
    resource_version: u64,
    evidence: ClaimEvidence,
}

/// The evidence that the mappings of an earlier agent give for a Pod's claim to an address, in ascending order of
/// precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::core) enum ClaimEvidence {
    /// The Pod has no mapping of the address's IP family.
    Unmapped,
    /// A mapping of the Pod points to the address, so the Pod held the address when the earlier agent wrote the
    /// mapping.
    Mapped,
    /// All mappings of the Pod point to a different address, so the Pod got the claimed address after the earlier agent
    /// wrote the mappings.
    Moved,
}

/// The last known objects of the cluster: the Pods of this Node, the active Services ([`Service::is_active`]), and the
/// `nodePort`s and `healthCheckNodePort`s of all Services.
#[derive(Debug)]
pub(in crate::core) struct Snapshot {
    pods: BTreeMap<PodKey, Pod>,
    services: BTreeMap<ServiceKey, Service>,
    node: Option<Node>,
    pods_listed: bool,
    /// The scopes whose list of Services has not arrived.
    unlisted: BTreeSet<ServiceScope>,
    by_ip: BTreeMap<IpAddr, BTreeMap<PodKey, AddressClaim>>,
    by_host_port: BTreeMap<NodePort, BTreeSet<PodKey>>,
    /// All Services with a `nodePort` or `healthCheckNodePort`, whether or not NPL assigns node ports to their Pods.
    node_port_services: BTreeMap<ServiceKey, NodePortService>,
    by_service_port: BTreeMap<NodePort, BTreeSet<ServiceKey>>,
    /// The number of times that the API server's store was restored from a backup since the agent started.
    restores: u64,
}

impl Snapshot {
    /// Creates a snapshot without objects, for an agent that reads the Services of these namespaces.
    pub(in crate::core) fn new(namespaces: &Namespaces) -> Self {
        Self {
            pods: BTreeMap::new(),
            services: BTreeMap::new(),
            node: None,
            pods_listed: false,
            unlisted: namespaces.scopes(),
            by_ip: BTreeMap::new(),
            by_host_port: BTreeMap::new(),
            node_port_services: BTreeMap::new(),
            by_service_port: BTreeMap::new(),
            restores: 0,
        }
    }

    pub(in crate::core) fn apply(&mut self, change: Change) -> Touched {
        let mut touched = Touched::default();
        match change {
            Change::StoreRestored => self.forget_versions(),
            Change::Pods(pods) => self.replace_pods(pods, &mut touched),
            Change::Pod(pod) => self.put_pod(pod, &mut touched),
            Change::PodGone(key, uid) => self.remove_pod(&key, Some(&uid), &mut touched),
            Change::Services(scope, services) => self.replace_services(&scope, services, &mut touched),
            Change::Service(service) => self.put_service(service, &mut touched),
            Change::ServiceGone(key) => self.remove_service(&key, &mut touched),
            Change::Node(node) => self.node = Some(node),
            // The snapshot keeps the Node's last known addresses, because these addresses still belong to this machine.
            Change::NodeGone => {}
        }
        touched
    }

    /// Whether the list of all Pods, and the list of Services of each scope, have arrived. Until then, Pods and
    /// Services may exist that the agent does not know.
    pub(in crate::core) fn is_listed(&self) -> bool {
        self.pods_listed && self.unlisted.is_empty()
    }

    pub(in crate::core) const fn node(&self) -> Option<&Node> {
        self.node.as_ref()
    }

    pub(in crate::core) fn pod(&self, key: &PodKey) -> Option<&Pod> {
        self.pods.get(key)
    }

    pub(in crate::core) fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values()
    }

    /// Returns the Service with this key if the Service is active ([`Service::is_active`]).
    pub(in crate::core) fn service(&self, key: &ServiceKey) -> Option<&Service> {
        self.services.get(key)
    }

    /// The active Services ([`Service::is_active`]) of a namespace.
    pub(in crate::core) fn services_in<'a>(&'a self, namespace: &'a str) -> impl Iterator<Item = &'a Service> {
        in_namespace(&self.services, namespace)
    }

    /// The active Services ([`Service::is_active`]) that select the Pod.
    pub(in crate::core) fn services_of<'a>(&'a self, pod: &'a Pod) -> impl Iterator<Item = &'a Service> {
        in_namespace(&self.services, &pod.key.namespace).filter(move |service| service.selects(pod))
    }

    /// Returns the Pod that holds an IP address.
    ///
    /// Two Pods have the same address only while the kubelet's status of one of them is outdated. If one of the two
    /// Pods is terminating, the Pod that is not terminating holds the address. Otherwise, the Pod with the newest claim
    /// holds the address. The kubelet reports an address only after the CNI has assigned the address, so the Pod of an
    /// older claim has lost the address.
    pub(in crate::core) fn holder(&self, ip: IpAddr) -> Option<&Pod> {
        let claims = self.by_ip.get(&ip)?.iter();
        let pods = claims.filter_map(|(key, claim)| Some((self.pods.get(key)?, *claim)));
        pods.max_by_key(|(pod, claim)| (!pod.is_terminating, *claim, &pod.uid)).map(|(pod, _)| pod)
    }

    /// The IP addresses of all Pods that are not on the host network and have not finished.
    pub(in crate::core) fn pod_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.by_ip.keys().copied()
    }

    /// Orders the address claims of the Pods in the first list, by the mappings that an earlier agent left in the
    /// kernel. The Pods' resource versions do not give this order: a Pod in a list may have been changed after the Pod
    /// got its address. Claims from events after the list are newer than all claims from the list.
    pub(in crate::core) fn order_claims(&mut self, evidence: &BTreeMap<(IpAddr, PodKey), ClaimEvidence>) {
        for ((ip, key), evidence) in evidence {
            let Some(claims) = self.by_ip.get_mut(ip) else { continue };
            let version = |claim: &AddressClaim| (claim.restores, claim.resource_version);
            let newest = claims.values().map(version).max();
            if let (Some(claim), Some((restores, resource_version))) = (claims.get_mut(key), newest) {
                *claim = AddressClaim { restores, resource_version, evidence: *evidence };
            }
        }
    }

    /// Whether a Pod of this Node declares the port as a `hostPort`, of any protocol.
    pub(in crate::core) fn is_host_port(&self, port: NodePort) -> bool {
        self.by_host_port.contains_key(&port)
    }

    /// Returns a Service that has the number as a `nodePort` or `healthCheckNodePort`, so that clients of this Service
    /// send packets to the port.
    pub(in crate::core) fn service_with_port(&self, port: NodePort) -> Option<(&ServiceKey, &ServiceUid)> {
        let key = self.by_service_port.get(&port)?.first()?;
        Some((key, &self.node_port_services.get(key)?.uid))
    }

    /// Whether the number is the `hostPort` of a Pod, or the `nodePort` or `healthCheckNodePort` of a Service.
    pub(in crate::core) fn is_used_by_others(&self, port: NodePort) -> bool {
        self.is_host_port(port) || self.by_service_port.contains_key(&port)
    }

    /// Replaces the `nodePort`s and `healthCheckNodePort` of a Service. `service` is `None` if the Service is deleted.
    fn set_service_ports(&mut self, key: &ServiceKey, service: Option<&Service>, touched: &mut Touched) {
        let former = self.node_port_services.remove(key).map(|known| known.node_ports).unwrap_or_default();
        let node_ports = service.map(|service| service.node_ports.clone()).unwrap_or_default();
        for port in &former {
            forget(&mut self.by_service_port, *port, key);
        }
        for port in &node_ports {
            self.by_service_port.entry(*port).or_default().insert(key.clone());
        }
        touched.service_ports.extend(former.symmetric_difference(&node_ports).copied());
        if let Some(service) = service.filter(|_| !node_ports.is_empty()) {
            let known = NodePortService { uid: service.uid.clone(), node_ports };
            self.node_port_services.insert(key.clone(), known);
        }
    }

    /// Resets the known resource version of every Pod to 0 after the API server's store was restored from a backup. The
    /// restored versions are lower than the known versions, but must not count as outdated.
    fn forget_versions(&mut self) {
        self.restores += 1;
        for pod in self.pods.values_mut() {
            pod.resource_version = 0;
        }
    }

    fn replace_pods(&mut self, pods: Vec<Pod>, touched: &mut Touched) {
        self.pods_listed = true;
        let listed: BTreeSet<_> = pods.iter().map(|pod| pod.key.clone()).collect();
        let missing: Vec<_> = self.pods.keys().filter(|key| !listed.contains(*key)).cloned().collect();
        for key in missing {
            self.remove_pod(&key, None, touched);
        }
        for pod in pods {
            self.put_pod(pod, touched);
        }
    }

    /// Returns the Pod's claims to the addresses in its status.
    fn claims_of(&self, pod: &Pod) -> BTreeMap<IpAddr, AddressClaim> {
        contended_ips(pod).filter_map(|ip| Some((ip, *self.by_ip.get(&ip)?.get(&pod.key)?))).collect()
    }

    fn put_pod(&mut self, pod: Pod, touched: &mut Touched) {
        let mut former_claims = BTreeMap::new();
        if let Some(known) = self.pods.get_mut(&pod.key) {
            if known.resource_version > pod.resource_version {
                return; // The event is older than the known state of the Pod.
            }
            if differ_by_writes_only(known, &pod) {
                // The known Pod is updated in place: replacing a thousand Pods in a burst would fragment the heap.
                Pod {
                    resource_version: known.resource_version,
                    annotation: known.annotation,
                    annotation_manager: known.annotation_manager,
                    gate: known.gate,
                    ..
                } = pod;
                touched.pods.insert(known.key.clone());
                return;
            }
            let uid = known.uid.clone();
            if uid == pod.uid {
                former_claims = self.pods.get(&pod.key).map(|known| self.claims_of(known)).unwrap_or_default();
            }
            self.unindex(&pod.key, touched);
            if uid != pod.uid {
                touched.gone.push((pod.key.clone(), uid));
            }
        }
        for ip in contended_ips(&pod) {
            let (restores, resource_version) = (self.restores, pod.resource_version);
            let new = AddressClaim { restores, resource_version, evidence: ClaimEvidence::Unmapped };
            let sharers = self.by_ip.entry(ip).or_default();
            touched.pods.extend(sharers.keys().cloned());
            sharers.insert(pod.key.clone(), former_claims.get(&ip).copied().unwrap_or(new));
        }
        for port in host_ports(&pod) {
            self.by_host_port.entry(port).or_default().insert(pod.key.clone());
        }
        touched.pods.insert(pod.key.clone());
        self.pods.insert(pod.key.clone(), pod);
    }

    /// Removes the Pod with this key if the Pod has this uid, or if `uid` is `None`.
    fn remove_pod(&mut self, key: &PodKey, uid: Option<&PodUid>, touched: &mut Touched) {
        if self.pods.get(key).is_some_and(|known| uid.is_none_or(|uid| known.uid == *uid)) {
            self.unindex(key, touched);
            touched.gone.extend(self.pods.remove(key).map(|pod| (pod.key, pod.uid)));
        }
    }

    fn unindex(&mut self, key: &PodKey, touched: &mut Touched) {
        let Some(pod) = self.pods.get(key) else { return };
        for ip in contended_ips(pod) {
            let Some(claims) = self.by_ip.get_mut(&ip) else { continue };
            claims.remove(key);
            touched.pods.extend(claims.keys().cloned());
            if claims.is_empty() {
                self.by_ip.remove(&ip);
            }
        }
        for port in host_ports(pod) {
            forget(&mut self.by_host_port, port, key);
        }
    }

    fn replace_services(&mut self, scope: &ServiceScope, services: Vec<Service>, touched: &mut Touched) {
        self.unlisted.remove(scope);
        let is_in_scope = |key: &ServiceKey| scope.as_ref().is_none_or(|namespace| key.namespace == *namespace);
        let listed: BTreeSet<_> = services.iter().map(|service| service.key.clone()).collect();
        let is_missing = |key: &&ServiceKey| is_in_scope(key) && !listed.contains(*key);
        let missing: Vec<_> = self.node_port_services.keys().filter(is_missing).cloned().collect();
        for key in missing {
            self.set_service_ports(&key, None, touched);
        }
        for service in &services {
            self.set_service_ports(&service.key, Some(service), touched);
        }
        let (mut former, others): (BTreeMap<_, _>, BTreeMap<_, _>) =
            mem::take(&mut self.services).into_iter().partition(|(key, _)| is_in_scope(key));
        self.services = others;
        for service in services.into_iter().filter(Service::is_active) {
            let known = former.remove(&service.key);
            if known.as_ref() != Some(&service) {
                self.touch_selected(known.as_ref(), touched);
                self.touch_selected(Some(&service), touched);
            }
            self.services.insert(service.key.clone(), service);
        }
        for service in former.values() {
            self.touch_selected(Some(service), touched);
        }
    }

    fn put_service(&mut self, service: Service, touched: &mut Touched) {
        self.set_service_ports(&service.key, Some(&service), touched);
        if !service.is_active() {
            return self.deactivate_service(&service.key, touched);
        }
        if self.services.get(&service.key) == Some(&service) {
            return;
        }
        self.touch_selected(self.services.get(&service.key), touched);
        self.touch_selected(Some(&service), touched);
        self.services.insert(service.key.clone(), service);
    }

    fn remove_service(&mut self, key: &ServiceKey, touched: &mut Touched) {
        self.set_service_ports(key, None, touched);
        self.deactivate_service(key, touched);
    }

    fn deactivate_service(&mut self, key: &ServiceKey, touched: &mut Touched) {
        let known = self.services.remove(key);
        self.touch_selected(known.as_ref(), touched);
    }

    fn touch_selected(&self, service: Option<&Service>, touched: &mut Touched) {
        let Some(service) = service else { return };
        let namespace = in_namespace(&self.pods, &service.key.namespace);
        touched.pods.extend(namespace.filter(|pod| service.selects(pod)).map(|pod| pod.key.clone()));
    }
}

/// Whether two versions of a Pod differ only in fields that agents write. A change of these fields affects neither an
/// index of the snapshot nor another Pod.
fn differ_by_writes_only(known: &Pod, pod: &Pod) -> bool {
    let Pod {
        key,
        uid,
        labels,
        is_finished,
        is_terminating,
        host_network,
        ips,
        ports,
        requests,
        resource_version: _,
        annotation: _,
        annotation_manager: _,
        gate: _,
    } = known;
    (key, uid, labels, ips, ports, requests) == (&pod.key, &pod.uid, &pod.labels, &pod.ips, &pod.ports, &pod.requests)
        && (*is_finished, *is_terminating, *host_network) == (pod.is_finished, pod.is_terminating, pod.host_network)
}

/// Returns the objects of one namespace. The namespace is the first sort criterion of the keys.
fn in_namespace<'a, T>(objects: &'a BTreeMap<ObjectKey, T>, namespace: &'a str) -> impl Iterator<Item = &'a T> {
    let first = ObjectKey::new(namespace, "");
    objects.range(first..).take_while(move |(key, _)| &*key.namespace == namespace).map(|(_, object)| object)
}

/// Returns the addresses that only this Pod may have; no address if the Pod has finished or is on the host network.
fn contended_ips(pod: &Pod) -> impl Iterator<Item = IpAddr> {
    let is_contender = !pod.is_finished && !pod.host_network;
    pod.ips.iter().copied().filter(move |_| is_contender)
}

fn host_ports(pod: &Pod) -> impl Iterator<Item = NodePort> {
    pod.ports.iter().filter_map(|port| port.host_port)
}

/// Removes an object from the index entry of a node port. If no object is left in the index entry, removes the index
/// entry.
fn forget(index: &mut BTreeMap<NodePort, BTreeSet<ObjectKey>>, entry: NodePort, object: &ObjectKey) {
    if let Some(objects) = index.get_mut(&entry) {
        objects.remove(object);
        if objects.is_empty() {
            index.remove(&entry);
        }
    }
}
