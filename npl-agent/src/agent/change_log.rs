// SPDX-License-Identifier: Apache-2.0
//! What the log and the users have heard of the loop.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::{
    core::{
        model::{Family, Moment},
        ports::PortUsage,
        publish::{problem::Problem, report::Warnings},
        state::{Prerequisite, State},
    },
    metrics::{Metrics, PortCounts},
};

/// What the log and the users have heard, so that they hear it once.
#[derive(Debug)]
pub(crate) struct ChangeLog {
    /// Whoever tells users.
    problems: watch::Sender<Vec<Problem>>,
    warnings: Warnings,
    waiting_for: Option<BTreeSet<Prerequisite>>,
}

impl ChangeLog {
    /// Nothing so far.
    pub(crate) fn new(problems: watch::Sender<Vec<Problem>>) -> Self {
        Self { problems, warnings: Warnings::default(), waiting_for: None }
    }

    /// Tells the log what is still waited for.
    pub(crate) fn readiness(&mut self, state: &State) {
        let waiting_for = state.missing_prerequisites();
        if self.waiting_for.as_ref() != Some(&waiting_for) {
            for missing_prerequisites in &waiting_for {
                debug!(?missing_prerequisites, "nothing is decided before this is known");
            }
            if waiting_for.is_empty() {
                info!("Pods, Services and Node are known; serving");
            }
            self.waiting_for = Some(waiting_for);
        }
    }

    /// Most passes change nothing here, and cost one comparison.
    pub(crate) fn problems(&mut self, state: &State, metrics: &Metrics, now: Moment) {
        if state.problems().eq(self.problems.borrow().iter().map(Cow::Borrowed)) {
            return;
        }
        let current: Vec<Problem> = state.problems().map(Cow::into_owned).collect();
        for problem in self.warnings.observe(&current, now) {
            warn!(reason = problem.reason(), "{problem}");
        }
        let mut counts: BTreeMap<&'static str, u64> = BTreeMap::new();
        for problem in &current {
            *counts.entry(problem.reason()).or_default() += 1;
        }
        metrics.set_problems(&counts.into_iter().collect::<Vec<_>>());
        self.problems.send_replace(current);
    }

    /// Tells the metrics what there is.
    pub(crate) fn counts(state: &State, metrics: &Metrics) {
        for family in Family::ALL {
            let count = state.mappings().filter(|view| view.frontend.family == family).count();
            metrics.set_mappings(family, count as u64);
            let usages: Vec<_> = state.port_usages(family).collect();
            let sum = |pick: fn(&PortUsage) -> usize| usages.iter().map(pick).sum::<usize>() as u64;
            let counts = PortCounts {
                used: sum(|usage| usage.active + usage.draining),
                free: sum(|usage| usage.free),
                quarantined: sum(|usage| usage.quarantined),
            };
            metrics.set_ports(family, counts);
        }
    }
}
