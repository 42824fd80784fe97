// SPDX-License-Identifier: Apache-2.0
//! Builds the views of node ports, port usage and problems from the planner's state.

use std::borrow::Cow;

use super::{AnnotatedPort, NodePortView, PortState, PortUsageView, RefusalView};
use crate::core::{
    model::{Family, Frontend, Moment, Pod, PodKey, settings::PortRange},
    ports::{
        Claim, Phase, PortUsage,
        select::{Exposure, WantedPort, requests},
    },
    publish::{
        annotation::{self, PublishedEntry},
        problem::{AffectedObject, Problem},
    },
    state::PlannerState,
};

impl PlannerState {
    /// Returns all node ports that are in use, draining or quarantined, followed by the host ports that are published
    /// in place of mappings.
    pub fn node_port_views(&self, now: Moment) -> Vec<NodePortView> {
        let held = self.ports.iter().map(|(frontend, claim)| self.held_view(*frontend, claim, now));
        let pods = self.snapshot.pods();
        held.chain(pods.flat_map(|pod| self.host_port_views(pod))).collect()
    }

    /// Returns the node ports that the annotations of Pods name, except those of finished Pods, which have no traffic.
    pub fn annotated_ports(&self) -> Vec<AnnotatedPort> {
        let pods = self.snapshot.pods().filter(|pod| !pod.is_finished);
        let of_pod = |pod: &Pod| {
            let entries = pod.annotation.as_deref().map(annotation::published).unwrap_or_default();
            let ports = entries.into_iter().filter_map(|PublishedEntry { node_ip, seen }| {
                Some(AnnotatedPort {
                    namespace: pod.key.namespace.to_string(),
                    pod: pod.key.name.to_string(),
                    node_ip: node_ip?,
                    frontend: Frontend { family: seen.family, node_port: seen.node_port, protocol: seen.protocol },
                    pod_ip: pod.ip_of(seen.family),
                    pod_port: seen.pod_port,
                })
            });
            ports.collect::<Vec<_>>()
        };
        pods.flat_map(of_pod).collect()
    }

    /// Returns the usage of the port range by each IP family and protocol.
    pub fn port_usage_views(&self) -> Vec<PortUsageView> {
        let of_family = |family| {
            self.port_usages(family).map(move |(protocol, PortUsage { active, draining, quarantined, free })| {
                PortUsageView { family, protocol, used: active, draining, quarantined, free }
            })
        };
        Family::ALL.into_iter().flat_map(of_family).collect()
    }

    /// Returns all problems, with the reasons and texts of the Events about these problems.
    pub fn refusal_views(&self) -> Vec<RefusalView> {
        let view = |problem: Cow<'_, Problem>| {
            let (kind, key) = match &problem.subject {
                AffectedObject::Pod(key, _) => ("pod", key),
                AffectedObject::Service(key, _) => ("service", key),
            };
            RefusalView {
                kind: kind.to_owned(),
                namespace: key.namespace.to_string(),
                name: key.name.to_string(),
                reason: problem.reason().to_owned(),
                is_served: problem.event_reason().leaves_all_ports_served(),
                text: problem.cause.to_string(),
            }
        };
        self.problems().map(view).collect()
    }

    /// Returns the time in milliseconds since a write became necessary, for each Pod whose annotation or readiness
    /// condition may need a write, or whose write is not confirmed yet. The time is 0 if no time is recorded.
    pub fn unpublished_millis(&self, now: Moment) -> Vec<u64> {
        let needs_write = |pod: &&Pod| self.unpublished.contains(&pod.key) || self.writes.contains_key(&pod.uid);
        let since = |pod: &Pod| self.needs_write_since.get(&pod.uid).copied().unwrap_or(now);
        self.snapshot.pods().filter(needs_write).map(|pod| now.0.saturating_sub(since(pod).0)).collect()
    }

    /// The value of `--port-range`.
    pub const fn port_range(&self) -> PortRange {
        self.settings.port_range
    }

    /// Returns the state of the node port that a claim holds.
    pub(in crate::core) fn port_state(&self, frontend: Frontend, claim: &Claim) -> PortState {
        let is_named = || {
            let view = claim.owner.as_ref().and_then(|owner| self.views.get(&owner.pod));
            view.is_some_and(|view| view.named.contains(&frontend))
        };
        match claim.phase {
            Phase::Active if !self.mapping_is_current(frontend) => PortState::Reserved,
            Phase::Active if is_named() => PortState::Published,
            Phase::Active => PortState::Live,
            Phase::Draining { .. } => PortState::Draining,
            Phase::Quarantined { .. } => PortState::Quarantined,
        }
    }

    fn held_view(&self, frontend: Frontend, claim: &Claim, now: Moment) -> NodePortView {
        let owner = claim.owner.as_ref();
        let ends = match claim.phase {
            Phase::Active => None,
            Phase::Draining { until } | Phase::Quarantined { until } => until,
        };
        let services = owner.map(|owner| self.services_requesting(&owner.pod, owner.port)).unwrap_or_default();
        NodePortView {
            frontend,
            state: self.port_state(frontend, claim),
            namespace: owner.map(|owner| owner.pod.namespace.to_string()),
            pod: owner.map(|owner| owner.pod.name.to_string()),
            pod_port: owner.map(|owner| owner.port.pod_port),
            pod_ip: claim.backend.map(|backend| backend.pod_ip),
            services,
            age_millis: claim.allocated.map(|at| now.0.saturating_sub(at.0)),
            ends_in_millis: ends.map(|at| at.0.saturating_sub(now.0)),
        }
    }

    fn host_port_views<'a>(&'a self, pod: &'a Pod) -> impl Iterator<Item = NodePortView> + 'a {
        let wanted = self.views.get(&pod.key).map(|view| &view.wanted.ports);
        wanted.into_iter().flatten().filter_map(move |(port, exposure)| {
            let node_port = match exposure {
                Exposure::HostPort(node_port) => *node_port,
                Exposure::Mapping | Exposure::Pending => return None,
            };
            Some(NodePortView {
                frontend: Frontend { family: port.family, node_port, protocol: port.protocol },
                state: PortState::HostPort,
                namespace: Some(pod.key.namespace.to_string()),
                pod: Some(pod.key.name.to_string()),
                pod_port: Some(port.pod_port),
                pod_ip: pod.ip_of(port.family),
                services: self.services_requesting(&pod.key, *port),
                age_millis: None,
                ends_in_millis: None,
            })
        })
    }

    /// Returns the names of the Services that request this port of the Pod.
    pub(in crate::core) fn services_requesting(&self, pod: &PodKey, port: WantedPort) -> Vec<String> {
        let Some(pod) = self.snapshot.pod(pod) else { return Vec::new() };
        let services = self.snapshot.services_of(pod).filter(|service| requests(service, pod, port));
        services.map(|service| service.key.name.to_string()).collect()
    }
}
