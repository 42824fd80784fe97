// SPDX-License-Identifier: Apache-2.0
//! Views of the allocated node ports, for tables, logs and metrics.

use super::PlannerState;
use crate::core::{
    model::{Backend, Family, Frontend, PodKey, PodPort, Protocol},
    ports::{Phase, PortUsage},
};

/// An allocated node port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappingView<'a> {
    /// The frontend.
    pub frontend: Frontend,
    /// The backend of the mapping; `None` while there is no mapping.
    pub backend: Option<Backend>,
    /// The Pod; `None` if the agent does not know the Pod.
    pub pod: Option<&'a PodKey>,
    /// The Pod's port; `None` if the agent does not know the port.
    pub pod_port: Option<PodPort>,
    /// The phase of the node port's claim.
    pub phase: Phase,
}

impl PlannerState {
    /// All allocated node ports.
    pub fn mappings(&self) -> impl Iterator<Item = MappingView<'_>> {
        self.ports.iter().map(|(frontend, claim)| MappingView {
            frontend: *frontend,
            backend: claim.backend,
            pod: claim.owner.as_ref().map(|owner| &owner.pod),
            pod_port: claim.owner.as_ref().map(|owner| owner.port.pod_port),
            phase: claim.phase,
        })
    }

    /// The number of mappings that should translate. A quarantined port has no mapping, and neither has a port of a Pod
    /// without an address.
    pub fn mapping_count(&self, family: Family) -> usize {
        let of_family = self.ports.iter().filter(|(frontend, _)| frontend.family == family);
        of_family.filter(|(_, claim)| claim.is_in_use() && claim.backend.is_some()).count()
    }

    /// The Pod to which a node port is allocated; `None` if the Pod is not known.
    pub fn pod_of(&self, frontend: Frontend) -> Option<&PodKey> {
        self.ports.get(frontend)?.owner.as_ref().map(|owner| &owner.pod)
    }

    /// The use of the port range for one family, by protocol.
    pub fn port_usages(&self, family: Family) -> impl Iterator<Item = (Protocol, PortUsage)> {
        self.settings.protocols.iter().map(move |protocol| (*protocol, self.ports.usage(family, *protocol)))
    }
}
