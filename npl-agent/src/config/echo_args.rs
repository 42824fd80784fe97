// SPDX-License-Identifier: Apache-2.0
//! The hidden commands that the Pods of `kubectl npl test`, `kubectl npl on` and `kubectl npl bundle` run.

use std::{fmt, str::FromStr};

use clap::{Args, Subcommand};

use crate::core::{model::Protocol, path_test::Probe};

/// The commands of the echo server and of its clients.
#[derive(Debug, Clone, Subcommand)]
pub enum EchoCommand {
    /// Serve until the process is killed: return each payload, with the name of the server and the client's address.
    Serve(EchoServeArgs),
    /// Send the requests at the same time, and print the result of each request as an element of a JSON array.
    Ask {
        /// The requests.
        #[arg(value_name = "PROTOCOL,ADDRESS:PORT,BYTES", required = true)]
        probes: Vec<Probe>,
    },
    /// Wait until the process is killed. Keeps the Pods of `kubectl npl on --create-pod` and of `kubectl npl bundle
    /// --create-pods` running.
    Wait,
    /// Print the addresses of all network devices as a JSON array.
    Addresses,
    /// Open one connection. Send one request at the start and one for each line of standard input, and print the result
    /// of each request as a line of JSON.
    Hold {
        /// The request.
        #[arg(value_name = "PROTOCOL,ADDRESS:PORT,BYTES")]
        probe: Probe,
    },
}

/// Flags of `echo serve`.
#[derive(Debug, Clone, Args)]
pub struct EchoServeArgs {
    /// The name that answers contain.
    #[arg(long)]
    pub name: String,

    /// Listen on these ports, separated by commas.
    #[arg(long, value_name = "PROTOCOL:PORT", value_delimiter = ',', required = true)]
    pub listen: Vec<Listen>,
}

/// A port of the echo server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listen {
    /// The transport protocol.
    pub protocol: Protocol,
    /// The port.
    pub port: u16,
}

impl FromStr for Listen {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (protocol, port) = text.split_once(':').ok_or("give PROTOCOL:PORT, for example tcp:7777")?;
        let (protocol, port) = (protocol.parse().ok(), port.parse().ok());
        protocol.zip(port).map(|(protocol, port)| Self { protocol, port }).ok_or("the protocol or port is invalid")
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.protocol, self.port)
    }
}
