// SPDX-License-Identifier: Apache-2.0
//! Plans the operations of one pass: expires timers and advances the phases of claims; then plans at most one operation
//! for each frontend; finally plans the writes of annotations and readiness gates.

use std::collections::BTreeSet;

use super::{Pass, PlannerState};
use crate::core::{
    model::{Family, Frontend, Moment, NodePort, PodUid, Protocol, sources::SourceRange},
    op::{Op, RetryKey},
    ports::Phase,
};

/// A lower bound of all frontends in the sort order.
const FIRST_FRONTEND: Frontend = Frontend { family: Family::V4, node_port: NodePort(0), protocol: Protocol::Tcp };

/// The action that a frontend needs next.
enum Step {
    /// The frontend needs no operation until a Pod, a Service or the observed state changes.
    Settled,
    /// The frontend needs no operation until a timer fires.
    Waiting,
    /// The frontend needs this operation now.
    Needs(Op),
}

/// The difference between the allowed sources in the kernel and the desired allowed sources.
#[derive(Default)]
struct SourceDifference {
    missing: BTreeSet<SourceRange>,
    excess: BTreeSet<SourceRange>,
}

impl PlannerState {
    /// Plans one pass. The time that a pass takes depends on the number of changed Pods and claims, and not on the
    /// number of all Pods.
    pub(in crate::core) fn plan(&mut self, now: Moment) -> Pass {
        self.expire(now);
        // The loop repeats both steps, because a node port that becomes free may be assigned to a waiting Pod.
        loop {
            self.assign_dirty(now);
            self.advance(now);
            if self.dirty.is_empty() {
                break;
            }
        }
        let mut ops = self.plan_frontends(now);
        let blocked = self.owners_of(&ops);
        ops.extend(self.plan_annotations(&blocked, now));
        // The sort is stable: operations of equal rank keep the order of their frontends and Pods.
        ops.sort_by_key(Op::rank);
        Pass { ops, next_deadline: self.next_deadline(now) }
    }

    pub(in crate::core) fn is_delayed(&self, key: &RetryKey, now: Moment) -> bool {
        self.retries.get(key).is_some_and(|at| *at > now)
    }

    fn expire(&mut self, now: Moment) {
        self.retries.retain(|_, at| *at > now);
        self.contests.expire(now);
        let later = self.timers.split_off(&(now.plus(1), FIRST_FRONTEND));
        let due = std::mem::replace(&mut self.timers, later);
        self.unsettled.extend(due.into_iter().map(|(_, frontend)| frontend));
        let (released, may_allocate) = self.ports.expire(now);
        self.unsettled.extend(released);
        if may_allocate {
            self.retry_waiting_for_port();
        }
    }

    /// Advances the phase of every changed claim.
    fn advance(&mut self, now: Moment) {
        let unsettled: Vec<_> = self.unsettled.iter().copied().collect();
        for frontend in unsettled {
            let Some(phase) = self.ports.get(frontend).map(|claim| claim.phase) else { continue };
            match self.next_phase(frontend, phase, now) {
                Some(next) if next == phase => {}
                Some(next) => {
                    if let Some(claim) = self.ports.get_mut(frontend) {
                        claim.phase = next;
                        if !claim.is_in_use() {
                            claim.backend = None;
                            self.retry_waiting_for_port();
                        }
                    }
                }
                None => {
                    self.touch(frontend);
                    self.ports.remove(frontend);
                    self.retry_waiting_for_port();
                }
            }
        }
    }

    /// Returns the phase that the claim has at time `now`; `None` if the claim ends.
    fn next_phase(&self, frontend: Frontend, phase: Phase, now: Moment) -> Option<Phase> {
        let claim = self.ports.get(frontend)?;
        let observed = self.observed.as_ref()?;
        let is_mapped = observed.mappings.contains_key(&frontend);
        let is_named = claim.owner.as_ref().is_some_and(|owner| self.may_be_named(owner, frontend));
        match phase {
            Phase::Active => Some(phase),
            // The node port was never mapped, so no client can know the node port.
            Phase::Draining { .. } | Phase::Quarantined { until: None } if !claim.was_mapped && !is_mapped => {
                Some(Phase::Quarantined { until: Some(now) })
            }
            Phase::Draining { .. } if is_named => Some(Phase::Draining { until: None }),
            Phase::Draining { until } => {
                let until = until.unwrap_or_else(|| now.plus(self.settings.drain_millis));
                let is_over = until <= now;
                Some(if is_over { Phase::Quarantined { until: None } } else { Phase::Draining { until: Some(until) } })
            }
            Phase::Quarantined { .. } if is_mapped || (is_named && claim.was_mapped) => {
                Some(Phase::Quarantined { until: None })
            }
            Phase::Quarantined { until: None } => {
                Some(Phase::Quarantined { until: Some(now.plus(self.settings.quarantine_millis)) })
            }
            Phase::Quarantined { until: Some(until) } => {
                let is_held = observed.reservations.contains(&frontend) || observed.sources.contains_key(&frontend);
                let is_over = until <= now && !is_held;
                (!is_over).then_some(phase)
            }
        }
    }

    fn plan_frontends(&mut self, now: Moment) -> Vec<Op> {
        let mut ops = Vec::new();
        for frontend in std::mem::take(&mut self.unsettled) {
            match self.step(frontend, now) {
                Step::Settled => continue,
                Step::Waiting => {
                    self.wait_for_timer(frontend, now);
                    continue;
                }
                Step::Needs(op) if self.is_delayed(&RetryKey::of(&op), now) => {}
                Step::Needs(op) => {
                    if let (Op::UpsertMapping(..), Some(claim)) = (&op, self.ports.get_mut(frontend)) {
                        claim.was_mapped = true;
                    }
                    ops.push(op);
                }
            }
            self.unsettled.insert(frontend);
        }
        ops
    }

    /// Sets a timer for a frontend whose phase has a deadline. A frontend without a deadline needs no timer: the
    /// planner examines the frontend again when the frontend or the annotation of its Pod changes.
    fn wait_for_timer(&mut self, frontend: Frontend, now: Moment) {
        match self.ports.get(frontend).map(|claim| claim.phase) {
            Some(Phase::Draining { until: Some(at) } | Phase::Quarantined { until: Some(at) }) if at > now => {
                self.timers.insert((at, frontend));
            }
            Some(Phase::Active | Phase::Draining { .. } | Phase::Quarantined { .. }) | None => {}
        }
    }

    fn step(&self, frontend: Frontend, now: Moment) -> Step {
        let Some(observed) = &self.observed else { return Step::Waiting };
        let mapping = observed.mappings.get(&frontend);
        let is_reserved = observed.reservations.contains(&frontend);
        let claim = self.ports.get(frontend);
        let backend = claim.and_then(|claim| claim.backend);
        let is_over = match claim.map(|claim| claim.phase) {
            None => true,
            Some(Phase::Quarantined { until: Some(until) }) => until <= now,
            Some(Phase::Active | Phase::Draining { .. } | Phase::Quarantined { until: None }) => false,
        };
        // If a mapping points to the wrong Pod and another process uses the node port, the agent cannot correct the
        // mapping, and removes it.
        let mapping_is_current = self.mapping_is_current(frontend);
        let is_taken = self.ports.is_taken(frontend);
        let is_wrong = backend.is_none() || self.is_lost(frontend);
        if mapping.is_some() && is_wrong {
            return Step::Needs(Op::RemoveMapping(frontend));
        }
        let SourceDifference { missing, excess } = self.source_difference(frontend);
        let is_restricted = mapping.is_some_and(|mapping| mapping.is_restricted);
        if !is_restricted && !excess.is_empty() {
            // The current mapping is unrestricted, so these sources have no effect on the mapping. These sources would
            // be allowed, however, if the frontend's mapping became restricted again.
            return Step::Needs(Op::ForgetSources(frontend, excess));
        }
        match (is_over, is_reserved) {
            (true, true) => return Step::Needs(Op::Release(frontend)),
            (true, false) => return Step::Settled,
            (false, false) if !is_taken => {
                return Step::Needs(Op::Reserve(frontend, self.ports.recent_traffic_policy(frontend)));
            }
            (false, false) if !mapping_is_current => return Step::Waiting,
            (false, false | true) => {}
        }
        let add = || Op::AllowSources(frontend, missing.clone());
        // If the kernel's map is full, the mapping is written without the missing sources, and the programs drop
        // packets of clients with these sources.
        let may_add = !missing.is_empty() && !self.is_delayed(&RetryKey::AllowSources(frontend), now);
        match backend {
            Some(_) if may_add => Step::Needs(add()),
            Some(backend) if mapping != Some(&backend) => Step::Needs(Op::UpsertMapping(frontend, backend)),
            Some(_) if !excess.is_empty() => Step::Needs(Op::ForgetSources(frontend, excess)),
            Some(_) if !missing.is_empty() => Step::Needs(add()),
            Some(_) | None if self.ports.is_active(frontend) && is_reserved => Step::Settled,
            Some(_) | None => Step::Waiting,
        }
    }

    /// Whether the frontend's mapping in the kernel points to the Pod port that the claim requires.
    pub(in crate::core) fn mapping_is_current(&self, frontend: Frontend) -> bool {
        let mapping = self.observed.as_ref().and_then(|observed| observed.mappings.get(&frontend));
        let backend = self.ports.get(frontend).and_then(|claim| claim.backend);
        mapping.zip(backend).is_some_and(|(mapping, backend)| mapping.has_same_target(&backend))
    }

    /// Whether the node port has no mapping or a wrong mapping, and the agent cannot write the right mapping, because
    /// another process uses the node port.
    fn is_lost(&self, frontend: Frontend) -> bool {
        let is_reserved = self.observed.as_ref().is_some_and(|observed| observed.reservations.contains(&frontend));
        !is_reserved && self.ports.is_taken(frontend) && !self.mapping_is_current(frontend)
    }

    fn source_difference(&self, frontend: Frontend) -> SourceDifference {
        let claim = self.ports.get(frontend).filter(|claim| claim.backend.is_some());
        let there = self.observed.as_ref().and_then(|observed| observed.sources.get(&frontend));
        if there.is_none() && claim.is_none_or(|claim| !claim.sources.is_restricted()) {
            return SourceDifference::default();
        }
        let claim = claim.filter(|_| !self.is_lost(frontend));
        let wanted: BTreeSet<_> = claim.into_iter().flat_map(|claim| claim.sources.ranges()).collect();
        let none = BTreeSet::new();
        let there = there.unwrap_or(&none);
        SourceDifference { missing: &wanted - there, excess: there - &wanted }
    }

    /// Whether allowed sources of the frontend are missing from the kernel's map.
    pub(in crate::core) fn lacks_sources(&self, frontend: Frontend) -> bool {
        !self.source_difference(frontend).missing.is_empty()
    }

    /// Returns the Pods for which `ops` reserve a port, allow sources or write a mapping. The annotations of these Pods
    /// are written in a later pass, so that each annotation is written only once.
    fn owners_of(&self, ops: &[Op]) -> BTreeSet<PodUid> {
        let frontend = |op: &Op| match op {
            Op::Reserve(frontend, _) | Op::AllowSources(frontend, _) | Op::UpsertMapping(frontend, _) => {
                Some(*frontend)
            }
            Op::WritePod { .. } | Op::RemoveMapping(_) | Op::ForgetSources(..) | Op::Release(_) => None,
        };
        let claims = ops.iter().filter_map(frontend).filter_map(|frontend| self.ports.get(frontend));
        claims.filter_map(|claim| claim.owner.as_ref().map(|owner| owner.uid.clone())).collect()
    }

    fn next_deadline(&self, now: Moment) -> Option<Moment> {
        let until = |frontend: &Frontend| match self.ports.get(*frontend)?.phase {
            Phase::Active => None,
            Phase::Draining { until } | Phase::Quarantined { until } => until,
        };
        let deadlines = self.unsettled.iter().filter_map(until);
        let retries = self.retries.values().copied();
        let timers = self.timers.first().map(|(at, _)| *at);
        deadlines.chain(retries).chain(timers).chain(self.ports.next_expiry()).filter(|at| *at > now).min()
    }
}
