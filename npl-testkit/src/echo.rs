// SPDX-License-Identifier: Apache-2.0
//! Echo servers in network namespaces.

use anyhow::Result;
pub use npl_echo::{Answer, PADDED, Protocol, pattern};

use crate::netns::Netns;

/// A running echo server of the crate `npl-echo`. Dropping this value stops the server.
#[derive(Debug)]
pub struct EchoServer {
    _running: npl_echo::EchoServer,
}

impl EchoServer {
    /// Serves TCP and UDP on all `ports`, in the namespace of the calling thread.
    pub fn start(pod: &str, ports: &[u16]) -> Result<Self> {
        Ok(Self { _running: npl_echo::EchoServer::start(pod, ports)? })
    }

    /// Starts a server as [`Self::start`] does, inside `netns`.
    pub fn start_in(netns: &Netns, pod: &str, ports: &[u16]) -> Result<Self> {
        netns.run(|| Self::start(pod, ports))?
    }

    /// Starts a server as [`Self::start_in`] does, for SCTP only.
    pub fn start_sctp_in(netns: &Netns, pod: &str, port: u16) -> Result<Self> {
        netns.run(|| Ok(Self { _running: npl_echo::EchoServer::start_sctp(pod, port)? }))?
    }
}
