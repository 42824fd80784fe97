// SPDX-License-Identifier: Apache-2.0
//! Adopts the state that an earlier agent left: a restarted agent adopts existing mappings first, then the node ports
//! that annotations name. The agent also continues the quarantine of ports that an earlier agent unmapped.

use std::collections::BTreeMap;

use crate::core::{
    model::{
        Backend, Frontend, Moment, NodePort, Pod,
        snapshot::{ClaimEvidence, Snapshot},
    },
    op::{Op, RecentTraffic, RetryKey},
    ports::{
        Claim, Owner, Phase,
        select::{Exposure, Selector, WantedPort},
    },
    publish::annotation,
    state::PlannerState,
};

impl PlannerState {
    /// Continues the quarantine of node ports that an earlier agent unmapped. `ages` contains, for each port, the
    /// milliseconds since an earlier agent unmapped the port, or since the unmapped port last received a packet. The
    /// caller calls this function once, before the first pass.
    pub fn resume_quarantine(&mut self, ages: impl IntoIterator<Item = (NodePort, u64)>, now: Moment) {
        for (node_port, age) in ages {
            if let Some(rest @ 1..) = self.settings.quarantine_millis.checked_sub(age) {
                self.ports.quarantine(node_port, now.plus(rest));
            }
        }
    }
}

/// Returns the operations that reserve the ports of existing mappings. The agent does so while it waits for the API
/// server, because reserving a thousand ports takes a long time.
pub(in crate::core) fn reservations(state: &PlannerState, now: Moment) -> Vec<Op> {
    let Some(observed) = &state.observed else { return Vec::new() };
    let is_held = |frontend: &Frontend| observed.reservations.contains(frontend) || state.ports.is_taken(*frontend);
    let missing = observed.mappings.keys().filter(|frontend| !is_held(frontend));
    let is_due = |op: &Op| !state.is_delayed(&RetryKey::of(op), now);
    missing.map(|frontend| Op::Reserve(*frontend, RecentTraffic::Tolerated)).filter(is_due).collect()
}

/// Assigns every existing mapping to its Pod, and reserves for every Pod the free node ports that the Pod's annotation
/// names. A named node port that the Pod no longer needs is quarantined, because load balancers use the port until the
/// annotation is withdrawn.
///
/// Adoption runs once, when all lists are complete. A Pod that is created later may already have an annotation. This
/// annotation comes from the Pod's template, and the agent does not reserve the node ports in it.
pub(in crate::core) fn adopt(state: &mut PlannerState) {
    order_address_claims(state);
    adopt_mappings(state);
    adopt_annotations(state);
    state.ports.place_cursor();
    state.dirty.extend(state.snapshot.pods().map(|pod| pod.key.clone()));
}

fn by_generation(snapshot: &Snapshot) -> BTreeMap<u32, Vec<&Pod>> {
    let mut pods: BTreeMap<u32, Vec<&Pod>> = BTreeMap::new();
    for pod in snapshot.pods() {
        pods.entry(pod.uid.generation()).or_default().push(pod);
    }
    pods
}

/// Orders the claims of Pods with the same address by the existing mappings. A Pod whose mapping points to the address
/// takes precedence over a Pod without a mapping. A Pod whose mappings all point to its former address takes precedence
/// over both: this Pod got the address after the earlier agent wrote the mappings.
fn order_address_claims(state: &mut PlannerState) {
    let Some(observed) = &state.observed else { return };
    let pods = by_generation(&state.snapshot);
    let mut evidence = BTreeMap::new();
    for (frontend, backend) in &observed.mappings {
        for pod in pods.get(&backend.generation).into_iter().flatten() {
            let Some(ip) = pod.ip_of(frontend.family) else { continue };
            let found = if ip == backend.pod_ip { ClaimEvidence::Mapped } else { ClaimEvidence::Moved };
            let known = evidence.entry((ip, pod.key.clone())).or_insert(found);
            *known = found.min(*known);
        }
    }
    state.snapshot.order_claims(&evidence);
}

fn adopt_mappings(state: &mut PlannerState) {
    let Some(observed) = &state.observed else { return };
    let pods = by_generation(&state.snapshot);
    for (frontend, backend) in &observed.mappings {
        let candidates = pods.get(&backend.generation).map_or(&[][..], Vec::as_slice);
        let claim = owner_of(candidates, *frontend, *backend).map_or_else(Claim::orphan, |owner| Claim {
            backend: Some(*backend),
            // The claim keeps the allowed sources of the existing mapping until a Service that requests the Pod port
            // changes the sources. If no Service requests the Pod port any more, the mapping drains with these sources.
            sources: observed.sources_of(*frontend, *backend),
            was_mapped: true,
            ..Claim::new(owner)
        });
        state.ports.insert(*frontend, claim);
        state.unsettled.insert(*frontend);
    }
    resolve_duplicates(state);
}

/// Returns the owner of a mapping: the Pod with the mapping's generation; if several Pods have this generation, the Pod
/// with the mapping's address.
fn owner_of(candidates: &[&Pod], frontend: Frontend, backend: Backend) -> Option<Owner> {
    let pod = candidates.iter().min_by_key(|pod| (!pod.ips.contains(&backend.pod_ip), &pod.uid))?;
    let Frontend { family, protocol, .. } = frontend;
    let port = WantedPort { pod_port: backend.pod_port, protocol, family };
    Some(Owner { pod: pod.key.clone(), uid: pod.uid.clone(), port })
}

/// Keeps one mapping for each Pod port and drains the rest. A Pod port has several mappings if the Pod port was moving
/// to a new node port when the earlier agent exited. Prefers a mapping that may keep its node port, then a mapping that
/// the annotation names.
fn resolve_duplicates(state: &mut PlannerState) {
    for pod in state.snapshot.pods() {
        let named = annotation::named_by(pod);
        let mut settled: BTreeMap<WantedPort, Frontend> = BTreeMap::new();
        let mut claims = state.ports.of_pod(&pod.uid);
        claims.sort_by_key(|(port, frontend)| {
            let is_named = named.iter().any(|entry| entry.frontend() == *frontend);
            (!state.ports.is_well_placed(*frontend), !is_named, *port, *frontend)
        });
        for (port, frontend) in claims {
            if *settled.entry(port).or_insert(frontend) != frontend
                && let Some(claim) = state.ports.get_mut(frontend)
            {
                claim.drain();
            }
        }
    }
}

fn adopt_annotations(state: &mut PlannerState) {
    let selector = Selector {
        settings: &state.settings,
        snapshot: &state.snapshot,
        node_ips: &state.node_ips,
        on_node_network: &state.on_node_network,
    };
    for pod in state.snapshot.pods() {
        let wanted = selector.wanted(pod);
        for entry in annotation::named_by(pod) {
            let port = WantedPort { pod_port: entry.pod_port, protocol: entry.protocol, family: entry.family };
            let frontend = entry.frontend();
            let needs_claim = wanted.ports.get(&port).copied().is_some_and(Exposure::needs_claim);
            let is_free =
                state.ports.is_free_for(frontend, &pod.uid) && !state.snapshot.is_used_by_others(entry.node_port);
            if !is_free || pod.host_network {
                continue;
            }
            let is_held = state.ports.of_port(&pod.uid, port).into_iter().any(|held| state.ports.is_active(held));
            let phase = if needs_claim && !is_held { Phase::Active } else { Phase::Quarantined { until: None } };
            let owner = Owner { pod: pod.key.clone(), uid: pod.uid.clone(), port };
            state.ports.insert(frontend, Claim { was_mapped: true, phase, ..Claim::new(owner) });
            state.unsettled.insert(frontend);
        }
    }
}
