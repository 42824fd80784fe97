// SPDX-License-Identifier: Apache-2.0
//! The echo server that stands in for a Pod's application: it says who it is and whom it sees.
//!
//! Over UDP every datagram is answered by one line of JSON; after `PAD <bytes>` with as many bytes, the rest of them
//! blanks. Over TCP every line is, and three first words are special: `GET` is answered by HTTP, `UPLOAD <bytes> <seed>`
//! is followed by that many bytes of [`pattern::Pattern`], whose digest is answered, and `DOWNLOAD <bytes> <seed>` is
//! answered by them.

pub mod pattern;
mod server;
mod tcp;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

pub use self::server::EchoServer;

/// First word of a datagram that tells how long its answer has to be.
pub const PADDED: &str = "PAD";

/// What the server says about one request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The name of the server that answered.
    pub pod: String,
    /// The Node that the server says it runs on, if it knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The client's address as the server sees it.
    pub client: SocketAddr,
    /// `tcp`, `udp` or `sctp`.
    pub protocol: Protocol,
    /// The length of the request in bytes.
    pub received: u64,
    /// [`pattern::Digest`] of the request, in hexadecimal: that it came unchanged, and which request is answered.
    pub digest: String,
}

/// A transport protocol of the echo server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP by one-to-one sockets, which not every kernel has.
    Sctp,
}

impl std::fmt::Display for Protocol {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        })
    }
}
