// SPDX-License-Identifier: Apache-2.0
//! The cluster objects that concern this Node, as the watches last reported them, and which Pods a change affects.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::IpAddr,
};

use super::{Node, NodePort, ObjectKey, Pod, PodKey, PodUid, Protocol, Service, ServiceKey};

/// A change that a watch reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A list of all Pods of this Node; other known Pods are deleted.
    Pods(Vec<Pod>),
    /// A Pod was created or changed.
    Pod(Pod),
    /// A Pod was deleted.
    PodGone(PodKey, PodUid),
    /// A list of all Services that NPL acts on; other known Services are deleted or no longer enabled.
    Services(Vec<Service>),
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
    /// The same change in a cluster without Services.
    pub(in crate::core) fn without_services(self) -> Self {
        match self {
            Self::Services(_) => Self::Services(Vec::new()),
            Self::Service(service) => Self::ServiceGone(service.key),
            other @ (Self::Pods(_)
            | Self::Pod(_)
            | Self::PodGone(..)
            | Self::ServiceGone(_)
            | Self::Node(_)
            | Self::NodeGone) => other,
        }
    }
}

/// The Pods that a change affects.
#[derive(Debug, Default)]
pub(in crate::core) struct Touched {
    /// Pods whose assignment may change.
    pub(in crate::core) pods: BTreeSet<PodKey>,
    /// Pods that were deleted; another Pod may have the same name.
    pub(in crate::core) gone: Vec<(PodKey, PodUid)>,
}

/// The last known state of the cluster. Only Services that NPL acts on are kept.
#[derive(Debug, Default)]
pub(in crate::core) struct Snapshot {
    pods: BTreeMap<PodKey, Pod>,
    services: BTreeMap<ServiceKey, Service>,
    node: Option<Node>,
    pods_listed: bool,
    services_listed: bool,
    by_ip: BTreeMap<IpAddr, BTreeSet<PodKey>>,
    by_host_port: BTreeMap<(NodePort, Protocol), BTreeSet<PodKey>>,
}

impl Snapshot {
    pub(in crate::core) fn apply(&mut self, change: Change) -> Touched {
        let mut touched = Touched::default();
        match change {
            Change::Pods(pods) => self.replace_pods(pods, &mut touched),
            Change::Pod(pod) => self.put_pod(pod, &mut touched),
            Change::PodGone(key, uid) => self.remove_pod(&key, Some(&uid), &mut touched),
            Change::Services(services) => self.replace_services(services, &mut touched),
            Change::Service(service) => self.put_service(service, &mut touched),
            Change::ServiceGone(key) => self.remove_service(&key, &mut touched),
            Change::Node(node) => self.node = Some(node),
            // Mappings stay: the last known addresses still lead to this Node.
            Change::NodeGone => {}
        }
        touched
    }

    /// Whether Pods and Services were listed. Before that, a missing object says nothing.
    pub(in crate::core) const fn is_listed(&self) -> bool {
        self.pods_listed && self.services_listed
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

    /// The Services that select the Pod.
    pub(in crate::core) fn services_of<'a>(&'a self, pod: &'a Pod) -> impl Iterator<Item = &'a Service> {
        in_namespace(&self.services, &pod.key.namespace).filter(move |service| service.selects(pod))
    }

    /// The Pod that an address is attributed to.
    ///
    /// Two Pods have one address only while the kubelet's status of one of them is outdated. A terminating Pod is more
    /// likely to have lost it. Otherwise the uid decides: it never changes, so traffic does not alternate.
    pub(in crate::core) fn holder(&self, ip: IpAddr) -> Option<&Pod> {
        let pods = self.by_ip.get(&ip)?.iter().filter_map(|key| self.pods.get(key));
        pods.min_by_key(|pod| (pod.is_terminating, &pod.uid))
    }

    /// The addresses of Pods that have addresses of their own.
    pub(in crate::core) fn pod_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.by_ip.keys().copied()
    }

    /// Whether a Pod of this Node declares the port as a `hostPort`.
    pub(in crate::core) fn is_host_port(&self, port: NodePort, protocol: Protocol) -> bool {
        self.by_host_port.contains_key(&(port, protocol))
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

    fn put_pod(&mut self, pod: Pod, touched: &mut Touched) {
        if let Some(known) = self.pods.get_mut(&pod.key) {
            if known.resource_version > pod.resource_version {
                return; // An old echo.
            }
            if differ_by_writes_only(known, &pod) {
                // Updated in place: a thousand new allocations between those of a burst would fragment the heap.
                Pod { resource_version: known.resource_version, annotation: known.annotation, gate: known.gate, .. } =
                    pod;
                touched.pods.insert(known.key.clone());
                return;
            }
            let uid = known.uid.clone();
            self.unindex(&pod.key, touched);
            if uid != pod.uid {
                touched.gone.push((pod.key.clone(), uid));
            }
        }
        for ip in contended_ips(&pod) {
            let sharers = self.by_ip.entry(ip).or_default();
            touched.pods.extend(sharers.iter().cloned());
            sharers.insert(pod.key.clone());
        }
        for port in host_ports(&pod) {
            self.by_host_port.entry(port).or_default().insert(pod.key.clone());
        }
        touched.pods.insert(pod.key.clone());
        self.pods.insert(pod.key.clone(), pod);
    }

    /// Removes the Pod of this name, if `uid` is its uid or `None`.
    fn remove_pod(&mut self, key: &PodKey, uid: Option<&PodUid>, touched: &mut Touched) {
        if self.pods.get(key).is_some_and(|known| uid.is_none_or(|uid| known.uid == *uid)) {
            self.unindex(key, touched);
            touched.gone.extend(self.pods.remove(key).map(|pod| (pod.key, pod.uid)));
        }
    }

    fn unindex(&mut self, key: &PodKey, touched: &mut Touched) {
        let Some(pod) = self.pods.get(key) else { return };
        for ip in contended_ips(pod) {
            touched.pods.extend(forget(&mut self.by_ip, &ip, key));
        }
        for port in host_ports(pod) {
            forget(&mut self.by_host_port, &port, key);
        }
    }

    fn replace_services(&mut self, services: Vec<Service>, touched: &mut Touched) {
        self.services_listed = true;
        let mut former = mem::take(&mut self.services);
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
        if !service.is_active() {
            return self.remove_service(&service.key, touched);
        }
        if self.services.get(&service.key) == Some(&service) {
            return;
        }
        self.touch_selected(self.services.get(&service.key), touched);
        self.touch_selected(Some(&service), touched);
        self.services.insert(service.key.clone(), service);
    }

    fn remove_service(&mut self, key: &ServiceKey, touched: &mut Touched) {
        let known = self.services.remove(key);
        self.touch_selected(known.as_ref(), touched);
    }

    fn touch_selected(&self, service: Option<&Service>, touched: &mut Touched) {
        let Some(service) = service else { return };
        let namespace = in_namespace(&self.pods, &service.key.namespace);
        touched.pods.extend(namespace.filter(|pod| service.selects(pod)).map(|pod| pod.key.clone()));
    }
}

/// Whether only fields that agents write have changed: these affect no index and no other Pod.
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
        resource_version: _,
        annotation: _,
        gate: _,
    } = known;
    (key, uid, labels, ips, ports) == (&pod.key, &pod.uid, &pod.labels, &pod.ips, &pod.ports)
        && (*is_finished, *is_terminating, *host_network) == (pod.is_finished, pod.is_terminating, pod.host_network)
}

/// The objects of a namespace; keys are ordered by namespace first.
fn in_namespace<'a, T>(objects: &'a BTreeMap<ObjectKey, T>, namespace: &'a str) -> impl Iterator<Item = &'a T> {
    let first = ObjectKey::new(namespace, "");
    objects.range(first..).take_while(move |(key, _)| &*key.namespace == namespace).map(|(_, object)| object)
}

/// The addresses that a Pod needs exclusively.
fn contended_ips(pod: &Pod) -> impl Iterator<Item = IpAddr> {
    let is_contender = !pod.is_finished && !pod.host_network;
    pod.ips.iter().copied().filter(move |_| is_contender)
}

fn host_ports(pod: &Pod) -> impl Iterator<Item = (NodePort, Protocol)> {
    pod.ports.iter().filter_map(|port| Some((port.host_port?, port.protocol)))
}

/// Removes a Pod from an index entry, and returns the remaining Pods of the entry.
fn forget<K: Ord>(index: &mut BTreeMap<K, BTreeSet<PodKey>>, entry: &K, pod: &PodKey) -> BTreeSet<PodKey> {
    let Some(pods) = index.get_mut(entry) else { return BTreeSet::new() };
    pods.remove(pod);
    let left = pods.clone();
    if left.is_empty() {
        index.remove(entry);
    }
    left
}
