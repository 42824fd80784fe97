// SPDX-License-Identifier: Apache-2.0
//! What is measured on a real cluster, and what each figure should be.

use crate::figures::{Aim, Figure, Stage, figure};

/// The mapping may cost a twentieth more than the Pod's own address.
const NEAR: &[Aim] = &[Aim::Ratio(1.05)];
/// And has to be ahead of kube-proxy.
const AHEAD: &[Aim] = &[Aim::Ratio(1.0)];
/// The same for what should be much.
const NEAR_RATE: &[Aim] = &[Aim::LeastRatio(0.95)];
const AHEAD_RATE: &[Aim] = &[Aim::LeastRatio(1.0)];

/// The mapping beside one other way to the Pod.
pub(super) struct Way {
    pub(super) request: Figure,
    pub(super) rate: Figure,
    pub(super) connection: Figure,
    pub(super) busy: Figure,
}

/// The ways that are measured beside the mapping on one cluster.
pub(super) struct Ways {
    pub(super) own: Way,
    pub(super) same_node: Way,
    pub(super) other_node: Way,
}

macro_rules! way {
    ($stage:expr, $mode:literal, $to:literal, $beside:literal, $aims:expr, $rate_aims:expr) => {
        Way {
            request: figure(concat!("cluster/", $mode, "/request-", $to), "µs", $stage, $aims).beside($beside),
            rate: figure(concat!("cluster/", $mode, "/requests-per-second-", $to), "1/s", $stage, $rate_aims)
                .beside($beside),
            connection: figure(concat!("cluster/", $mode, "/connection-", $to), "µs", $stage, $aims).beside($beside),
            busy: figure(concat!("cluster/", $mode, "/request-cpu-", $to), "µs", $stage, $aims).beside($beside),
        }
    };
}

macro_rules! ways {
    ($stage:expr, $mode:literal) => {
        Ways {
            own: way!($stage, $mode, "own-address", "the Pod's own address", NEAR, NEAR_RATE),
            same_node: way!($stage, $mode, "same-node", "NodePort, the Pod's Node", AHEAD, AHEAD_RATE),
            other_node: way!($stage, $mode, "other-node", "NodePort, another Node", AHEAD, AHEAD_RATE),
        }
    };
}

/// Beside kube-proxy in the one mode.
pub(super) static IPTABLES: Ways = ways!(Stage::Iptables, "iptables");
/// The same with agents that offload.
pub(super) static IPTABLES_OFFLOAD: Ways = ways!(Stage::Iptables, "iptables-offload");
/// And in the other mode.
pub(super) static NFTABLES: Ways = ways!(Stage::Nftables, "nftables");
/// The same with agents that offload.
pub(super) static NFTABLES_OFFLOAD: Ways = ways!(Stage::Nftables, "nftables-offload");

/// From a Pod's object to its address, of Pods that are started at once.
pub(super) static ADDRESS: Figure = figure("cluster/created-to-address", "ms", Stage::Crowd, &[]);
/// From a Pod's address to its annotation.
pub(super) static ANNOTATION: Figure = figure("cluster/address-to-annotation", "ms", Stage::Crowd, &[]);
/// From a Pod's annotation to its readiness.
pub(super) static MARGIN: Figure = figure("cluster/annotation-to-ready", "ms", Stage::Crowd, &[]);

/// All of them, in the order in which they are shown.
pub(crate) fn figures() -> impl Iterator<Item = &'static Figure> {
    let ways = [&IPTABLES, &IPTABLES_OFFLOAD, &NFTABLES, &NFTABLES_OFFLOAD];
    let of_requests = ways.into_iter().flat_map(|Ways { own, same_node, other_node }| [own, same_node, other_node]);
    let of_requests = of_requests.flat_map(|Way { request, rate, connection, busy }| [request, rate, connection, busy]);
    of_requests.chain([&ADDRESS, &ANNOTATION, &MARGIN])
}
