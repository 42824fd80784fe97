// SPDX-License-Identifier: Apache-2.0
//! Keeps the members that a load balancer uses, and applies changes after a delay.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::members::Member;

/// Versions of the member list, each with the time from which the balancer uses this version. The version in use is the
/// newest version whose time is not in the future.
#[derive(Debug)]
pub(super) struct Pool {
    delay: Duration,
    closed: AtomicBool,
    versions: RwLock<VecDeque<(Instant, Arc<[Member]>)>>,
}

impl Pool {
    pub(super) fn new(delay: Duration) -> Self {
        Self { delay, closed: AtomicBool::new(false), versions: RwLock::default() }
    }

    /// Adds the current members from the API server. The first list is effective immediately; later lists are effective
    /// after the delay.
    pub(super) fn set(&self, members: Vec<Member>) {
        let now = Instant::now();
        let mut versions = self.versions.write().unwrap_or_else(PoisonError::into_inner);
        let since = if versions.is_empty() { now } else { now + self.delay };
        versions.push_back((since, members.into()));
        while versions.get(1).is_some_and(|(since, _)| *since <= now) {
            versions.pop_front();
        }
    }

    pub(super) fn members_at(&self, now: Instant) -> Arc<[Member]> {
        let versions = self.versions.read().unwrap_or_else(PoisonError::into_inner);
        // If other threads have already removed the version that was current at `now`, the oldest remaining one is
        // used.
        let current = versions.iter().rev().find(|(since, _)| *since <= now).or_else(|| versions.front());
        current.map_or_else(|| Arc::from([]), |(_, members)| Arc::clone(members))
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::echo::Protocol;

    fn member() -> Member {
        let server = ([192, 0, 2, 11], 61000).into();
        Member { pod: "web-0".to_owned(), protocol: Protocol::Tcp, server }
    }

    #[test]
    fn changes_take_effect_after_the_delay() {
        let delay = Duration::from_mins(1);
        let pool = Pool::new(delay);
        pool.set(Vec::new());
        pool.set(vec![member()]);
        let after = Instant::now();
        assert_eq!(pool.members_at(after).as_ref(), []);
        assert_eq!(pool.members_at(after + delay).as_ref(), [member()]);
    }

    #[test]
    fn the_oldest_remaining_version_serves_late_requests() {
        let pool = Pool::new(Duration::ZERO);
        pool.set(vec![member()]);
        let asked = Instant::now();
        pool.set(vec![member()]);
        pool.set(vec![member()]);
        assert_eq!(pool.members_at(asked).as_ref(), [member()]);
    }
}
