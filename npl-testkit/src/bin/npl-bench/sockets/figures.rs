// SPDX-License-Identifier: Apache-2.0
//! The figures measured with sockets, and their goals.

use npl_agent::core::devices::redirect::Forwarding;

use crate::figures::{Aim, Figure, Stage, figure};

/// The reference of all figures.
const DIRECT: &str = "the Pod's own address";

/// The figures of one forwarding mode.
pub(super) struct ModeFigures {
    pub(super) forwarding: Forwarding,
    /// The round-trip time of a one-byte request over an open connection.
    pub(super) latency: Figure,
    /// The 99th percentile of the round-trip time, per turn.
    pub(super) latency_p99: Figure,
    /// The throughput of one connection.
    pub(super) stream: Figure,
    /// The throughput of several connections together.
    pub(super) streams: Figure,
    /// The throughput of one connection to the Pod's own address, compared with the throughput of another connection to
    /// this address. The ratio of the two throughputs shows the measurement noise.
    pub(super) itself: Option<&'static Figure>,
}

/// The number of connections of [`ModeFigures::streams`].
pub(super) const STREAMS: usize = 16;

macro_rules! mode_figures {
    ($forwarding:expr, $name:literal, $latency:expr, $itself:expr) => {
        ModeFigures {
            forwarding: $forwarding,
            latency: figure(concat!("traffic/rr-p50-", $name), "µs", Stage::Sockets, $latency).beside(DIRECT),
            latency_p99: figure(concat!("traffic/rr-p99-", $name), "µs", Stage::Sockets, $latency).beside(DIRECT),
            stream: figure(concat!("traffic/stream-1-", $name), "Gbit/s", Stage::Sockets, FAST).beside(DIRECT),
            streams: figure(concat!("traffic/stream-16-", $name), "Gbit/s", Stage::Sockets, FAST).beside(DIRECT),
            itself: $itself,
        }
    };
}

/// The Pod's own address compared with itself: the noise of the measurement.
static ITSELF: Figure = figure("traffic/stream-1-itself", "Gbit/s", Stage::Sockets, &[]).beside(DIRECT);

/// A mapping may reduce the throughput by at most 2 %.
const FAST: &[Aim] = &[Aim::LeastRatio(0.98)];

/// Forwarding through the host's stack: a mapping may increase the latency by at most 5 %.
pub(super) static STACK: ModeFigures = mode_figures!(Forwarding::Stack, "stack", &[Aim::Ratio(1.05)], Some(&ITSELF));
/// Redirect, which bypasses the stack: the latency must not exceed the latency of the Pod's own address.
pub(super) static REDIRECT: ModeFigures = mode_figures!(Forwarding::Redirect, "redirect", &[Aim::Ratio(1.0)], None);
/// Offload, which bypasses the stack for flows that the stack has forwarded before: the latency must not exceed the
/// latency of the Pod's own address.
pub(super) static OFFLOAD: ModeFigures = mode_figures!(Forwarding::Offload, "offload", &[Aim::Ratio(1.0)], None);

/// All figures, in display order.
pub(crate) static FIGURES: [&Figure; 13] = [
    &STACK.latency,
    &STACK.latency_p99,
    &REDIRECT.latency,
    &REDIRECT.latency_p99,
    &OFFLOAD.latency,
    &OFFLOAD.latency_p99,
    &STACK.stream,
    &ITSELF,
    &STACK.streams,
    &REDIRECT.stream,
    &REDIRECT.streams,
    &OFFLOAD.stream,
    &OFFLOAD.streams,
];
