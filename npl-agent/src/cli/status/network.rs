// SPDX-License-Identifier: Apache-2.0
//! Finds other software in the Node's network: the CNI, policy engines, the Service proxy, and programs that run ahead
//! of NPL's.

use std::{collections::BTreeSet, path::Path};

use serde::Serialize;

use crate::{
    cli::facts,
    core::{
        devices::{Device, filter_order::ProgramsAhead},
        doctor::networks,
    },
    datapath::{inspect::Inspection, pins::Direction},
    nft_guard,
};

/// The section of the output about other software.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NetworkView {
    /// The recognized CNI, policy engines and Service proxy.
    networks: Vec<RecognizedNetwork>,
    /// Whether `--forwarding redirect` is refused because redirected packets would bypass a policy engine.
    pub(super) redirect_refused: bool,
    /// Programs of other software that run ahead of NPL's, by device. If one of them returns a final verdict, NPL's
    /// programs do not run and clients are not served.
    pub(super) programs_ahead: ProgramsAhead,
    /// Why the programs of other software cannot be listed; absent if they can.
    programs_ahead_refusal: Option<String>,
}

/// Recognized software that provides a part of the Node's network.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RecognizedNetwork {
    /// `CNI`, `policy engine` or `Service proxy`.
    role: &'static str,
    name: &'static str,
}

impl NetworkView {
    /// Reads the order of programs on the attached uplinks, and the device and rule names by which other software is
    /// recognized.
    pub(super) async fn read(bpffs: &Path, inspection: &Inspection, devices: &[Device]) -> Self {
        let uplinks = inspection.links.iter().filter(|(_, directions)| directions.contains(&Direction::Egress));
        let uplinks: BTreeSet<u32> = uplinks.map(|(ifindex, _)| *ifindex).collect();
        let order = facts::ProgramOrder::read(bpffs, &uplinks, Ok(devices)).await;
        let (programs_ahead, programs_ahead_refusal) = match order {
            Ok(order) => (order.ahead, None),
            Err(reason) => (ProgramsAhead::new(), Some(reason)),
        };
        let redirect_refused = inspection.is_redirect_refused;
        Self { networks: recognized(devices), redirect_refused, programs_ahead, programs_ahead_refusal }
    }

    /// The recognized software.
    pub(super) fn recognized(&self) -> String {
        let shown: Vec<String> =
            self.networks.iter().map(|network| format!("{} ({})", network.name, network.role)).collect();
        if shown.is_empty() { "no known CNI, policy engine or Service proxy".to_owned() } else { shown.join(", ") }
    }

    /// Whether NPL's programs run first.
    pub(super) fn program_order(&self) -> String {
        if let Some(refusal) = &self.programs_ahead_refusal {
            return format!("cannot list programs: {refusal}");
        }
        if self.programs_ahead.is_empty() {
            return "NPL's programs run first".to_owned();
        }
        let shown = self.programs_ahead.iter().map(|(device, programs)| {
            format!("{device}: {}", programs.iter().map(String::as_str).collect::<Vec<_>>().join(", "))
        });
        format!("FAILED, programs of other software run ahead of NPL's: {}", shown.collect::<Vec<_>>().join("; "))
    }
}

/// The software that is recognized by the Node's devices and rules. If the rules cannot be read, only the devices
/// count, and doctor reports the error.
fn recognized(devices: &[Device]) -> Vec<RecognizedNetwork> {
    let rules = nft_guard::rule_names().unwrap_or_default();
    let found = networks::recognize(devices, &rules);
    found.map(|network| RecognizedNetwork { role: network.role.names().1, name: network.name }).collect()
}
