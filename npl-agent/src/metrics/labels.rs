// SPDX-License-Identifier: Apache-2.0
//! The values of metric labels. To limit the number of time series, each label in this file has a fixed set of values,
//! except the label with the names of the Node's uplinks.

use std::fmt::{self, Write as _};

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};

use crate::core::{
    model::{Family, Protocol},
    op::{Op, PodWrite},
    repairs::RepairedObject,
};

/// The outcome of an op; also the value of the metric label `outcome`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpOutcome {
    /// The op succeeded.
    Done,
    /// Another process has bound the node port, and the agent tries another port.
    PortTaken,
    /// Packets arrived at the node port recently without a mapping, or the port's mapping was removed recently; the
    /// agent tries another port.
    RecentTraffic,
    /// The op failed, and the agent retries the op after a delay.
    Retry,
    /// The Pod was deleted.
    Gone,
}

impl OpOutcome {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::PortTaken => "port_taken",
            Self::RecentTraffic => "recent_traffic",
            Self::Retry => "retry",
            Self::Gone => "gone",
        }
    }
}

/// The outcome of a patch of a Pod; also the value of the metric label `outcome`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PatchOutcome {
    /// The API server applied the patch.
    Patched,
    /// The Pod was deleted.
    Gone,
    /// The API server answered 401 or 403: it rejects the agent's credentials or denies the permission.
    Denied,
    /// The API server or an admission policy rejected the patch.
    Refused,
    /// The API server answered 409, 429 or 5xx.
    Unavailable,
    /// The connection failed.
    Unreachable,
    /// The API server did not answer in time.
    TimedOut,
    /// The answer could not be decoded.
    Malformed,
}

impl PatchOutcome {
    pub(super) const fn as_str(self) -> &'static str {
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

/// The outcome of reporting a problem by a Kubernetes Event; also the value of the metric label `outcome`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventOutcome {
    /// A new Event was created.
    Created,
    /// The count of an existing Event was incremented.
    Repeated,
    /// Another agent has recently created the same Event about a Service, or incremented its count.
    Shared,
    /// The namespace is deleted or terminating, and no Event is needed.
    Gone,
    /// The agent lacks a permission.
    Denied,
    /// The request failed for a reason that no other variant covers, and the agent retries the request.
    Failed,
}

impl EventOutcome {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Repeated => "repeated",
            Self::Shared => "shared",
            Self::Gone => "gone",
            Self::Denied => "denied",
            Self::Failed => "failed",
        }
    }
}

/// The kind of a failed request to the API server; also the value of the metric label `kind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FailureKind {
    /// 401: the API server does not accept the token.
    Unauthorized,
    /// 403: the agent lacks a permission.
    Forbidden,
    /// 410: the resource version of the watch is too old, and the watch starts again with a list.
    Expired,
    /// The resource versions decreased, as after a restore of etcd from a backup. The agent lists all objects again.
    Restored,
    /// 429 and 5xx: the API server is temporarily unable to answer.
    Unavailable,
    /// An HTTP status that is not a success, and that no other variant covers.
    Rejected,
    /// No answer: the connection failed, or the answer did not arrive in time.
    Unreachable,
    /// The answer could not be decoded.
    Malformed,
}

impl FailureKind {
    /// Returns the value of the metric label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::Forbidden => "forbidden",
            Self::Expired => "expired",
            Self::Restored => "restored",
            Self::Unavailable => "unavailable",
            Self::Rejected => "rejected",
            Self::Unreachable => "unreachable",
            Self::Malformed => "malformed",
        }
    }

    /// Returns whether the watch recovers from the failure by a new list. The API server has answered in this case, so
    /// the objects that the agent has received do not count as outdated.
    pub const fn only_restarts_watch(self) -> bool {
        matches!(self, Self::Expired | Self::Restored)
    }
}

/// The resource of a watch; also the value of the metric label `subject`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WatchedResource {
    /// Pods: for the agent, those of its Node; for the feed, those of all Nodes.
    Pods,
    /// The Services that `--namespaces` and `--service-selector` (agent) or `--services` (feed) select; without these
    /// flags, all Services.
    Services,
    /// Nodes: for the agent, only its own Node; for the feed, all Nodes.
    Node,
}

impl WatchedResource {
    /// Returns the value of the metric label.
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

/// The kind of an [`Op`]; also the value of the metric label `op`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OpName {
    /// Bind a socket to the node port.
    Reserve,
    /// Write allowed sources.
    AllowSources,
    /// Write a mapping.
    UpsertMapping,
    /// Write or remove an annotation.
    Annotate,
    /// Set the condition of a Pod's readiness gate.
    OpenGate,
    /// Remove a mapping.
    RemoveMapping,
    /// Remove allowed sources.
    ForgetSources,
    /// Close the socket of the node port.
    Release,
}

impl OpName {
    /// Returns the kind of an op.
    pub const fn of(op: &Op) -> Self {
        match op {
            Op::Reserve(..) => Self::Reserve,
            Op::AllowSources(..) => Self::AllowSources,
            Op::UpsertMapping(..) => Self::UpsertMapping,
            Op::WritePod { value: PodWrite::Set(_) | PodWrite::Withdraw, .. } => Self::Annotate,
            Op::WritePod { value: PodWrite::OpenGate(_), .. } => Self::OpenGate,
            Op::RemoveMapping(_) => Self::RemoveMapping,
            Op::ForgetSources(..) => Self::ForgetSources,
            Op::Release(_) => Self::Release,
        }
    }

    /// Returns the value of the label.
    pub const fn as_str(self) -> &'static str {
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
    pub(super) const fn as_str(self) -> &'static str {
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
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Attached => "attached",
            Self::Failed => "failed",
        }
    }
}

/// The kind of the program that translates the requests that arrive on a device; also the value of the metric label
/// `kind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestProgram {
    /// An XDP program translates requests.
    Xdp,
    /// A program with a TCX link translates requests.
    Tcx,
    /// A filter of a clsact qdisc translates requests, as on kernels before Linux 6.6.
    Clsact,
}

impl RequestProgram {
    /// Returns the kind for a device: whether an XDP program is attached there, and whether TC programs are attached as
    /// filters.
    pub const fn of(has_xdp: bool, are_filters: bool) -> Self {
        match (has_xdp, are_filters) {
            (true, _) => Self::Xdp,
            (false, false) => Self::Tcx,
            (false, true) => Self::Clsact,
        }
    }

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Xdp => "xdp",
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }
}

/// Why an entry was removed from one of NPL's flow tables; also the value of the metric label `cause`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RemovalCause {
    /// The connection had ended, or had been idle for longer than its timeout.
    Expired,
    /// The mapping was removed.
    MappingRemoved,
    /// The map was full, so the kernel evicted the entry.
    Evicted,
}

impl RemovalCause {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::MappingRemoved => "mapping_removed",
            Self::Evicted => "evicted",
        }
    }
}

/// A map whose entries only the sweeper counts; also the value of the metric label `table`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SweptTable {
    /// The half-open cache.
    HalfOpen,
    /// The map of socket reverse NAT.
    SocketReverseNat,
}

impl SweptTable {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::HalfOpen => "half_open",
            Self::SocketReverseNat => "socket_reverse_nat",
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
    RequestProgram,
    RemovalCause,
    SweptTable,
    Family,
    Protocol,
    WatchedResource,
    FailureKind,
    RepairedObject
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
pub(super) struct SubjectLabel {
    pub(super) subject: WatchedResource,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct FamilyLabel {
    pub(super) family: Family,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct FlowTableLabels {
    pub(super) family: Family,
    pub(super) protocol: Protocol,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ProtocolLabel {
    pub(super) protocol: Protocol,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct RemovalLabels {
    pub(super) family: Family,
    pub(super) cause: RemovalCause,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct TableLabels {
    pub(super) table: SweptTable,
    pub(super) family: Family,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct PortLabels {
    pub(super) family: Family,
    pub(super) protocol: Protocol,
    pub(super) state: PortState,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct DeviceLabel {
    pub(super) state: DeviceState,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
pub(super) struct DeviceInfoLabels {
    pub(super) device: String,
    pub(super) kind: RequestProgram,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct RepairLabel {
    pub(super) object: RepairedObject,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ReasonLabel {
    pub(super) reason: &'static str,
}
