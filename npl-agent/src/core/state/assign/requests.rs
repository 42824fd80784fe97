// SPDX-License-Identifier: Apache-2.0
//! The node ports that a Pod requests: which request applies to a Pod port, and why a request is refused.

use super::Assignment;
use crate::core::{
    model::{Frontend, NodePort},
    ports::{request::Request, select::WantedPort},
    publish::{
        problem::Cause,
        request_problem::{Obstacle, RequestProblem},
    },
};

impl Assignment<'_> {
    /// Returns the node port that is requested for a Pod port. With `--protocol-pairing=merged`, the request of
    /// the first protocol applies to all protocols of the Pod port.
    pub(super) fn requested(&self, port: WantedPort) -> Option<NodePort> {
        if self.pod.requests.is_empty() {
            return None;
        }
        let mut protocols = self.group(port);
        protocols.sort_unstable();
        protocols.into_iter().find_map(|protocol| self.own_request(WantedPort { protocol, ..port }))
    }

    /// Returns the node port that the annotation requests for a Pod port and protocol.
    fn own_request(&self, port: WantedPort) -> Option<NodePort> {
        let requests = Some(&self.pod.requests).filter(|_| self.settings.requested_node_ports);
        requests?.of(port.pod_port, port.protocol)
    }

    /// Returns the requested node port of a Pod port if the Pod port can get this node port.
    pub(super) fn free_requested(&self, port: WantedPort) -> Option<Frontend> {
        let node_port = self.requested(port).filter(|node_port| self.obstacle(port, *node_port).is_none())?;
        Some(Frontend { family: port.family, node_port, protocol: port.protocol })
    }

    fn obstacle(&self, port: WantedPort, node_port: NodePort) -> Option<Obstacle> {
        let WantedPort { pod_port, family, .. } = port;
        if let Some((service, _)) = self.snapshot.service_with_port(node_port) {
            return Some(Obstacle::Service(service.clone()));
        }
        if self.snapshot.is_host_port(node_port) {
            return Some(Obstacle::HostPort);
        }
        let request = Request { uid: &self.pod.uid, pod_port, family, protocols: &self.group(port), node_port };
        self.ports.obstacle(request, self.settings.quarantine_millis, self.now)
    }

    /// Reports a problem if a Pod port has another node port than the requested one. The claim keeps the reason, so
    /// that the text of the problem does not change while the Pod port has this node port.
    pub(super) fn check_request(&mut self, port: WantedPort, given: Frontend) {
        let Some(node_port) = self.own_request(port).filter(|node_port| *node_port != given.node_port) else { return };
        let obstacle = match self.requested(port) {
            Some(other) if other != node_port => Obstacle::OtherProtocol(other),
            _ => self.obstacle(port, node_port).unwrap_or(Obstacle::Allocated),
        };
        let Some(claim) = self.ports.get_mut(given) else { return };
        let known = claim.refused.take().filter(|(refused, _)| *refused == node_port);
        let (_, obstacle) = claim.refused.insert(known.unwrap_or((node_port, obstacle))).clone();
        self.refuse(port, node_port, obstacle);
    }

    /// Reports a problem if a node port is requested for a Pod port that a host port exposes.
    pub(super) fn check_request_of_host_port(&mut self, port: WantedPort, host_port: NodePort) {
        if let Some(node_port) = self.own_request(port).filter(|node_port| *node_port != host_port) {
            self.refuse(port, node_port, Obstacle::Exposed(host_port));
        }
    }

    /// Reports a problem if requests are not permitted, or if an entry of the annotation is faulty. The requests of a
    /// Pod that no Service selects have no effect, and are not reported.
    pub(super) fn check_annotation(&mut self) {
        let requests = &self.pod.requests;
        let problem = match requests.fault() {
            _ if self.wanted.ports.is_empty() || requests.is_empty() => return,
            _ if !self.settings.requested_node_ports => RequestProblem::Disabled,
            Some(fault) => RequestProblem::Faulty(fault.clone()),
            None => return,
        };
        self.blame(Cause::NodePortRequest(problem));
    }

    fn refuse(&mut self, port: WantedPort, node_port: NodePort, obstacle: Obstacle) {
        let WantedPort { pod_port, protocol, .. } = port;
        self.blame(Cause::NodePortRequest(RequestProblem::Refused { pod_port, protocol, node_port, obstacle }));
    }
}
