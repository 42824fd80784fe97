// SPDX-License-Identifier: Apache-2.0
//! Reports how far the retirement of this Node has progressed. An operator retires a Node before uninstalling NPL: the
//! agent withdraws the annotations, drains the mappings and then removes the mappings.

use std::collections::BTreeMap;

use super::PlannerState;
use crate::core::model::Pod;

/// A step of the retirement. The variants are in the order in which the steps are completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RetirementStep {
    /// The agent reads the lists of Pods and Services, and the kernel's maps.
    Prerequisites,
    /// The agent withdraws the annotations. The step is completed when the API server has removed all annotations.
    Annotations,
    /// The mappings drain. The agent then removes the mappings.
    Mappings,
}

impl PlannerState {
    /// Whether this Node is being retired.
    pub const fn is_retiring(&self) -> bool {
        self.settings.is_retiring
    }

    /// Whether this Node is retired: no node port is published or mapped, and none will be published or mapped.
    pub fn is_retired(&self) -> bool {
        self.is_retiring() && self.left_to_retire().is_empty()
    }

    /// The steps that are not completed yet, each with a phrase for operators. The map is empty if the Node is not
    /// being retired.
    pub fn left_to_retire(&self) -> BTreeMap<RetirementStep, String> {
        let mut left = BTreeMap::new();
        if !self.is_retiring() {
            return left;
        }
        if !self.is_adopted {
            let missing: Vec<String> = self.missing_prerequisites().iter().map(ToString::to_string).collect();
            let text = if missing.is_empty() { "the first pass".to_owned() } else { missing.join(" and ") };
            left.insert(RetirementStep::Prerequisites, text);
        }
        // The annotation of a terminating Pod need not be removed: the annotation disappears with the Pod.
        let is_published = |pod: &&Pod| pod.annotation.is_some() && !pod.is_terminating;
        let mut published = self.snapshot.pods().filter(is_published);
        if let Some(first) = published.next() {
            let text = format!(
                "the API server to remove the annotations of {} Pods, such as {}",
                1 + published.count(),
                first.key
            );
            left.insert(RetirementStep::Annotations, text);
        }
        let mappings = self.observed.as_ref().map_or(0, |observed| observed.mappings.len());
        if mappings > 0 {
            left.insert(RetirementStep::Mappings, format!("{mappings} mappings to drain (--drain) and to be removed"));
        }
        left
    }
}
