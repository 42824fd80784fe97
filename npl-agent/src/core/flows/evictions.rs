// SPDX-License-Identifier: Apache-2.0
//! Estimates how many conntrack entries the kernel evicted from the full flow tables of an IP family. The kernel does
//! not report evictions, so the estimate compares two sweeps. The estimate is the number of entries after the first
//! sweep, plus the new entries, minus the entries that were removed with their mappings, minus the entries that the
//! second sweep finds.

/// The result of one sweep of the flow tables of an IP family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sweep {
    /// The number of entries that the sweep found in the flow tables.
    pub found: usize,
    /// The number of entries for which the fullest of the flow tables had room.
    pub room: usize,
    /// The number of entries that the sweep then removed.
    pub expired: usize,
    /// The number of flows that the programs have established so far.
    pub established: u64,
    /// The number of entries that the agent has removed with their mappings so far.
    pub purged: u64,
}

/// The state of the estimate for the flow tables of one IP family.
#[derive(Debug, Clone, Copy, Default)]
pub struct EvictionEstimate {
    last: Option<Sweep>,
    /// The number of entries that sweeps found in the table before the counter of established flows included them: a
    /// sweep reads the counter before it reads the table.
    excess: u64,
}

impl EvictionEstimate {
    /// Returns how many entries were evicted since the previous sweep.
    ///
    /// The result is zero if no table was full. The programs also remove entries, for example entries of flows that
    /// lost a tuple conflict. If entries are missing although no table was full, the programs have removed all of these
    /// entries. If one table is full, entries that the programs remove from the other tables also count as evicted.
    pub fn observe(&mut self, sweep: Sweep) -> u64 {
        let Some(last) = self.last.replace(sweep) else { return 0 };
        let found = sweep.found as u64;
        let purged = sweep.purged.saturating_sub(last.purged);
        if purged < sweep.room as u64 {
            self.excess = 0;
            return 0;
        }
        let before = last.found.saturating_sub(last.expired) as u64;
        let entered = before + sweep.established.saturating_sub(last.established);
        let accounted = found + purged + self.excess;
        self.excess = accounted.saturating_sub(entered);
        entered.saturating_sub(accounted)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CAPACITY: usize = 100;

    fn sweep(found: usize, expired: usize, established: u64, purged: u64) -> Sweep {
        Sweep { found, room: CAPACITY.saturating_sub(found), expired, established, purged }
    }

    #[test]
    fn entries_that_are_missing_from_a_full_table_were_evicted() {
        let mut estimate = EvictionEstimate::default();
        assert_eq!(estimate.observe(sweep(90, 10, 1000, 5)), 0, "an estimate needs two sweeps");
        // 80 entries were left, 50 were added, and 10 were removed with a mapping: 120 entries are expected, but the
        // sweep finds only 100.
        assert_eq!(estimate.observe(sweep(100, 0, 1050, 15)), 20);
        assert_eq!(estimate.observe(sweep(100, 30, 1050, 15)), 0);
        assert_eq!(estimate.observe(sweep(100, 0, 1080, 15)), 0, "expired entries were not evicted");
    }

    #[test]
    fn a_table_that_is_not_full_evicts_no_entry() {
        let mut estimate = EvictionEstimate::default();
        estimate.observe(sweep(90, 0, 90, 0));
        assert_eq!(estimate.observe(sweep(70, 0, 95, 0)), 0, "the programs removed entries");
    }

    #[test]
    fn an_entry_of_a_packet_during_the_sweep_is_not_counted_twice() {
        let mut estimate = EvictionEstimate::default();
        estimate.observe(sweep(100, 0, 100, 0));
        // The sweep found five entries that were added after the counter had been read.
        assert_eq!(estimate.observe(sweep(105, 0, 100, 0)), 0);
        assert_eq!(estimate.observe(sweep(100, 0, 110, 0)), 10);
    }

    proptest! {
        /// Simulates a table that evicts the entries in excess of its capacity, and sweeps of this table at arbitrary
        /// times.
        #[test]
        fn every_eviction_of_a_full_table_is_counted_once(
            rounds in prop::collection::vec((CAPACITY..3 * CAPACITY, 0..CAPACITY, 0..10_usize), 1..50),
        ) {
            let (mut estimate, mut entries, mut established, mut purged) = (EvictionEstimate::default(), CAPACITY, 0, 0);
            estimate.observe(sweep(entries, 0, established, purged));
            let (mut counted, mut evicted) = (0, 0);
            for (new, expired, removed) in rounds {
                let removed = removed.min(entries);
                entries += new - removed;
                established += new as u64;
                purged += removed as u64;
                evicted += entries.saturating_sub(CAPACITY) as u64;
                entries = entries.min(CAPACITY);
                counted += estimate.observe(sweep(entries, expired, established, purged));
                entries -= expired;
            }
            prop_assert_eq!(counted, evicted);
        }
    }
}
