// SPDX-License-Identifier: Apache-2.0
//! The state that the probes `/livez`, `/readyz` and `/startupz` report.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

/// Time without a heartbeat of the main loop after which `/livez` reports the agent as hung.
const STALL: Duration = Duration::from_secs(30);

/// The state of the agent, written by the main loop and read by the probes. Clones of this value share the same state.
#[derive(Debug, Clone)]
pub struct Health(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    origin: Instant,
    last_beat_millis: AtomicU64,
    is_synced: AtomicBool,
    is_attached: AtomicBool,
    was_attached: AtomicBool,
    is_retired: AtomicBool,
}

impl Health {
    /// Creates the state of a new agent, which is live, but neither started nor ready.
    pub fn new() -> Self {
        Self(Arc::new(Inner {
            origin: Instant::now(),
            last_beat_millis: AtomicU64::new(0),
            is_synced: AtomicBool::new(false),
            is_attached: AtomicBool::new(false),
            was_attached: AtomicBool::new(false),
            is_retired: AtomicBool::new(false),
        }))
    }

    /// Records a heartbeat of the main loop.
    pub fn beat(&self) {
        self.0.last_beat_millis.store(self.age_millis(), Ordering::Relaxed);
    }

    /// Records that the first reconciliation of all Pods is done. This state is never reset: if the API server becomes
    /// unreachable later, the agent stays ready, because the kernel programs continue to translate packets.
    pub fn set_synced(&self) {
        self.0.is_synced.store(true, Ordering::Relaxed);
    }

    /// Records whether the programs are attached to at least one device through which clients reach the Node.
    pub fn set_attached(&self, is_attached: bool) {
        self.0.is_attached.store(is_attached, Ordering::Relaxed);
        self.0.was_attached.fetch_or(is_attached, Ordering::Relaxed);
    }

    /// Records that an agent with `--retire` has removed all kernel state and annotations of NPL from this Node.
    pub fn set_retired(&self) {
        self.0.is_retired.store(true, Ordering::Relaxed);
    }

    /// Returns whether the last heartbeat of the main loop is less than 30 s old.
    pub fn is_live(&self) -> bool {
        let since_beat = self.age_millis().saturating_sub(self.0.last_beat_millis.load(Ordering::Relaxed));
        Duration::from_millis(since_beat) < STALL
    }

    /// Returns true if the agent serves the Pods of this Node, or if the agent has retired the Node.
    pub fn is_ready(&self) -> bool {
        let is_serving = self.0.is_synced.load(Ordering::Relaxed) && self.0.is_attached.load(Ordering::Relaxed);
        is_serving || self.0.is_retired.load(Ordering::Relaxed)
    }

    /// Returns whether the programs have been attached at least once to a device through which clients reach the Node.
    pub fn is_started(&self) -> bool {
        self.0.was_attached.load(Ordering::Relaxed)
    }

    fn age_millis(&self) -> u64 {
        u64::try_from(self.0.origin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl Default for Health {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Health, STALL};

    #[tokio::test(start_paused = true)]
    async fn an_agent_without_heartbeats_is_not_live() {
        let health = Health::new();
        tokio::time::advance(STALL.saturating_sub(Duration::from_millis(1))).await;
        assert!(health.is_live());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(!health.is_live());
        health.beat();
        assert!(health.is_live());
    }

    #[test]
    fn ready_means_synced_and_attached() {
        let health = Health::new();
        assert!(!health.is_started() && !health.is_ready());
        health.set_attached(true);
        assert!(health.is_started() && !health.is_ready());
        health.set_synced();
        assert!(health.is_ready());
        health.set_attached(false);
        assert!(health.is_started() && !health.is_ready());
    }

    #[test]
    fn a_retired_agent_is_ready() {
        let health = Health::new();
        health.set_retired();
        assert!(health.is_ready());
    }
}
