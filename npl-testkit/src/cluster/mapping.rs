// SPDX-License-Identifier: Apache-2.0
//! The annotation as a consumer reads it: written from its description, and not with the agent's own code.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::consumers;
use crate::echo::Protocol;

/// One element of a Pod's annotation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// The container's port.
    pub pod_port: u16,
    /// The Node's address.
    #[serde(rename = "nodeIP")]
    pub node_ip: IpAddr,
    /// The Node's port that leads there.
    pub node_port: u16,
    /// The protocol.
    pub protocol: Protocol,
}

impl Entry {
    /// Reads a whole annotation, and has the known consumers read it too: they must arrive at the same.
    pub fn parse(annotation: &str) -> Result<Vec<Self>> {
        let entries: Vec<Self> =
            serde_json::from_str(annotation).with_context(|| format!("read the annotation {annotation}"))?;
        consumers::agree(annotation, &entries)?;
        Ok(entries)
    }

    /// Where a client sends to.
    pub fn address(&self) -> SocketAddr {
        (self.node_ip, self.node_port).into()
    }
}
