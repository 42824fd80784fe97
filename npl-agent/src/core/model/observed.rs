// SPDX-License-Identifier: Apache-2.0
//! What is there, as against what is wanted.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Backend, Frontend,
    sources::{SourceRange, Sources},
};

/// What the kernel and the sockets hold, as read from them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observed {
    /// The mappings in the datapath.
    pub mappings: BTreeMap<Frontend, Backend>,
    /// The sources that it lets in where a mapping is restricted; of others, what is left of earlier ones.
    pub sources: BTreeMap<Frontend, BTreeSet<SourceRange>>,
    /// The ports that this process has bound.
    pub reservations: BTreeSet<Frontend>,
}

impl Observed {
    /// Who may use a mapping.
    pub(in crate::core) fn sources_of(&self, frontend: Frontend, backend: Backend) -> Sources {
        Sources::of(backend, self.sources.get(&frontend).into_iter().flatten().copied())
    }

    /// The frontends of which not both say the same.
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
