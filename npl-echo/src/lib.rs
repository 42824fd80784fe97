// SPDX-License-Identifier: Apache-2.0
//! The echo server, which stands in for a Pod's application: it reports its own name and the client's address. This
//! crate also contains the code that the programs `npl-echo` and `npl-pause` share with npl-testkit, so that building
//! the images of the two programs does not compile npl-testkit. This crate is never released.
//!
//! The server answers every UDP datagram and every TCP line with one line of JSON. A datagram that begins with `PAD
//! <bytes>` requests a response of that length, padded with blanks. Three first words of a TCP line are special. `GET`
//! requests an HTTP response. After `UPLOAD <bytes> <seed>`, the client sends that many bytes of [`pattern::Pattern`],
//! and the server returns the digest of these bytes. `DOWNLOAD <bytes> <seed>` requests that many bytes of the pattern.

pub mod interrupt;
pub mod pattern;
pub mod poll;
pub mod reaper;
mod server;
mod tcp;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

pub use self::server::EchoServer;

/// The first word of a datagram that requests a response of a certain length.
pub const PADDED: &str = "PAD";

/// The server's response to one request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The name of the responding server.
    pub pod: String,
    /// The Node of the server, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The client's address as the server sees it.
    pub client: SocketAddr,
    /// `tcp`, `udp` or `sctp`.
    pub protocol: Protocol,
    /// The length of the request in bytes.
    pub received: u64,
    /// The [`pattern::Digest`] of the request in hexadecimal, which identifies the request and proves that the request
    /// arrived unchanged.
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
    /// SCTP with one-to-one sockets, which not every kernel supports.
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
