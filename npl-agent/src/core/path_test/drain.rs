// SPDX-License-Identifier: Apache-2.0
//! Judges whether node ports are withdrawn, and whether requests to these node ports are still answered during the
//! drain. The agent receives the request for the withdrawal slightly later than the test sends it, so the drain ends
//! slightly later than the test calculates.

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

/// A withdrawal that the test sees within this time is not late, even if the drain is shorter.
const LATE: Elapsed = Elapsed(15_000);

/// Returns the row about the withdrawal of an echo Pod's node ports. `was_published` is whether any node port was
/// published before the withdrawal, and `is_left` is whether the annotation still names a node port. If the test saw
/// the withdrawal only after the drain and after [`LATE`], the result is unknown, because the time includes the test's
/// own requests to the API server.
pub fn withdrawal(node: &str, was_published: bool, is_left: bool, elapsed: Elapsed, drain: Elapsed) -> Row {
    let (result, detail) = match (was_published, is_left) {
        (true, false) if elapsed > drain.max(LATE) => {
            let detail = format!("the annotation named node ports for up to {elapsed}; the drain lasts {drain}");
            (Outcome::Unknown, detail)
        }
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
        return (Outcome::NotTried, format!("the drain of {drain} ended before the request was sent"));
    }
    match observation {
        Observation::Answered(_) => (Outcome::Passed, format!("answered {sent} after the withdrawal")),
        Observation::NoAnswer(_) | Observation::Refused(_) if observed >= drain => {
            (Outcome::NotTried, format!("the drain of {drain} ended before the result of the request was read"))
        }
        Observation::NoAnswer(reason) | Observation::Refused(reason) => (Outcome::Failed, reason.clone()),
        Observation::NotSent(reason) => (Outcome::Unknown, reason.clone()),
    }
}

/// The earliest and the latest time at which a request was sent: the client sends its request at an unknown time
/// between `started` and `observed`.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    /// The time at which the client was started.
    pub started: Elapsed,
    /// The time at which the client's observation was read.
    pub observed: Elapsed,
}

/// The earliest and the latest time at which the drain may end. The test does not know exactly when the agent received
/// the request for the withdrawal, and when the drain began.
#[derive(Debug, Clone, Copy)]
pub struct DrainEnd {
    /// Before this time, every request must be answered.
    pub earliest: Elapsed,
    /// A request that is sent after this time must not be answered.
    pub latest: Elapsed,
}

/// Judges a request on a new connection. The request must be answered if it was sent during the drain, and must not be
/// answered if it was sent after the drain. Returns `None` if the observation is inconclusive; the test must then send
/// a further request. An answer is inconclusive if the request may have been sent before the latest end of the drain. A
/// missing answer is inconclusive if the request may have been sent either before or after the earliest end of the
/// drain.
pub fn new_connection(observation: &Observation, sent: Sent, end: DrainEnd) -> Option<(Outcome, String)> {
    let Sent { started, observed } = sent;
    match observation {
        Observation::NoAnswer(reason) | Observation::Refused(reason) if observed < end.earliest => {
            let detail = format!("{observed} after the withdrawal, before the end of the drain: {reason}");
            Some((Outcome::Failed, detail))
        }
        Observation::NoAnswer(reason) | Observation::Refused(reason) if started >= end.earliest => {
            Some((Outcome::Passed, format!("{started} after the withdrawal: {reason}")))
        }
        Observation::Answered(_) if started >= end.latest => {
            Some((Outcome::Failed, format!("still answered {started} after the withdrawal")))
        }
        Observation::NoAnswer(_) | Observation::Refused(_) | Observation::Answered(_) => None,
        Observation::NotSent(reason) => Some((Outcome::Unknown, reason.clone())),
    }
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
        let result = |was_published, is_left| withdrawal("node-1", was_published, is_left, seconds(1), DRAIN).result;
        assert_eq!(result(true, false), Outcome::Passed);
        assert_eq!(result(true, true), Outcome::Failed);
        assert_eq!(result(false, false), Outcome::NotTried);
    }

    #[test]
    fn the_result_of_a_withdrawal_after_the_drain_is_unknown() {
        let result = |elapsed, drain| withdrawal("node-1", true, false, seconds(elapsed), seconds(drain)).result;
        assert_eq!([result(30, 30), result(31, 30)], [Outcome::Passed, Outcome::Unknown]);
        assert_eq!([result(15, 0), result(16, 0)], [Outcome::Passed, Outcome::Unknown]);
    }

    #[test]
    fn times_are_shown_in_tenths_of_a_second() {
        let sent = Sent { started: Elapsed(30_290), observed: seconds(31) };
        let result = new_connection(&refused(), sent, DrainEnd { earliest: DRAIN, latest: seconds(40) });
        let text = "30.2 s after the withdrawal: connect: connection refused".to_owned();
        assert_eq!(result, Some((Outcome::Passed, text)));
    }

    #[test]
    fn a_new_connection_is_judged_only_if_the_whole_request_was_before_or_after_the_end_of_the_drain() {
        let result = |observation: &Observation, started, observed| {
            let sent = Sent { started: seconds(started), observed: seconds(observed) };
            let end = DrainEnd { earliest: DRAIN, latest: seconds(40) };
            new_connection(observation, sent, end).map(|(result, _)| result)
        };
        assert_eq!(result(&refused(), 28, 29), Some(Outcome::Failed));
        assert_eq!(result(&refused(), 29, 30), None);
        assert_eq!(result(&refused(), 30, 31), Some(Outcome::Passed));
        assert_eq!(result(&answered(), 1, 2), None);
        assert_eq!(result(&answered(), 39, 41), None);
        assert_eq!(result(&answered(), 40, 41), Some(Outcome::Failed));
        assert_eq!(result(&Observation::NotSent("kubectl".to_owned()), 1, 2), Some(Outcome::Unknown));
    }

    #[test]
    fn an_open_connection_must_be_answered_during_the_drain() {
        assert_eq!(open_connection(&answered(), seconds(29), seconds(31), DRAIN).0, Outcome::Passed);
        assert_eq!(open_connection(&refused(), seconds(2), seconds(3), DRAIN).0, Outcome::Failed);
        assert_eq!(open_connection(&refused(), seconds(29), seconds(31), DRAIN).0, Outcome::NotTried);
        assert_eq!(open_connection(&answered(), seconds(30), seconds(31), DRAIN).0, Outcome::NotTried);
    }
}
