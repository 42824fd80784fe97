// SPDX-License-Identifier: Apache-2.0
//! Answers commands that ask for the agent's state through the local socket.

use tokio::sync::mpsc;

use crate::{
    core::{
        model::Moment,
        state::PlannerState,
        view::{AgentView, DeviceView},
        why::explain,
    },
    devices::uplinks::DeviceReport,
    http::Health,
    kube::{confinement::ConfinementResult, contacts::WatchContacts},
    local::Request,
};

/// Receives the requests that commands send to the agent, and stores those parts of the answers that the core's state
/// does not contain.
#[derive(Debug)]
pub struct Introspection {
    /// The requests that commands send to the local socket.
    requests: mpsc::Receiver<Request>,
    /// For each watch of the API server: the time of the last answer, and the current failure.
    contacts: WatchContacts,
    /// Whether an admission policy restricts what the agent may write to Pods.
    confinement: ConfinementResult,
    node_name: String,
    /// The devices to which the programs are or should be attached, according to the last survey of the network.
    pub(super) devices: Vec<DeviceView>,
    /// Whether NPL's programs are attached to at least one device through which clients reach the Node.
    pub(super) reaches_clients: bool,
    /// The names of devices on which only the programs of an earlier agent translate packets.
    pub(super) former_programs_on: Vec<String>,
}

impl Introspection {
    /// Creates an introspection without devices. The main loop adds the Node's devices after the first survey of the
    /// network.
    pub const fn new(
        requests: mpsc::Receiver<Request>,
        contacts: WatchContacts,
        confinement: ConfinementResult,
        node_name: String,
    ) -> Self {
        Self {
            requests,
            contacts,
            confinement,
            node_name,
            devices: Vec::new(),
            reaches_clients: false,
            former_programs_on: Vec::new(),
        }
    }

    /// Waits for the next request of a command. The future stays pending if the local socket could not be opened.
    pub(super) async fn next_request(&mut self) -> Request {
        match self.requests.recv().await {
            Some(request) => request,
            None => std::future::pending().await,
        }
    }

    /// Sends the answer to a request. If the command has ended in the meantime, the answer is discarded.
    pub(super) fn answer(&self, request: Request, state: &PlannerState, health: &Health, now: Moment, pending: usize) {
        match request {
            Request::State(reply) => drop(reply.send(self.view(state, health, now, pending))),
            Request::Why(question, reply) => {
                let view = self.view(state, health, now, pending);
                drop(reply.send(explain(state, &view, &question)));
            }
        }
    }

    fn view(&self, state: &PlannerState, health: &Health, now: Moment, pending_patches: usize) -> AgentView {
        let unpublished_millis = state.unpublished_millis(now);
        AgentView {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node_name: self.node_name.clone(),
            uptime_millis: now.0,
            is_ready: health.is_ready(),
            is_retiring: state.is_retiring(),
            waits_for: state.missing_prerequisites().iter().map(ToString::to_string).collect(),
            node_addresses: state.node_ips().collect(),
            port_range: state.port_range().to_string(),
            watches: self.contacts.views(),
            is_confined: self.confinement.is_confined(),
            devices: self.devices.clone(),
            reaches_clients: self.reaches_clients,
            former_programs_on: self.former_programs_on.clone(),
            retirement_waits_for: state.left_to_retire().values().cloned().collect(),
            node_ports: state.node_port_views(now),
            annotated_ports: state.annotated_ports(),
            port_usage: state.port_usage_views(),
            refusals: state.refusal_views(),
            pending_patches,
            unpublished_pods: unpublished_millis.len(),
            unpublished_millis,
        }
    }
}

/// The devices to which the programs are or should be attached, each with the reason why the programs are or are not
/// attached.
pub(super) fn device_views(report: &DeviceReport) -> Vec<DeviceView> {
    let uplinks = report.decisions.uplinks.iter().filter_map(|(name, decision)| {
        let (is_attached, reason) = match decision {
            Ok(_) if !report.xdp.contains_key(name) => (false, "the kernel refuses the programs: see the agent's log"),
            Ok(reason) => (true, reason.as_str()),
            Err(reason) if reason.is_unsupported() => (false, reason.as_str()),
            Err(_) => return None,
        };
        Some(DeviceView { name: name.clone(), is_attached, reason: reason.to_owned() })
    });
    let missing = report.decisions.missing_devices.iter().map(|name| DeviceView {
        name: name.clone(),
        is_attached: false,
        reason: "named by --devices, but the device does not exist".to_owned(),
    });
    uplinks.chain(missing).collect()
}
