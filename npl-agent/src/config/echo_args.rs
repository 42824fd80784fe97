// SPDX-License-Identifier: Apache-2.0
//! The hidden commands that the Pods of `kubectl npl test` run.

use clap::{Args, Subcommand};

use crate::core::{model::Protocol, path_test::Probe};

/// The commands of the echo server and of its clients.
#[derive(Debug, Clone, Subcommand)]
pub enum EchoCommand {
    /// Serve until the process is killed: return each payload, with the name of the server and the client's address.
    Serve(EchoServeArgs),
    /// Send requests at the same time, and print the observations as a JSON array.
    Ask {
        /// The requests.
        #[arg(value_name = "PROTOCOL,ADDRESS:PORT,BYTES", required = true)]
        probes: Vec<Probe>,
    },
    /// Open one connection. Send one request at the start and one for each line of standard input, and print each
    /// observation as a line of JSON.
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

    /// The port.
    #[arg(long)]
    pub port: u16,

    /// The protocols.
    #[arg(long, value_delimiter = ',', required = true)]
    pub protocols: Vec<Protocol>,
}
