// SPDX-License-Identifier: Apache-2.0
//! The delays after which failed operations are retried, for each port and each Pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};

use crate::core::{
    model::{Frontend, PodUid},
    op::Op,
};

/// The shortest delay after the first failure. The shortest delay doubles with each further failure, up to
/// [`LONGEST_WAIT`]; [`wait`] adds a random time.
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// The shortest delay after a repeated denial. The delay is long, because the API server denies requests until a person
/// changes permissions.
const DENIED_WAIT: Duration = Duration::from_mins(1);

/// How long to wait at least before a failed operation is retried. The part of the agent that reported the failure,
/// such as the datapath or the Kubernetes client, sets this minimum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryAdvice {
    /// No minimum delay.
    None,
    /// Retry after this delay or later.
    NotBefore(Duration),
    /// The API server denied the request for lack of permissions.
    Denied,
}

/// The back-off of each node port and each Pod whose operations fail.
#[derive(Debug, Default)]
pub struct RetryDelays(BTreeMap<RetryTarget, Failures>);

/// The node port or Pod for which consecutive failures are counted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum RetryTarget {
    Port(Frontend),
    Pod(PodUid),
}

#[derive(Debug)]
struct Failures {
    delays: ExponentialBackoff,
    denials: u32,
}

impl RetryDelays {
    /// Counts a failure of an op, and returns the delay before the retry. The delay grows with each consecutive
    /// failure.
    pub fn after_failure(&mut self, op: &Op, advice: RetryAdvice) -> Duration {
        let failures = self.0.entry(RetryTarget::of(op)).or_insert_with(|| Failures { delays: delays(), denials: 0 });
        let at_least = match advice {
            RetryAdvice::None => Duration::ZERO,
            RetryAdvice::NotBefore(wait) => wait,
            RetryAdvice::Denied => {
                failures.denials += 1;
                // An API server that has just started may briefly deny valid requests, so the first denial has no
                // minimum delay.
                if failures.denials > 1 { DENIED_WAIT } else { Duration::ZERO }
            }
        };
        wait(&mut failures.delays, at_least)
    }

    /// Resets the count of failures of the node port or Pod that an op changes.
    pub fn reset(&mut self, op: &Op) {
        self.0.remove(&RetryTarget::of(op));
    }

    /// Whether no failures are counted.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Drops the counts of failures of Pods that are not in `pods`.
    pub fn retain_pods(&mut self, pods: &BTreeSet<PodUid>) {
        self.0.retain(|subject, _| match subject {
            RetryTarget::Port(_) => true,
            RetryTarget::Pod(uid) => pods.contains(uid),
        });
    }
}

impl RetryTarget {
    fn of(op: &Op) -> Self {
        match op {
            Op::Reserve(frontend, _)
            | Op::AllowSources(frontend, _)
            | Op::UpsertMapping(frontend, _)
            | Op::RemoveMapping(frontend)
            | Op::ForgetSources(frontend, _)
            | Op::Release(frontend) => Self::Port(*frontend),
            Op::WritePod { uid, .. } => Self::Pod(uid.clone()),
        }
    }
}

fn delays() -> ExponentialBackoff {
    ExponentialBuilder::new().with_min_delay(FIRST_WAIT).with_max_delay(LONGEST_WAIT).without_max_times().build()
}

/// The next delay of the back-off, at least `at_least`, plus a random time of at most half this delay. The random time
/// spreads the retries: an API server that rejected half of forty simultaneous patches would also reject half of their
/// simultaneous retries. The library backon's own random time is not used, because it would not be added to `at_least`.
fn wait(delays: &mut ExponentialBackoff, at_least: Duration) -> Duration {
    let shortest = delays.next().unwrap_or(LONGEST_WAIT).max(at_least);
    shortest + shortest.mul_f32(fastrand::f32() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{model::PodKey, op::PodWrite};

    fn write(uid: &str) -> Op {
        let (pod, uid) = (PodKey::new("default", "web-0"), PodUid(uid.into()));
        Op::WritePod { pod, uid, value: PodWrite::Withdraw }
    }

    #[test]
    fn waits_double_up_to_the_longest_and_are_never_shorter_than_asked_for() {
        for (failures, shortest) in [(1, FIRST_WAIT), (2, 2 * FIRST_WAIT), (20, LONGEST_WAIT), (10_000, LONGEST_WAIT)] {
            let mut delays = delays();
            assert_eq!(delays.by_ref().take(failures - 1).count(), failures - 1);
            let wait = wait(&mut delays, Duration::ZERO);
            assert!(wait >= shortest && wait <= shortest * 3 / 2, "{failures}: {wait:?}");
        }
        assert!(wait(&mut delays(), DENIED_WAIT) >= DENIED_WAIT);
    }

    #[test]
    fn simultaneous_failures_are_retried_at_different_times() {
        let waits: BTreeSet<Duration> = (0..40).map(|_| wait(&mut delays(), Duration::from_secs(1))).collect();
        assert!(waits.len() > 20, "{waits:?}");
    }

    #[test]
    fn one_denial_is_retried_soon_and_further_ones_after_a_minute() {
        let mut delays = RetryDelays::default();
        assert!(delays.after_failure(&write("u-1"), RetryAdvice::Denied) <= Duration::from_secs(2));
        assert!(delays.after_failure(&write("u-1"), RetryAdvice::Denied) >= DENIED_WAIT);
        delays.reset(&write("u-1"));
        assert!(delays.after_failure(&write("u-1"), RetryAdvice::Denied) <= Duration::from_secs(2));
    }

    #[test]
    fn the_next_pod_of_a_name_does_not_inherit_delays() {
        let mut delays = RetryDelays::default();
        for _ in 0..10 {
            delays.after_failure(&write("u-1"), RetryAdvice::None);
        }
        assert!(delays.after_failure(&write("u-2"), RetryAdvice::None) <= Duration::from_secs(1));
        delays.retain_pods(&BTreeSet::from([PodUid("u-2".into())]));
        assert_eq!(delays.0.len(), 1, "delays of a deleted Pod are kept");
    }
}
