// SPDX-License-Identifier: Apache-2.0
//! Parses the annotation as its consumers do. This code is written from the description of the format, and does not use
//! the agent's code.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::consumers;
use crate::echo::Protocol;

/// One mapping in a Pod's annotation, with a single protocol. An element of the annotation with several protocols is
/// parsed to one entry for each of its protocols.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// The container port.
    pub pod_port: u16,
    /// The node address.
    #[serde(rename = "nodeIP")]
    pub node_ip: IpAddr,
    pub node_port: u16,
    pub protocol: Protocol,
}

/// One element of the annotation's list: with the field `protocol`, or with only the field `protocols`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Element {
    pod_port: u16,
    #[serde(rename = "nodeIP")]
    node_ip: IpAddr,
    node_port: u16,
    protocol: Option<Protocol>,
    #[serde(default)]
    protocols: Vec<Protocol>,
}

impl Element {
    fn entries(self) -> Vec<Entry> {
        let Self { pod_port, node_ip, node_port, protocol, protocols } = self;
        let protocols = protocol.map_or(protocols, |protocol| vec![protocol]);
        protocols.into_iter().map(|protocol| Entry { pod_port, node_ip, node_port, protocol }).collect()
    }
}

impl Entry {
    /// Parses an annotation, and verifies that the known consumers read one member from each of its elements.
    pub fn parse(annotation: &str) -> Result<Vec<Self>> {
        let elements: Vec<Element> =
            serde_json::from_str(annotation).with_context(|| format!("parse the annotation {annotation}"))?;
        let entries: Vec<Vec<Self>> = elements.into_iter().map(Element::entries).collect();
        let members: Vec<Self> = entries.iter().filter_map(|of_element| of_element.first().cloned()).collect();
        consumers::agree(annotation, &members)?;
        Ok(entries.into_iter().flatten().collect())
    }

    /// The address to which clients connect.
    pub fn address(&self) -> SocketAddr {
        (self.node_ip, self.node_port).into()
    }
}
