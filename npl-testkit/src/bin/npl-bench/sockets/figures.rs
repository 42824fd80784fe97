// SPDX-License-Identifier: Apache-2.0
//! What is measured with sockets, and what each figure should be.

use npl_agent::core::devices::redirect::Forwarding;

use crate::figures::{Aim, Figure, Stage, figure};

/// What everything is measured beside.
const DIRECT: &str = "the Pod's own address";

/// The figures of one way of forwarding.
pub(super) struct Way {
    pub(super) forwarding: Forwarding,
    /// A question and its answer, of a byte each, over an open connection.
    pub(super) latency: Figure,
    /// What all but a hundredth of these take at most, turn by turn.
    pub(super) latency_p99: Figure,
    /// As much as goes through one connection.
    pub(super) stream: Figure,
    /// And through several at once.
    pub(super) streams: Figure,
    /// As much as goes through one that differs from the other in nothing.
    pub(super) itself: Option<&'static Figure>,
}

/// Connections of [`Way::streams`].
pub(super) const STREAMS: usize = 16;

macro_rules! way {
    ($forwarding:expr, $name:literal, $latency:expr, $itself:expr) => {
        Way {
            forwarding: $forwarding,
            latency: figure(concat!("traffic/rr-p50-", $name), "µs", Stage::Sockets, $latency).beside(DIRECT),
            latency_p99: figure(concat!("traffic/rr-p99-", $name), "µs", Stage::Sockets, $latency).beside(DIRECT),
            stream: figure(concat!("traffic/stream-1-", $name), "Gbit/s", Stage::Sockets, FAST).beside(DIRECT),
            streams: figure(concat!("traffic/stream-16-", $name), "Gbit/s", Stage::Sockets, FAST).beside(DIRECT),
            itself: $itself,
        }
    };
}

/// The Pod's own address beside itself: what the machine makes of connections that differ in nothing.
static ITSELF: Figure = figure("traffic/stream-1-itself", "Gbit/s", Stage::Sockets, &[]).beside(DIRECT);

/// A mapping may take a fiftieth of what goes through.
const FAST: &[Aim] = &[Aim::LeastRatio(0.98)];

/// Through the host's stack, where a mapping may cost a twentieth more.
pub(super) static STACK: Way = way!(Forwarding::Stack, "stack", &[Aim::Ratio(1.05)], Some(&ITSELF));
/// Past it, which has to be ahead of what goes through.
pub(super) static REDIRECT: Way = way!(Forwarding::Redirect, "redirect", &[Aim::Ratio(1.0)], None);
/// Past it too, while it lets them through.
pub(super) static OFFLOAD: Way = way!(Forwarding::Offload, "offload", &[Aim::Ratio(1.0)], None);

/// All of them, in the order in which they are shown.
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
