// SPDX-License-Identifier: Apache-2.0
//! A network device of a topology.

use std::net::Ipv4Addr;

use anyhow::{Context as _, Result};

use crate::netns::Netns;
use crate::tools;

/// A network device in a namespace.
#[derive(Clone, Debug)]
pub struct Device {
    netns: Netns,
    name: String,
}

/// An offload feature, as named by `ethtool -K`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// Transmit checksum offload. When off, the kernel completes the checksum of every packet before sending.
    TxChecksum,
    /// Receive checksum offload.
    RxChecksum,
    /// TCP segmentation offload.
    Tso,
    /// Generic segmentation offload.
    Gso,
    /// Generic receive offload.
    Gro,
    /// Generic receive offload that joins datagrams to a fraglist.
    GroFraglist,
}

impl Offload {
    /// All features that are on by default.
    pub const ALL: [Self; 5] = [Self::TxChecksum, Self::RxChecksum, Self::Tso, Self::Gso, Self::Gro];

    fn flag(self) -> &'static str {
        match self {
            Self::TxChecksum => "tx",
            Self::RxChecksum => "rx",
            Self::Tso => "tso",
            Self::Gso => "gso",
            Self::Gro => "gro",
            Self::GroFraglist => "rx-gro-list",
        }
    }
}

impl Device {
    pub(super) fn new(netns: &Netns, name: &str) -> Self {
        Self { netns: netns.clone(), name: name.to_owned() }
    }

    /// The device name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The namespace of the device.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// The interface index.
    pub fn ifindex(&self) -> Result<u32> {
        let name = self.name.clone();
        Ok(self.netns.run(move || nix::net::if_::if_nametoindex(name.as_str()))??)
    }

    /// The MAC address.
    pub fn link_address(&self) -> Result<[u8; 6]> {
        let shown = self.netns.ip(&format!("link show dev {}", self.name))?;
        let text = shown.split_once("link/ether ").and_then(|(_, rest)| rest.split_whitespace().next());
        let bytes: Option<Vec<u8>> =
            text.map(|text| text.split(':').filter_map(|byte| u8::from_str_radix(byte, 16).ok()).collect());
        bytes.and_then(|bytes| bytes.try_into().ok()).with_context(|| format!("find the MAC address of {}", self.name))
    }

    /// Adds a permanent neighbor entry on this device: `ip` has the MAC address of `peer`.
    pub(super) fn fix_neighbour(&self, ip: Ipv4Addr, peer: &Self) -> Result<()> {
        let address = mac_text(peer.link_address()?);
        let entry = format!("neigh replace {ip} lladdr {address} dev {} nud permanent", self.name);
        self.netns.ip(&entry).map(drop)
    }

    /// Turns offload features on or off.
    pub fn set_offloads(&self, offloads: &[Offload], on: bool) -> Result<()> {
        let mut command = self.netns.command("ethtool")?;
        command.args(["-K", &self.name]);
        for offload in offloads {
            command.args([offload.flag(), if on { "on" } else { "off" }]);
        }
        tools::output(&mut command).map(drop)
    }

    pub fn set_mtu(&self, mtu: u32) -> Result<()> {
        self.netns.ip(&format!("link set {} mtu {mtu}", self.name)).map(drop)
    }
}

/// Returns a MAC address as text, as `ip` and `ovs-ofctl` read it.
pub fn mac_text(address: [u8; 6]) -> String {
    address.map(|byte| format!("{byte:02x}")).join(":")
}
