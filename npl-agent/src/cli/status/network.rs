// SPDX-License-Identifier: Apache-2.0
//! Finds other software in the Node's network: the CNI, policy engines, the Service proxy, and programs that run before
//! NPL's programs.

use std::{collections::BTreeSet, io, path::Path};

use serde::Serialize;

use crate::{
    cli::facts,
    core::{
        devices::{Device, filter_order::ProgramsAhead},
        networks::{self, RuleNames},
    },
    datapath::{inspect::Inspection, pins::Direction},
    nft_guard,
};

/// The part of the output of `npl-agent status` about other software in the Node's network.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NetworkView {
    /// The recognized CNI, policy engines and Service proxy.
    networks: Vec<RecognizedNetwork>,
    /// Why netfilter's rules could not be read; absent if the rules were read. Without the rules, `networks` may be
    /// incomplete.
    networks_refusal: Option<String>,
    /// Whether `--forwarding redirect` is refused because redirected packets would bypass a policy engine.
    pub(super) redirect_refused: bool,
    /// By device: programs of other software that run before NPL's programs. If one of these programs returns a final
    /// verdict for a packet, NPL's programs do not run, and the packet's client is not served.
    pub(super) programs_ahead: ProgramsAhead,
    /// Why the programs of other software could not be listed; absent if these programs were listed.
    programs_ahead_refusal: Option<String>,
}

/// A CNI, policy engine or Service proxy that was recognized on the Node.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RecognizedNetwork {
    /// `CNI`, `policy engine` or `Service proxy`.
    role: &'static str,
    name: &'static str,
}

impl NetworkView {
    /// Reads which programs run ahead of NPL's on the uplinks. Recognizes other software by the names of `devices`, and
    /// of netfilter's tables and chains, which this function reads.
    pub(super) async fn read(bpffs: &Path, inspection: &Inspection, devices: &[Device]) -> Self {
        let uplinks = inspection.links.iter().filter(|(_, directions)| directions.contains(&Direction::Egress));
        let uplinks: BTreeSet<u32> = uplinks.map(|(ifindex, _)| *ifindex).collect();
        let order = facts::ProgramOrder::read(bpffs, &uplinks, Ok(devices)).await;
        let (programs_ahead, programs_ahead_refusal) = match order {
            Ok(order) => (order.ahead, None),
            Err(reason) => (ProgramsAhead::new(), Some(reason)),
        };
        let redirect_refused = inspection.is_redirect_refused;
        let (networks, networks_refusal) = recognized(devices, nft_guard::rule_names());
        Self { networks, networks_refusal, redirect_refused, programs_ahead, programs_ahead_refusal }
    }

    /// Formats the recognized software as one line of text.
    pub(super) fn recognized(&self) -> String {
        let shown: Vec<String> =
            self.networks.iter().map(|network| format!("{} ({})", network.name, network.role)).collect();
        let found =
            if shown.is_empty() { "no known CNI, policy engine or Service proxy".to_owned() } else { shown.join(", ") };
        match &self.networks_refusal {
            Some(refusal) => format!("{found}; cannot read netfilter's rules: {refusal}"),
            None => found,
        }
    }

    /// Describes whether NPL's programs run first on each device.
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

/// Recognizes software by the names of the Node's devices, and of netfilter's tables and chains. If netfilter's names
/// cannot be read, recognizes software only by the names of devices, and also returns the text of the error.
fn recognized(devices: &[Device], rules: io::Result<RuleNames>) -> (Vec<RecognizedNetwork>, Option<String>) {
    let (rules, refusal) = match rules {
        Ok(rules) => (rules, None),
        Err(error) => (RuleNames::default(), Some(error.to_string())),
    };
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    let found = networks::recognize(&names, &rules);
    (found.map(|network| RecognizedNetwork { role: network.role.names().1, name: network.name }).collect(), refusal)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::{NetworkView, RuleNames, recognized};

    fn shown(rules: io::Result<RuleNames>) -> String {
        let (networks, networks_refusal) = recognized(&[], rules);
        NetworkView { networks, networks_refusal, ..NetworkView::default() }.recognized()
    }

    #[test]
    fn unreadable_rules_are_not_shown_as_a_node_without_a_policy_engine() {
        assert_eq!(shown(Ok(RuleNames::default())), "no known CNI, policy engine or Service proxy");
        let text = shown(Err(io::Error::from_raw_os_error(libc::EAGAIN)));
        assert!(text.contains("cannot read netfilter's rules: Resource temporarily unavailable"), "{text}");
    }
}
