// SPDX-License-Identifier: Apache-2.0
//! Checks for the receive offload `rx-gro-list`: some kernels translate only the first of the datagrams that this
//! offload combines.

use std::collections::BTreeSet;

use super::{Facts, Finding, kernel::ASK_AS_ROOT};

/// Checks for devices on which GRO joins datagrams to a fraglist. NPL, like every NAT, translates the first datagram of
/// a fraglist. When the kernel splits the fraglist, the kernel has to translate the datagrams after the first one.
/// Kernels before Linux 6.15, except 6.12.28 and later 6.12 releases, do not translate these datagrams for IPv6.
pub(super) fn fraglists(facts: &Facts) -> Finding {
    let key = "gro_fraglist";
    let with_fraglists = match &facts.devices_with_fraglists {
        Ok(names) => names,
        Err(_) if facts.kernel.translates_fraglists => return Finding::ok(key, "the kernel translates fraglists"),
        Err(reason) => return Finding::unknown(key, reason, ASK_AS_ROOT),
    };
    let relevant: BTreeSet<&str> = facts.uplinks().chain(facts.devices_of_pods()).map(|it| it.name.as_str()).collect();
    let on: Vec<&str> = relevant.into_iter().filter(|name| with_fraglists.contains(*name)).collect();
    if on.is_empty() {
        return Finding::ok(key, "rx-gro-list is off");
    }
    let found = format!("rx-gro-list is on for {}", on.join(", "));
    if facts.kernel.translates_fraglists {
        return Finding::ok(key, found + "; the kernel translates fraglists");
    }
    let advice = "of several IPv6 datagrams that arrive together, only the first is translated, unless the distribution \
                  has backported the fix of Linux 6.15: run `ethtool -K DEVICE rx-gro-list off` for these devices";
    Finding::warning(key, found, advice)
}

#[cfg(test)]
mod tests {
    use super::super::{State, tests::check};

    const KEY: &str = "gro_fraglist";

    #[test]
    fn fraglists_on_the_path_of_clients_are_reported_before_linux_6_15() {
        check(&[
            (|_| {}, KEY, State::Ok, "rx-gro-list is off", ""),
            (
                |it| it.devices_with_fraglists = Ok(["eth0".to_owned()].into()),
                KEY,
                State::Warning,
                "on for eth0",
                "ethtool -K DEVICE rx-gro-list off",
            ),
            (
                |it| it.devices_with_fraglists = Ok(["cali1", "eth0"].map(str::to_owned).into()),
                KEY,
                State::Warning,
                "on for cali1, eth0",
                "only the first is translated",
            ),
            (
                |it| {
                    it.devices_with_fraglists = Ok(["eth0".to_owned()].into());
                    it.kernel.translates_fraglists = true;
                },
                KEY,
                State::Ok,
                "on for eth0; the kernel translates fraglists",
                "",
            ),
            (|it| it.devices_with_fraglists = Ok(["lo".to_owned()].into()), KEY, State::Ok, "off", ""),
            (|it| it.devices_with_fraglists = Err("EPERM".to_owned()), KEY, State::Unknown, "EPERM", "as root"),
            (
                |it| {
                    it.devices_with_fraglists = Err("EPERM".to_owned());
                    it.kernel.translates_fraglists = true;
                },
                KEY,
                State::Ok,
                "the kernel translates fraglists",
                "",
            ),
        ]);
    }
}
