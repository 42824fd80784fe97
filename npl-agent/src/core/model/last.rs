// SPDX-License-Identifier: Apache-2.0
//! Stores the last logged value, so that each change is logged once.

use std::collections::{BTreeMap, BTreeSet};

/// The value that was logged last; `None` if no value was logged yet.
#[derive(Debug, Clone)]
pub struct Last<T> {
    value: Option<T>,
}

impl<T> Default for Last<T> {
    fn default() -> Self {
        Self { value: None }
    }
}

impl<T: PartialEq> Last<T> {
    /// Stores `value` as the value that was logged last. Returns true if no value was logged before, or if `value`
    /// differs from the value that was logged before.
    pub fn update(&mut self, value: T) -> bool {
        let has_changed = self.value.as_ref() != Some(&value);
        self.value = Some(value);
        has_changed
    }
}

impl<K: Ord + Clone, V: PartialEq + Clone> Last<BTreeMap<K, V>> {
    /// Stores `entries` as the entries that were logged last. Returns the entries whose key is new or whose value has
    /// changed.
    pub fn update_entries(&mut self, entries: BTreeMap<K, V>) -> BTreeMap<K, V> {
        let former = self.value.take().unwrap_or_default();
        let changed = entries.iter().filter(|(key, value)| former.get(*key) != Some(*value));
        let changed = changed.map(|(key, value)| (key.clone(), value.clone())).collect();
        self.value = Some(entries);
        changed
    }
}

impl<T: Ord + Clone> Last<BTreeSet<T>> {
    /// Stores `elements` as the elements that were logged last. Returns the elements that were not logged before.
    pub fn update_elements(&mut self, elements: BTreeSet<T>) -> BTreeSet<T> {
        let new = self.value.as_ref().map_or_else(|| elements.clone(), |former| &elements - former);
        self.value = Some(elements);
        new
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::Last;

    #[test]
    fn the_first_value_and_every_different_value_are_changes() {
        let mut last = Last::default();
        assert_eq!([1, 1, 2, 1].map(|value| last.update(value)), [true, false, true, true]);
    }

    #[test]
    fn entries_that_are_new_or_different_are_changes() {
        let mut last = Last::default();
        let all = |entries: &[(u8, u8)]| entries.iter().copied().collect::<BTreeMap<_, _>>();
        assert_eq!(last.update_entries(all(&[(1, 1), (2, 2)])), all(&[(1, 1), (2, 2)]));
        assert_eq!(last.update_entries(all(&[(1, 1), (2, 3)])), all(&[(2, 3)]));
        assert_eq!(last.update_entries(all(&[(1, 1)])), all(&[]));
        assert_eq!(
            last.update_entries(all(&[(1, 1), (2, 3)])),
            all(&[(2, 3)]),
            "an entry that was absent counts as new when it returns"
        );
    }

    #[test]
    fn elements_that_were_absent_are_new() {
        let mut last = Last::default();
        let all = |elements: &[u8]| elements.iter().copied().collect::<BTreeSet<_>>();
        assert_eq!(last.update_elements(all(&[1, 2])), all(&[1, 2]));
        assert_eq!(last.update_elements(all(&[2, 3])), all(&[3]));
        assert_eq!(last.update_elements(all(&[])), all(&[]));
        assert_eq!(last.update_elements(all(&[2])), all(&[2]));
    }
}
