// SPDX-License-Identifier: Apache-2.0
//! A request to an echo Pod, and the client's observation. The client in a Pod gets requests as arguments and prints
//! observations as JSON.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

use crate::core::model::Protocol;

/// One request. The text form is, for example, `tcp,192.0.2.1:61000,64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// The transport protocol.
    pub protocol: Protocol,
    /// The destination.
    pub address: SocketAddr,
    /// The length of the payload.
    pub bytes: usize,
}

/// The text is not a request.
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
    /// The name of the answering Pod.
    pub pod: String,
    /// The client's address that the Pod sees.
    pub seen: IpAddr,
    /// The address of the client's socket; `None` if the socket has no specified address.
    pub local: Option<IpAddr>,
}

/// The observation of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Observation {
    /// An echo Pod has returned the whole payload.
    Answered(Reply),
    /// A host has replied, but the answer is not complete; the text is the reason.
    Refused(String),
    /// No host has replied; the text is the reason.
    NoAnswer(String),
    /// The client could not send the request; the text is the reason.
    NotSent(String),
}
