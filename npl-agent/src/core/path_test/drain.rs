// SPDX-License-Identifier: Apache-2.0
//! Judges whether node ports are withdrawn, and whether they still answer during the drain. The agent receives the
//! request for the withdrawal slightly later than the test sends it, so the drain ends slightly later than the test
//! calculates.

use std::fmt;

use super::{Observation, Outcome, Row};

/// The time in milliseconds since the test requested the withdrawal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Elapsed(pub u64);

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} s", self.0 / 1_000, self.0 % 1_000 / 100)
    }
}

/// Returns the row about the withdrawal of an echo Pod's node ports. `was_published` is whether any node port was
/// published before the withdrawal.
pub fn withdrawal(node: &str, was_published: bool, is_left: bool, elapsed: Elapsed) -> Row {
    let (result, detail) = match (was_published, is_left) {
        (_, true) => (Outcome::Failed, format!("after {elapsed}, the annotation still names node ports")),
        (true, false) => (Outcome::Passed, format!("the annotation names no node port after {elapsed}")),
        (false, false) => (Outcome::NotTried, "no node port was published".to_owned()),
    };
    Row::about("withdrawal", node, result, detail)
}

/// Judges a request on a connection that was open before the withdrawal. A request that was sent during the drain must
/// be answered.
pub fn open_connection(
    observation: &Observation,
    sent: Elapsed,
    observed: Elapsed,
    drain: Elapsed,
) -> (Outcome, String) {
    if sent >= drain {
        return (Outcome::NotTried, format!("the drain of {drain} is shorter than the withdrawal took"));
    }
    match observation {
        Observation::Answered(_) => (Outcome::Passed, format!("answered {sent} after the withdrawal")),
        Observation::NoAnswer(_) | Observation::Refused(_) if observed >= drain => {
            (Outcome::NotTried, format!("the drain of {drain} ended while the request was sent"))
        }
        Observation::NoAnswer(reason) | Observation::Refused(reason) => (Outcome::Failed, reason.clone()),
        Observation::NotSent(reason) => (Outcome::Unknown, reason.clone()),
    }
}

/// Judges a request on a new connection. A request that was sent during the drain must be answered, and a request after
/// the drain must not. Returns `None` if a request without answer may have been sent before or after the end of the
/// drain. The client sends the request at an unknown time between `started` and `observed`.
pub fn new_connection(
    observation: &Observation,
    started: Elapsed,
    observed: Elapsed,
    drain: Elapsed,
) -> Option<(Outcome, String)> {
    Some(match observation {
        Observation::NoAnswer(reason) | Observation::Refused(reason) if observed < drain => {
            (Outcome::Failed, format!("{observed} after the withdrawal, before the end of the drain: {reason}"))
        }
        Observation::NoAnswer(_) | Observation::Refused(_) if started < drain => return None,
        Observation::NoAnswer(reason) | Observation::Refused(reason) => {
            (Outcome::Passed, format!("{started} after the withdrawal: {reason}"))
        }
        Observation::Answered(_) => (Outcome::Failed, format!("still answered {started} after the withdrawal")),
        Observation::NotSent(reason) => (Outcome::Unknown, reason.clone()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::path_test::Reply;

    const DRAIN: Elapsed = seconds(30);

    const fn seconds(seconds: u64) -> Elapsed {
        Elapsed(seconds * 1_000)
    }

    fn refused() -> Observation {
        Observation::Refused("connect: connection refused".to_owned())
    }

    fn answered() -> Observation {
        let ip = [192, 0, 2, 7].into();
        Observation::Answered(Reply { pod: "echo-1".to_owned(), seen: ip, local: Some(ip) })
    }

    #[test]
    fn a_withdrawal_passes_only_if_node_ports_were_published() {
        let result = |was_published, is_left| withdrawal("node-1", was_published, is_left, seconds(1)).result;
        assert_eq!(result(true, false), Outcome::Passed);
        assert_eq!(result(true, true), Outcome::Failed);
        assert_eq!(result(false, false), Outcome::NotTried);
    }

    #[test]
    fn times_are_shown_in_tenths_of_a_second() {
        let result = new_connection(&refused(), Elapsed(30_290), seconds(31), DRAIN);
        let text = "30.2 s after the withdrawal: connect: connection refused".to_owned();
        assert_eq!(result, Some((Outcome::Passed, text)));
    }

    #[test]
    fn a_refusal_of_a_new_connection_passes_only_if_the_client_was_started_after_the_drain() {
        let result = |observation: &Observation, started, observed| {
            new_connection(observation, seconds(started), seconds(observed), DRAIN).map(|(result, _)| result)
        };
        assert_eq!(result(&refused(), 28, 29), Some(Outcome::Failed));
        // The client sends its request at an unknown time after its start, here before or after the end of the drain.
        assert_eq!(result(&refused(), 29, 30), None);
        assert_eq!(result(&refused(), 30, 31), Some(Outcome::Passed));
        assert_eq!(result(&answered(), 38, 39), Some(Outcome::Failed));
    }

    #[test]
    fn an_open_connection_must_be_answered_during_the_drain() {
        assert_eq!(open_connection(&answered(), seconds(29), seconds(31), DRAIN).0, Outcome::Passed);
        assert_eq!(open_connection(&refused(), seconds(2), seconds(3), DRAIN).0, Outcome::Failed);
        assert_eq!(open_connection(&refused(), seconds(29), seconds(31), DRAIN).0, Outcome::NotTried);
        assert_eq!(open_connection(&answered(), seconds(30), seconds(31), DRAIN).0, Outcome::NotTried);
    }
}
