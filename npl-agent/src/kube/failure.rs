// SPDX-License-Identifier: Apache-2.0
//! Classifies failed requests to the API server by how the agent reacts to them.

use std::error::Error;

use kube::{core::Status, runtime::watcher};

pub use crate::metrics::FailureKind;

/// Refusals in a row after which a 401 or 403 counts as final. An API server that has just started refuses valid
/// requests until its authorization cache is filled.
pub(super) const REFUSALS_TO_CONFIRM: u32 = 3;

impl FailureKind {
    /// The kind of an HTTP status that is not a success.
    pub const fn of_status(code: u16) -> Self {
        match code {
            401 => Self::Unauthorized,
            403 => Self::Forbidden,
            410 => Self::Expired,
            429 | 500.. => Self::Unavailable,
            _ => Self::Rejected,
        }
    }

    /// The kind of a client error.
    pub fn of(err: &kube::Error) -> Self {
        if let kube::Error::Api(status) = err {
            Self::of_status(status.code)
        } else if matches!(err, kube::Error::SerdeError(_) | kube::Error::FromUtf8(_)) {
            Self::Malformed
        } else {
            // Failures of the connection: TLS, proxy, or a token file that is being replaced.
            Self::Unreachable
        }
    }

    /// The kind of a watcher error.
    pub fn of_watch(err: &watcher::Error) -> Self {
        match err {
            watcher::Error::InitialListFailed(err)
            | watcher::Error::WatchStartFailed(err)
            | watcher::Error::WatchFailed(err) => Self::of(err),
            watcher::Error::WatchError(status) => Self::of_status(status.code),
            watcher::Error::NoResourceVersion => Self::Malformed,
        }
    }
}

/// The first line of kube's error, which already includes its causes. A YAML error adds an excerpt of the file below
/// it.
pub(super) fn one_line(err: &dyn Error) -> String {
    err.to_string().lines().next().unwrap_or_default().to_owned()
}

/// The last cause of an error. Connection errors name the reason only there, such as `Connection refused`.
pub(super) fn root_cause(err: &(dyn Error + 'static)) -> String {
    let mut cause = err;
    while let Some(next) = cause.source() {
        cause = next;
    }
    match cause.downcast_ref::<Box<Status>>() {
        Some(status) if status.message.is_empty() => format!("HTTP {}", status.code),
        Some(status) => status.message.clone(),
        None => cause.to_string(),
    }
}
