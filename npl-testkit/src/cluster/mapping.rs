// SPDX-License-Identifier: Apache-2.0
//! The annotation as consumers read it. Written from its description and independent of the agent's code.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::consumers;
use crate::echo::Protocol;

/// One element of a Pod's annotation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// The container port.
    pub pod_port: u16,
    /// The node address.
    #[serde(rename = "nodeIP")]
    pub node_ip: IpAddr,
    /// The node port.
    pub node_port: u16,
    /// The protocol.
    pub protocol: Protocol,
}

impl Entry {
    /// Parses an annotation, and verifies that the known consumers read the same entries.
    pub fn parse(annotation: &str) -> Result<Vec<Self>> {
        let entries: Vec<Self> =
            serde_json::from_str(annotation).with_context(|| format!("parse the annotation {annotation}"))?;
        consumers::agree(annotation, &entries)?;
        Ok(entries)
    }

    /// The address to which clients connect.
    pub fn address(&self) -> SocketAddr {
        (self.node_ip, self.node_port).into()
    }
}
