// SPDX-License-Identifier: Apache-2.0
//! Label values: each label has a closed set of them.

use std::fmt::{self, Write as _};

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};

use crate::core::{
    model::Family,
    op::{Op, PodWrite},
};

/// The outcome of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpOutcome {
    /// The operation succeeded.
    Done,
    /// Another process uses the port.
    PortTaken,
    /// Clients of the port's former owner still send datagrams.
    RecentTraffic,
    /// The operation failed and is retried.
    Retry,
    /// The Pod is deleted.
    Gone,
}

impl OpOutcome {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::PortTaken => "port_taken",
            Self::RecentTraffic => "recent_traffic",
            Self::Retry => "retry",
            Self::Gone => "gone",
        }
    }
}

/// The outcome of a patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PatchOutcome {
    /// The patch succeeded.
    Patched,
    /// The Pod is deleted.
    Gone,
    /// A permission is missing.
    Denied,
    /// The API server rejects the annotation.
    Refused,
    /// The API server is not available.
    Unavailable,
    /// No connection, or a broken one.
    Unreachable,
    /// No answer in time.
    TimedOut,
    /// The answer cannot be decoded.
    Malformed,
}

impl PatchOutcome {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Patched => "patched",
            Self::Gone => "gone",
            Self::Denied => "denied",
            Self::Refused => "refused",
            Self::Unavailable => "unavailable",
            Self::Unreachable => "unreachable",
            Self::TimedOut => "timed_out",
            Self::Malformed => "malformed",
        }
    }
}

/// The outcome of sending a Kubernetes Event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventOutcome {
    /// A new Event.
    Created,
    /// The series of an existing Event was continued.
    Repeated,
    /// The namespace is deleted.
    Gone,
    /// A permission is missing.
    Denied,
    /// Another failure.
    Failed,
}

impl EventOutcome {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Repeated => "repeated",
            Self::Gone => "gone",
            Self::Denied => "denied",
            Self::Failed => "failed",
        }
    }
}

/// A kind of failure of the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FailureKind {
    /// 401: the token is not accepted.
    Unauthorized,
    /// 403: a permission is missing.
    Forbidden,
    /// 410: the watch expired and starts again with a list.
    Expired,
    /// 429 and 5xx: the API server is not available.
    Unavailable,
    /// Another answer that is not a success.
    Rejected,
    /// No answer: no connection, a broken one, or a timeout.
    Unreachable,
    /// The answer cannot be decoded.
    Malformed,
}

impl FailureKind {
    /// The value of the metric label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::Forbidden => "forbidden",
            Self::Expired => "expired",
            Self::Unavailable => "unavailable",
            Self::Rejected => "rejected",
            Self::Unreachable => "unreachable",
            Self::Malformed => "malformed",
        }
    }
}

/// A watched resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WatchedResource {
    /// Pods of this Node.
    Pods,
    /// All Services.
    Services,
    /// This Node.
    Node,
}

impl WatchedResource {
    /// The value of the metric label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pods => "pods",
            Self::Services => "services",
            Self::Node => "nodes",
        }
    }
}

impl fmt::Display for WatchedResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum OpName {
    Reserve,
    AllowSources,
    UpsertMapping,
    Annotate,
    OpenGate,
    RemoveMapping,
    ForgetSources,
    Release,
}

impl OpName {
    pub(super) const fn of(op: &Op) -> Self {
        match op {
            Op::Reserve(..) => Self::Reserve,
            Op::AllowSources(..) => Self::AllowSources,
            Op::UpsertMapping(..) => Self::UpsertMapping,
            Op::WritePod { value: PodWrite::Set(_) | PodWrite::Withdraw, .. } => Self::Annotate,
            Op::WritePod { value: PodWrite::OpenGate, .. } => Self::OpenGate,
            Op::RemoveMapping(_) => Self::RemoveMapping,
            Op::ForgetSources(..) => Self::ForgetSources,
            Op::Release(_) => Self::Release,
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::AllowSources => "allow_sources",
            Self::UpsertMapping => "upsert_mapping",
            Self::Annotate => "annotate",
            Self::OpenGate => "open_gate",
            Self::RemoveMapping => "remove_mapping",
            Self::ForgetSources => "forget_sources",
            Self::Release => "release",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum PortState {
    Used,
    Free,
    Quarantined,
}

impl PortState {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Used => "used",
            Self::Free => "free",
            Self::Quarantined => "quarantined",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum DeviceState {
    Attached,
    Failed,
}

impl DeviceState {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Attached => "attached",
            Self::Failed => "failed",
        }
    }
}

macro_rules! label_values {
    ($($value:ty),+) => {$(
        impl EncodeLabelValue for $value {
            fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
                encoder.write_str(self.as_str())
            }
        }
    )+};
}

label_values!(
    OpOutcome,
    PatchOutcome,
    EventOutcome,
    OpName,
    PortState,
    DeviceState,
    Family,
    WatchedResource,
    FailureKind
);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct OpLabels {
    pub(super) op: OpName,
    pub(super) outcome: OpOutcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct OutcomeLabel {
    pub(super) outcome: PatchOutcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct EventLabel {
    pub(super) outcome: EventOutcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct WatchLabels {
    pub(super) subject: WatchedResource,
    pub(super) kind: FailureKind,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct FamilyLabel {
    pub(super) family: Family,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct PortLabels {
    pub(super) family: Family,
    pub(super) state: PortState,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct DeviceLabel {
    pub(super) state: DeviceState,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ReasonLabel {
    pub(super) reason: &'static str,
}
