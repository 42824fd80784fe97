// SPDX-License-Identifier: Apache-2.0
//! What went wrong between the agent and the API server, as few kinds as there are reactions.

use std::error::Error;

use kube::{core::Status, runtime::watcher};

pub use crate::metrics::FailureKind;

/// An API server that has only just started refuses for a moment what it allows afterwards.
pub(super) const REFUSALS_TO_BELIEVE: u32 = 3;

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
            // Of the connection: TLS, proxy, a token file that cannot be read just now.
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

/// kube's errors tell their causes themselves, and one about YAML shows the lines in question below its first.
pub(super) fn one_line(err: &dyn Error) -> String {
    err.to_string().lines().next().unwrap_or_default().to_owned()
}

/// The end of the chain, which is where a connection's error says what it is: `Connection refused`, for one.
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
