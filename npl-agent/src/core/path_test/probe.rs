// SPDX-License-Identifier: Apache-2.0
//! A request to an echo Pod, and the client's observation. A client in a Pod gets its requests as command-line
//! arguments and prints its observations as JSON.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

use crate::core::model::Protocol;

/// One request to an echo Pod. The text form is, for example, `tcp,192.0.2.1:61000,64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// The transport protocol of the request.
    pub protocol: Protocol,
    /// The destination of the request.
    pub address: SocketAddr,
    /// The length of the payload in bytes.
    pub bytes: usize,
}

/// The error for a text that is not a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a request: give PROTOCOL,ADDRESS:PORT,BYTES, for example tcp,192.0.2.1:61000,64")]
pub struct UnknownProbe;

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{},{}", self.protocol, self.address, self.bytes)
    }
}

impl FromStr for Probe {
    type Err = UnknownProbe;

    fn from_str(text: &str) -> Result<Self, UnknownProbe> {
        let parts: Vec<&str> = text.split(',').collect();
        let [protocol, address, bytes] = parts.as_slice() else { return Err(UnknownProbe) };
        Ok(Self {
            protocol: protocol.parse().map_err(|_unknown| UnknownProbe)?,
            address: address.parse().map_err(|_invalid| UnknownProbe)?,
            bytes: bytes.parse().map_err(|_invalid| UnknownProbe)?,
        })
    }
}

/// The answer of an echo Pod, with the address of the client's own socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// The name of the Pod that answered.
    pub pod: String,
    /// The source address of the request, as the Pod received it.
    pub seen: IpAddr,
    /// The address of the client's socket; `None` if the socket has no specified address.
    pub local: Option<IpAddr>,
}

/// A client's observation of one request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Observation {
    /// An echo Pod has returned the whole payload.
    Answered(Reply),
    /// A host has replied, but the client got no complete answer; the text says why.
    Refused(String),
    /// No host has replied; the text says how the client detected the missing reply.
    NoAnswer(String),
    /// The client could not send the request; the text says why.
    NotSent(String),
}
