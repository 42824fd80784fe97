// SPDX-License-Identifier: Apache-2.0
//! Lists and counts the allocated node ports, for tables, logs and metrics.

use super::PlannerState;
use crate::core::{
    model::{Backend, Family, Frontend, PodKey, PodPort, Protocol},
    ports::{Phase, PortUsage},
};

/// An allocated node port, with its mapping and its Pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappingView<'a> {
    /// The family, node port and protocol.
    pub frontend: Frontend,
    /// The desired backend of the mapping; `None` if the node port should have no mapping.
    pub backend: Option<Backend>,
    /// The Pod to which the node port is allocated; `None` if the agent does not know the Pod.
    pub pod: Option<&'a PodKey>,
    /// The Pod's port; `None` if the agent does not know the Pod.
    pub pod_port: Option<PodPort>,
    /// The phase of the node port's claim.
    pub phase: Phase,
}

impl PlannerState {
    /// Returns all allocated node ports.
    pub fn mappings(&self) -> impl Iterator<Item = MappingView<'_>> {
        self.ports.iter().map(|(frontend, claim)| MappingView {
            frontend: *frontend,
            backend: claim.backend,
            pod: claim.owner.as_ref().map(|owner| &owner.pod),
            pod_port: claim.owner.as_ref().map(|owner| owner.port.pod_port),
            phase: claim.phase,
        })
    }

    /// Returns the number of mappings that should translate packets. Quarantined node ports, and node ports of a Pod
    /// without an address, should have no mapping.
    pub fn mapping_count(&self, family: Family) -> usize {
        let of_family = self.ports.iter().filter(|(frontend, _)| frontend.family == family);
        of_family.filter(|(_, claim)| claim.is_in_use() && claim.backend.is_some()).count()
    }

    /// Returns the Pod to which a node port is allocated; `None` if the agent does not know the Pod.
    pub fn pod_of(&self, frontend: Frontend) -> Option<&PodKey> {
        self.ports.get(frontend)?.owner.as_ref().map(|owner| &owner.pod)
    }

    /// The number of node ports in each phase for one IP family, by protocol.
    pub fn port_usages(&self, family: Family) -> impl Iterator<Item = (Protocol, PortUsage)> {
        self.settings.protocols.iter().map(move |protocol| (*protocol, self.ports.usage(family, *protocol)))
    }
}
