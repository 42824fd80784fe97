// SPDX-License-Identifier: Apache-2.0
//! Real connections from a client over the Node to Pods, checked at both ends by what was sent.

mod big_tcp;
mod devices;
mod direct;
mod errors;
mod firewall;
mod flood;
mod foreign;
mod fragment_flood;
mod fragments;
mod guard;
mod masquerade;
mod netkit;
mod offload;
mod oracle;
mod past_others;
mod past_the_stack;
mod redirect;
mod requests;
mod reverse_path;
mod sctp;
mod sources;
mod surroundings;
mod tracking;
mod tunnels;
mod uplinks;
mod wireguard;
