// SPDX-License-Identifier: Apache-2.0
//! Classifies failed requests to the API server by the agent's reaction to the failure.

use std::{error::Error, time::Duration};

use http::{Response, header::RETRY_AFTER};
use kube::core::Status;

pub use crate::metrics::FailureKind;

/// The longest `Retry-After` that the agent obeys. Without this limit, a proxy that sends a large value, such as one
/// hour, could prevent the agent from receiving changes for that time.
const LONGEST_RETRY_AFTER: Duration = Duration::from_mins(1);

/// After this number of 401 or 403 answers without a success in between, the agent acts on the refusal: at start, the
/// agent exits; for a watch, the agent logs a warning. The agent ignores earlier refusals, because an API server that
/// has just started denies valid requests until its authorization cache is filled.
pub(super) const REFUSALS_TO_CONFIRM: u32 = 3;

impl FailureKind {
    /// Returns the kind of failure that an HTTP status code means. `code` must not be the code of a success.
    pub const fn of_status(code: u16) -> Self {
        match code {
            401 => Self::Unauthorized,
            403 => Self::Forbidden,
            410 => Self::Expired,
            429 | 500.. => Self::Unavailable,
            _ => Self::Rejected,
        }
    }

    /// Returns the kind of failure that an error of the library kube means.
    pub fn of(err: &kube::Error) -> Self {
        if let kube::Error::Api(status) = err {
            Self::of_status(status.code)
        } else if matches!(err, kube::Error::SerdeError(_) | kube::Error::FromUtf8(_)) {
            Self::Malformed
        } else {
            // The API server has not answered: the connection, TLS or a proxy failed, or the token file is being
            // replaced.
            Self::Unreachable
        }
    }
}

/// Why a list or a watch failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RequestFailure {
    pub(super) kind: FailureKind,
    /// The HTTP status with which the API server answered; `None` if there was no answer.
    pub(super) status: Option<u16>,
    /// The text of the error's last cause, such as `Connection refused`.
    pub(super) cause: String,
    /// The time that the API server requires the agent to wait before the next request, at most one minute.
    pub(super) after: Option<Duration>,
}

impl RequestFailure {
    /// Describes the failure of a request. `header` is the value of `Retry-After` in the answer.
    pub(super) fn of(err: &kube::Error, header: Option<Duration>) -> Self {
        let answer = if let kube::Error::Api(status) = err { Some(status) } else { None };
        let after = header.or_else(|| asked_by(answer?));
        Self { kind: FailureKind::of(err), status: answer.map(|it| it.code), cause: root_cause(err), after }
    }

    /// Describes a failure that the API server reports by an event of type `ERROR` in a watch.
    pub(super) fn of_status(status: &Status) -> Self {
        let kind = FailureKind::of_status(status.code);
        Self { kind, status: Some(status.code), cause: message(status), after: asked_by(status) }
    }

    /// Describes an answer without a resource version. A proxy must have sent the answer, because every API server sets
    /// the version.
    pub(super) fn without_version() -> Self {
        let cause = "the answer has no resource version".to_owned();
        Self { kind: FailureKind::Malformed, status: None, cause, after: None }
    }

    /// Describes an answer that was not complete within `limit`, for example because a proxy keeps the connection open
    /// although the API server is gone.
    pub(super) fn without_end(limit: Duration) -> Self {
        let cause = format!("the answer is not complete after {} s", limit.as_secs());
        Self { kind: FailureKind::Unreachable, status: None, cause, after: None }
    }

    /// Describes a streaming list that the API server ended before the end of the initial events.
    pub(super) fn interrupted() -> Self {
        let cause = "the streaming list ended before its last object".to_owned();
        Self { kind: FailureKind::Unreachable, status: None, cause, after: None }
    }

    /// Describes a watch in which a due bookmark did not arrive, for example because a proxy keeps the connection open
    /// although the API server is gone.
    pub(super) fn without_bookmark(silence: Duration) -> Self {
        let cause = format!("no event or bookmark for {} s", silence.as_secs());
        Self { kind: FailureKind::Unreachable, status: None, cause, after: None }
    }
}

/// Parses the header `Retry-After`, a number of seconds, and limits it to one minute. The header may also contain a
/// date, but the API server never sends a date.
pub(super) fn retry_after<B>(response: &Response<B>) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST_RETRY_AFTER))
}

fn asked_by(status: &Status) -> Option<Duration> {
    let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
    (seconds > 0).then(|| Duration::from_secs(seconds.into()).min(LONGEST_RETRY_AFTER))
}

/// Returns the first line of the text of an error of kube. This line already includes the error's causes. The other
/// lines are omitted, because they contain an excerpt of the kubeconfig file if the file is invalid YAML.
pub(super) fn one_line(err: &dyn Error) -> String {
    err.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Returns the text of the last cause in an error's chain of causes. Only the last cause of a connection error says why
/// the connection failed, such as `Connection refused`.
pub(super) fn root_cause(err: &(dyn Error + 'static)) -> String {
    let mut cause = err;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.downcast_ref::<Box<Status>>().map_or_else(|| cause.to_string(), |status| message(status))
}

fn message(status: &Status) -> String {
    if status.message.is_empty() { format!("HTTP {}", status.code) } else { status.message.clone() }
}
