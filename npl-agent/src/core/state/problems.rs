// SPDX-License-Identifier: Apache-2.0
//! Collects the problems that Events and metrics report.

use std::{borrow::Cow, collections::BTreeSet};

use crate::core::{
    model::Frontend,
    publish::problem::{AffectedObject, Cause, Problem},
    state::PlannerState,
};

impl PlannerState {
    /// Returns all problems for Events and metrics, sorted and without duplicates. The agent reports the problem of a
    /// Service only if a Pod of the Service is on the Node: otherwise every Node of a large cluster would report the
    /// same problem.
    pub fn problems(&self) -> impl Iterator<Item = Cow<'_, Problem>> {
        let views = self.with_problems.iter().filter_map(|pod| self.views.get(pod));
        let of_pods = views.flat_map(|view| &view.wanted.problems).map(Cow::Borrowed);
        let of_room =
            self.source_table_full.iter().filter_map(|frontend| self.source_table_problem(*frontend)).map(Cow::Owned);
        let contested = self.contests.problems().map(Cow::Owned);
        let problems: BTreeSet<_> = of_pods.chain(of_room).chain(contested).collect();
        problems.into_iter()
    }

    fn source_table_problem(&self, frontend: Frontend) -> Option<Problem> {
        let owner = self.ports.get(frontend)?.owner.as_ref().filter(|_| self.lacks_sources(frontend))?;
        let Frontend { node_port, protocol, family } = frontend;
        let cause = Cause::SourceTableFull { node_port, protocol, family };
        Some(Problem { subject: AffectedObject::Pod(owner.pod.clone(), owner.uid.clone()), cause })
    }
}
