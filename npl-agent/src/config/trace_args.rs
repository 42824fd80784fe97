// SPDX-License-Identifier: Apache-2.0
//! The command line of `npl-agent trace`.

use std::{path::PathBuf, time::Duration};

use clap::Args;

use super::{args::NodeViewArgs, value};
use crate::core::model::{Protocol, sources::SourceRange};

/// Flags of `trace`.
#[derive(Debug, Clone, Args)]
pub struct TraceArgs {
    /// The sources of the Node's state, and the output format; JSON is one object per line.
    #[command(flatten)]
    pub node: NodeViewArgs,

    /// Follow only the packets of clients with this address or in this range.
    #[arg(long, value_name = "IP|CIDR")]
    pub client: Option<SourceRange>,

    /// Follow only the packets from and to this port of the client.
    #[arg(long, value_name = "PORT")]
    pub client_port: Option<u16>,

    /// Follow only the packets to and from this node port.
    #[arg(long, value_name = "PORT")]
    pub node_port: Option<u16>,

    /// Follow only the packets of Pods in this namespace; needs --pod.
    #[arg(long, short, value_name = "NAME", requires = "pod")]
    pub namespace: Option<String>,

    /// Follow only the packets of Pods whose name begins with this text: packets to the Pods' node ports, and packets
    /// to and from the Pods' addresses. Needs a running agent.
    #[arg(long, value_name = "NAME")]
    pub pod: Option<String>,

    /// Follow only the packets of this protocol (tcp, udp or sctp), and ICMP errors that quote such packets.
    #[arg(long, value_name = "PROTOCOL")]
    pub protocol: Option<Protocol>,

    /// End after this many records.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,

    /// End after this time. Give numbers with the units ms, s, m and h.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = value::duration)]
    pub duration: Duration,

    /// Record at most this many packets per second on each CPU.
    #[arg(long, value_name = "NUMBER", default_value = "1000", value_parser = clap::value_parser!(u64).range(1..))]
    pub rate: u64,

    /// Write the first 128 bytes of each packet, before and after translation, to this new pcapng file instead of
    /// printing the records; `-` means standard output.
    #[arg(long, value_name = "FILE")]
    pub pcap: Option<PathBuf>,
}
