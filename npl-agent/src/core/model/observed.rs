// SPDX-License-Identifier: Apache-2.0
//! The observed state of the kernel and the sockets, as opposed to the desired state.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Backend, Frontend,
    sources::{SourceRange, Sources},
};

/// The state of the kernel's maps and of the reserved sockets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observed {
    /// The mappings in the datapath.
    pub mappings: BTreeMap<Frontend, Backend>,
    /// The allowed sources of each frontend. The sources that remain after a restriction has ended have no effect on
    /// the mapping.
    pub sources: BTreeMap<Frontend, BTreeSet<SourceRange>>,
    /// The node ports to which this process has bound a socket.
    pub reservations: BTreeSet<Frontend>,
}

impl Observed {
    /// The sources that the observed state allows to use a mapping.
    pub(in crate::core) fn sources_of(&self, frontend: Frontend, backend: Backend) -> Sources {
        Sources::of(backend, self.sources.get(&frontend).into_iter().flatten().copied())
    }

    /// The frontends whose mapping, allowed sources or reservation differ between two observations.
    pub(in crate::core) fn differences(&self, other: &Self) -> BTreeSet<Frontend> {
        let mut changed: BTreeSet<Frontend> =
            self.reservations.symmetric_difference(&other.reservations).copied().collect();
        changed.extend(differing(&self.mappings, &other.mappings));
        changed.extend(differing(&self.sources, &other.sources));
        changed
    }
}

fn differing<T: PartialEq>(one: &BTreeMap<Frontend, T>, other: &BTreeMap<Frontend, T>) -> Vec<Frontend> {
    let gone = one.keys().filter(|frontend| !other.contains_key(frontend));
    let new = other.iter().filter(|(frontend, value)| one.get(frontend) != Some(value)).map(|(frontend, _)| frontend);
    gone.chain(new).copied().collect()
}
