// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//! Describes all kernel programs, for `docs/reference/maps.md`.

use crate::names::{
    PROG_EGRESS, PROG_EGRESS_L3, PROG_EGRESS_OFFLOAD, PROG_INGRESS, PROG_INGRESS_L3, PROG_INGRESS_OFFLOAD,
    PROG_INGRESS_REDIRECT, PROG_PODS_OFFLOAD, PROG_PODS_REDIRECT, PROG_TO_PODS, PROG_XDP, PROG_XDP_FRAGS,
    SLOW_PATH_PROGRAMS,
};

/// A kernel program.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// The name of the program.
    pub name: &'static str,
    /// The hook at which the kernel runs the program, and the device or cgroup.
    pub hook: &'static str,
    /// The options with which the agent attaches the program; for a slow-path program, the names of the programs that
    /// call it.
    pub used_with: &'static str,
    /// The purpose of the program.
    pub purpose: &'static str,
}

const TAIL_CALL: &str = "tail call";
const CGROUP: &str = "`--cgroup` other than `none`";
const EVERY_MODE: &str = "every mode";
const STACK: &str = "`--forwarding stack`";
const REDIRECT: &str = "`--forwarding redirect`";
const OFFLOAD: &str = "`--forwarding offload`";
const UPLINK_INGRESS: &str = "TC ingress of uplinks";
const UPLINK_EGRESS: &str = "TC egress of uplinks";
const POD_INGRESS: &str = "TC ingress of the Pods' devices";
const DNAT: &str = "Translates requests.";
const REVERSE_NAT: &str = "Translates replies.";
const SLOW_REQUESTS_V4: &str =
    "Translates IPv4 requests that are fragments, SCTP packets or ICMP errors, or have options.";
const SLOW_REQUESTS_V6: &str =
    "Translates IPv6 requests that are fragments, SCTP packets or ICMP errors, or have extension headers.";
const SLOW_REPLIES_V4: &str =
    "Translates IPv4 replies that are fragments, SCTP packets or ICMP errors, or have options.";
const SLOW_REPLIES_V6: &str =
    "Translates IPv6 replies that are fragments, SCTP packets or ICMP errors, or have extension headers.";
const CONNECT: &str =
    "Replaces the node address and node port by the Pod address and Pod port in system calls of local clients.";
const SHOW_PEER: &str =
    "Returns to a local client the address that the client connected to, in place of the Pod's address.";

const fn program(name: &'static str, hook: &'static str, used_with: &'static str, purpose: &'static str) -> Program {
    Program { name, hook, used_with, purpose }
}

/// Every program. The slow-path programs are in the order of their indexes in
/// [`MAP_SLOW_PATH`](crate::names::MAP_SLOW_PATH).
pub const PROGRAM_LIST: &[Program] = &[
    program(PROG_INGRESS, UPLINK_INGRESS, STACK, DNAT),
    program(PROG_EGRESS, UPLINK_EGRESS, "`--forwarding stack` and `redirect`", REVERSE_NAT),
    program(PROG_INGRESS_L3, "TC ingress of uplinks without Ethernet header", EVERY_MODE, DNAT),
    program(PROG_EGRESS_L3, "TC egress of uplinks without Ethernet header", EVERY_MODE, REVERSE_NAT),
    program(PROG_INGRESS_REDIRECT, UPLINK_INGRESS, REDIRECT, "Translates requests and redirects them to the Pod."),
    program(PROG_PODS_REDIRECT, POD_INGRESS, REDIRECT, "Translates replies and redirects them to the uplink."),
    program(
        PROG_INGRESS_OFFLOAD,
        UPLINK_INGRESS,
        OFFLOAD,
        "Translates requests and redirects those of offloaded flows to the Pod.",
    ),
    program(
        PROG_EGRESS_OFFLOAD,
        UPLINK_EGRESS,
        OFFLOAD,
        "Translates replies that the stack has forwarded, and records stack observations of these replies.",
    ),
    program(
        PROG_PODS_OFFLOAD,
        POD_INGRESS,
        OFFLOAD,
        "Translates replies of offloaded flows and redirects them to the uplink.",
    ),
    program(
        PROG_TO_PODS,
        "TC egress of the Pods' devices, after all other programs",
        OFFLOAD,
        "Records stack observations of requests; changes no packet.",
    ),
    program(
        PROG_XDP,
        "XDP in the driver of uplinks, before Linux 5.18",
        "`--attach auto` or `xdp`, with `--forwarding stack`",
        DNAT,
    ),
    program(
        PROG_XDP_FRAGS,
        "XDP in the driver of uplinks, from Linux 5.18 on",
        "`--attach auto` or `xdp`, with `--forwarding stack`",
        DNAT,
    ),
    program(SLOW_PATH_PROGRAMS[0], TAIL_CALL, "`npl_ingress`, `npl_off_ingress`", SLOW_REQUESTS_V4),
    program(SLOW_PATH_PROGRAMS[1], TAIL_CALL, "`npl_ingress`, `npl_off_ingress`", SLOW_REQUESTS_V6),
    program(SLOW_PATH_PROGRAMS[2], TAIL_CALL, "`npl_egress`, `npl_off_egress`", SLOW_REPLIES_V4),
    program(SLOW_PATH_PROGRAMS[3], TAIL_CALL, "`npl_egress`, `npl_off_egress`", SLOW_REPLIES_V6),
    program(SLOW_PATH_PROGRAMS[4], TAIL_CALL, "`npl_ingress_l3`", SLOW_REQUESTS_V4),
    program(SLOW_PATH_PROGRAMS[5], TAIL_CALL, "`npl_ingress_l3`", SLOW_REQUESTS_V6),
    program(SLOW_PATH_PROGRAMS[6], TAIL_CALL, "`npl_egress_l3`", SLOW_REPLIES_V4),
    program(SLOW_PATH_PROGRAMS[7], TAIL_CALL, "`npl_egress_l3`", SLOW_REPLIES_V6),
    program(SLOW_PATH_PROGRAMS[8], TAIL_CALL, "`npl_rd_ingress`", SLOW_REQUESTS_V4),
    program(SLOW_PATH_PROGRAMS[9], TAIL_CALL, "`npl_rd_ingress`", SLOW_REQUESTS_V6),
    program(SLOW_PATH_PROGRAMS[10], TAIL_CALL, "`npl_rd_pods`", SLOW_REPLIES_V4),
    program(SLOW_PATH_PROGRAMS[11], TAIL_CALL, "`npl_rd_pods`", SLOW_REPLIES_V6),
    program(
        "npl_release",
        "cgroup v2, `sock_release`",
        CGROUP,
        "When a socket is closed, removes the socket's reverse NAT entries of up to 16 peers, and the list of these \
         peers.",
    ),
    program("npl_recvmsg4", "cgroup v2, `recvmsg4`", CGROUP, SHOW_PEER),
    program("npl_recvmsg6", "cgroup v2, `recvmsg6`", CGROUP, SHOW_PEER),
    program("npl_getpeer4", "cgroup v2, `getpeername4`", CGROUP, SHOW_PEER),
    program("npl_getpeer6", "cgroup v2, `getpeername6`", CGROUP, SHOW_PEER),
    program("npl_connect4", "cgroup v2, `connect4`", CGROUP, CONNECT),
    program("npl_connect6", "cgroup v2, `connect6`", CGROUP, CONNECT),
    program("npl_sendmsg4", "cgroup v2, `sendmsg4`", CGROUP, CONNECT),
    program("npl_sendmsg6", "cgroup v2, `sendmsg6`", CGROUP, CONNECT),
];
