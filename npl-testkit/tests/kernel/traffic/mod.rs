// SPDX-License-Identifier: Apache-2.0
//! Tests real connections from a client through the Node to Pods. Client and Pod verify the data.

mod big_tcp;
mod cni_rules;
mod device_offloads;
mod devices;
mod direct_connections;
mod errors;
mod firewall;
mod flood;
mod flow_offload;
mod foreign_tc;
mod forged;
mod forged_host_connection;
mod fragment_flood;
mod fragments;
mod guard;
mod hardened;
mod kernel_conntrack;
mod kernel_nat_errors;
mod masquerade;
mod netkit;
mod next_hop_cache;
mod open_vswitch;
mod point_to_point;
mod policy_engine;
mod redirect;
mod requests;
mod reverse_path;
mod sctp;
mod sources;
mod tunnels;
mod unmapped;
mod uplinks;
mod wireguard;
