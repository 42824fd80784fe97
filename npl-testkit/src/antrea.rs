// SPDX-License-Identifier: Apache-2.0
//! A model of Antrea's NodePortLocal on one Node: the sockets, iptables rules and annotations of Antrea's agent. The
//! model reproduces Antrea's observable behavior, and contains no code of Antrea.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::echo::Protocol;
use crate::netns::Netns;
use crate::tools;

/// The chain of the table `nat` that contains the rules of all mappings.
pub const CHAIN: &str = "ANTREA-NODE-PORT-LOCAL";

/// The fields of each element of the annotation, in addition to `podPort`, `nodeIP` and `nodePort`. These fields depend
/// on the version of Antrea.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `protocols`.
    V1_4,
    /// `protocol` and `protocols`.
    V1_7,
    /// `protocol` without `protocols`.
    V2_0,
    /// `protocol` and `ipFamily`.
    V2_6,
}

/// A mapping of a node port to a Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub node_port: u16,
    /// The protocol: TCP or UDP.
    pub protocol: Protocol,
    /// The Pod's address.
    pub pod_ip: Ipv4Addr,
    /// The Pod's port.
    pub pod_port: u16,
}

/// The running model. Dropping this value closes the model's sockets; its rules and annotations remain.
#[derive(Debug)]
pub struct Antrea {
    _sockets: Vec<Reservation>,
}

#[derive(Debug)]
enum Reservation {
    /// A socket that listens and never accepts.
    Tcp { _listener: TcpListener },
    /// A socket that is never read.
    Udp { _socket: UdpSocket },
}

impl Antrea {
    /// Starts the model: opens a socket for each mapping, and replaces the rules of an earlier model.
    ///
    /// # Errors
    /// Returns an error if a port is in use by another process, or if `iptables` fails.
    pub fn start(node: &Netns, mappings: &[Mapping]) -> Result<Self> {
        let reserve = || mappings.iter().map(reserve).collect::<Result<Vec<_>>>();
        let sockets = node.run(reserve)??;
        if iptables(node, &["-n", "-L", CHAIN]).is_err() {
            iptables(node, &["-N", CHAIN])?;
            for chain in ["PREROUTING", "OUTPUT"] {
                iptables(node, &["-A", chain, "-p", "all", "-m", "addrtype", "--dst-type", "LOCAL", "-j", CHAIN])?;
            }
        }
        flush(node)?;
        for Mapping { node_port, protocol, pod_ip, pod_port } in mappings {
            let (name, port) = (protocol.to_string(), node_port.to_string());
            let to = SocketAddr::from((*pod_ip, *pod_port)).to_string();
            let rule = ["-A", CHAIN, "-p", &name, "-m", &name, "--dport", &port, "-j", "DNAT", "--to-destination", &to];
            iptables(node, &rule)?;
        }
        Ok(Self { _sockets: sockets })
    }
}

impl Mapping {
    fn element(&self, format: Format, node_ip: IpAddr) -> Value {
        let Self { node_port, protocol, pod_port, .. } = self;
        let protocol = protocol.to_string();
        match format {
            Format::V1_4 => {
                json!({"podPort": pod_port, "nodeIP": node_ip, "nodePort": node_port, "protocols": [protocol]})
            }
            Format::V1_7 => {
                json!({"podPort": pod_port, "nodeIP": node_ip, "nodePort": node_port, "protocol": protocol, "protocols": [protocol]})
            }
            Format::V2_0 => {
                json!({"podPort": pod_port, "nodeIP": node_ip, "nodePort": node_port, "protocol": protocol})
            }
            Format::V2_6 => {
                json!({"podPort": pod_port, "nodeIP": node_ip, "nodePort": node_port, "protocol": protocol, "ipFamily": "IPv4"})
            }
        }
    }
}

/// The annotation of a Pod with these mappings. Antrea does not specify the order of the elements, so the model keeps
/// the order of `mappings`.
pub fn annotation(format: Format, node_ip: IpAddr, mappings: &[Mapping]) -> String {
    mappings.iter().map(|mapping| mapping.element(format, node_ip)).collect::<Value>().to_string()
}

/// Removes the rules of all mappings, as an operator does after the migration from Antrea to NPL.
///
/// # Errors
/// Returns an error if `iptables` fails.
pub fn flush(node: &Netns) -> Result<()> {
    iptables(node, &["-F", CHAIN]).map(drop)
}

/// The number of connections and UDP flows that the rules have translated. The rules are in the table `nat`, whose
/// chains only the first packet of each connection traverses.
///
/// # Errors
/// Returns an error if `iptables` fails, or if a counter cannot be parsed.
pub fn translated(node: &Netns) -> Result<u64> {
    let shown = iptables(node, &["-v", "-n", "-x", "-L", CHAIN])?;
    let rules = shown.lines().filter(|line| line.contains("DNAT"));
    let packets = |line: &str| line.split_whitespace().next().and_then(|count| count.parse::<u64>().ok());
    rules.map(|rule| packets(rule).with_context(|| format!("parse the counter of `{rule}`"))).sum()
}

fn reserve(mapping: &Mapping) -> Result<Reservation> {
    let address = (Ipv4Addr::UNSPECIFIED, mapping.node_port);
    let reserved = match mapping.protocol {
        Protocol::Tcp => TcpListener::bind(address).map(|listener| Reservation::Tcp { _listener: listener }),
        Protocol::Udp => UdpSocket::bind(address).map(|socket| Reservation::Udp { _socket: socket }),
        Protocol::Sctp => bail!("Antrea does not support SCTP"),
    };
    reserved.with_context(|| format!("bind {} port {}", mapping.protocol, mapping.node_port))
}

fn iptables(node: &Netns, arguments: &[&str]) -> Result<String> {
    tools::output(node.command("iptables")?.args(["-w", "-t", "nat"]).args(arguments))
}
