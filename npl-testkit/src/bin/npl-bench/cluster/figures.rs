// SPDX-License-Identifier: Apache-2.0
//! The figures of a real cluster, and their goals.

use crate::figures::{Aim, Figure, Stage, figure};

/// The goal for latencies and CPU times: a request through a mapping takes at most 5 % more time than a request to the
/// Pod's own address.
const NEAR: &[Aim] = &[Aim::Ratio(1.05)];
/// The goal for latencies and CPU times: a request through a mapping takes at most as much time as a request through a
/// Service of kube-proxy.
const AHEAD: &[Aim] = &[Aim::Ratio(1.0)];
/// The goal for request rates: the rate through a mapping is at least 95 % of the rate to the Pod's own address.
const NEAR_RATE: &[Aim] = &[Aim::LeastRatio(0.95)];
const AHEAD_RATE: &[Aim] = &[Aim::LeastRatio(1.0)];

/// The figures that compare the mapping with one other address of the Pod.
pub(super) struct AddressFigures {
    pub(super) request: Figure,
    pub(super) rate: Figure,
    pub(super) connection: Figure,
    pub(super) busy: Figure,
}

/// The figures that compare the mapping with every other address of the Pod, on one cluster.
pub(super) struct ClusterFigures {
    /// `None` if clients outside of the cluster have no route to Pods.
    pub(super) own: Option<AddressFigures>,
    pub(super) same_node: AddressFigures,
    /// `None` if the Service serves its node port only on the Nodes of its Pods.
    pub(super) other_node: Option<AddressFigures>,
}

macro_rules! address_figures {
    ($stage:expr, $mode:literal, $to:literal, $beside:literal, $aims:expr, $rate_aims:expr) => {
        AddressFigures {
            request: figure(concat!("cluster/", $mode, "/request-", $to), "µs", $stage, $aims).beside($beside),
            rate: figure(concat!("cluster/", $mode, "/requests-per-second-", $to), "1/s", $stage, $rate_aims)
                .beside($beside),
            connection: figure(concat!("cluster/", $mode, "/connection-", $to), "µs", $stage, $aims).beside($beside),
            busy: figure(concat!("cluster/", $mode, "/request-cpu-", $to), "µs", $stage, $aims).beside($beside),
        }
    };
}

macro_rules! cluster_figures {
    ($stage:expr, $mode:literal) => {
        ClusterFigures {
            own: Some(address_figures!($stage, $mode, "own-address", "the Pod's own address", NEAR, NEAR_RATE)),
            same_node: address_figures!($stage, $mode, "same-node", "NodePort, the Pod's Node", AHEAD, AHEAD_RATE),
            other_node: Some(address_figures!(
                $stage,
                $mode,
                "other-node",
                "NodePort, another Node",
                AHEAD,
                AHEAD_RATE
            )),
        }
    };
}

/// The figures with kube-proxy in iptables mode, and with NPL's `--forwarding stack`.
pub(super) static IPTABLES: ClusterFigures = cluster_figures!(Stage::Iptables, "iptables");
/// The figures with kube-proxy in iptables mode, and with NPL's `--forwarding offload`.
pub(super) static IPTABLES_OFFLOAD: ClusterFigures = cluster_figures!(Stage::Iptables, "iptables-offload");
/// The figures with kube-proxy in nftables mode, and with NPL's `--forwarding stack`.
pub(super) static NFTABLES: ClusterFigures = cluster_figures!(Stage::Nftables, "nftables");
/// The figures with kube-proxy in nftables mode, and with NPL's `--forwarding offload`.
pub(super) static NFTABLES_OFFLOAD: ClusterFigures = cluster_figures!(Stage::Nftables, "nftables-offload");
/// The figures with Cilium in place of kube-proxy, and with NPL's `--forwarding stack`. The Service has the external
/// traffic policy `Local`, with which Cilium, like NPL, keeps the client's address.
pub(super) static CILIUM: ClusterFigures = ClusterFigures {
    own: None,
    same_node: address_figures!(Stage::Cilium, "cilium", "same-node", "Cilium's NodePort", AHEAD, AHEAD_RATE),
    other_node: None,
};

/// The time from the creation of a Pod object until the Pod has an address, when many Pods are started at the same
/// time.
pub(super) static ADDRESS: Figure = figure("cluster/created-to-address", "ms", Stage::Crowd, &[]);
/// The time until a Pod that has an address is annotated.
pub(super) static ANNOTATION: Figure = figure("cluster/address-to-annotation", "ms", Stage::Crowd, &[]);
/// The time until a Pod that is annotated becomes ready.
pub(super) static MARGIN: Figure = figure("cluster/annotation-to-ready", "ms", Stage::Crowd, &[]);

/// Returns all figures, in display order.
pub(crate) fn figures() -> impl Iterator<Item = &'static Figure> {
    let comparisons = [&IPTABLES, &IPTABLES_OFFLOAD, &NFTABLES, &NFTABLES_OFFLOAD, &CILIUM];
    let of_requests = comparisons
        .into_iter()
        .flat_map(|ClusterFigures { own, same_node, other_node }| own.iter().chain([same_node]).chain(other_node));
    let of_requests =
        of_requests.flat_map(|AddressFigures { request, rate, connection, busy }| [request, rate, connection, busy]);
    of_requests.chain([&ADDRESS, &ANNOTATION, &MARGIN])
}
