// SPDX-License-Identifier: Apache-2.0
//! Decides the order of NPL's programs and the programs of other software on an uplink. If a program ahead of NPL's
//! program returns a final verdict, as Cilium's programs do, NPL's program does not run.
//!
//! Before Linux 6.6, programs are attached as filters. Of several filters with the same priority, the filter that was
//! attached last runs first. So if a CNI attaches its filters after NPL, the CNI's filters run ahead of NPL's filter.
//! NPL then moves its own filter ahead of the CNI's filters. The number of moves is limited, because other software may
//! move its filters in the same way.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Device, Direction,
    attachments::{DeviceAttachments, Side},
};
use crate::core::model::Moment;

/// The maximum number of times that one filter is moved within [`WINDOW_MILLIS`].
const MOST_MOVES: usize = 5;
const WINDOW_MILLIS: u64 = 600_000;

/// The hooks of an uplink on which NPL's programs translate packets.
const HOOKS: [(Direction, Side); 2] = [(Direction::Egress, Side::Egress), (Direction::Ingress, Side::Ingress)];

/// For each device, by name: the programs of other software that run ahead of NPL's programs. Each text in a set
/// contains the name and direction of one program.
pub type ProgramsAhead = BTreeMap<String, BTreeSet<String>>;

/// Decides which of NPL's filters to move. Stores when each filter was moved, because the number of moves is limited.
#[derive(Debug, Default)]
pub struct FilterOrder {
    moves: BTreeMap<(u32, Direction), Vec<Moment>>,
}

impl FilterOrder {
    /// Returns NPL's filters to move, and the programs of other software that stay ahead of NPL's programs. Programs
    /// that are attached by TCX links stay ahead, because NPL does not reorder TCX links. Filters of other software
    /// stay ahead if NPL's filter on the same hook has reached the limit of moves.
    pub fn decide(
        &mut self,
        uplinks: &[&Device],
        attachments: &BTreeMap<u32, DeviceAttachments>,
        are_filters: bool,
        now: Moment,
    ) -> (BTreeSet<(u32, Direction)>, ProgramsAhead) {
        self.moves.retain(|(ifindex, _), _| uplinks.iter().any(|uplink| uplink.ifindex == *ifindex));
        let (mut moves, mut ahead) = (BTreeSet::new(), ProgramsAhead::new());
        for uplink in uplinks {
            let Some(found) = attachments.get(&uplink.ifindex) else { continue };
            for (direction, side) in HOOKS {
                let others = found.ahead_of_npl(side);
                if others.is_empty() {
                    continue;
                }
                if are_filters && self.record_move((uplink.ifindex, direction), now) {
                    moves.insert((uplink.ifindex, direction));
                } else {
                    let names = others.iter().map(|name| shown(direction, name));
                    ahead.entry(uplink.name.clone()).or_default().extend(names);
                }
            }
        }
        (moves, ahead)
    }

    /// If the limit of moves is not reached for NPL's filter on the hook, records one more move and returns true;
    /// otherwise returns false.
    fn record_move(&mut self, hook: (u32, Direction), now: Moment) -> bool {
        let recent = self.moves.entry(hook).or_default();
        recent.retain(|moved| now.0.saturating_sub(moved.0) < WINDOW_MILLIS);
        let may = recent.len() < MOST_MOVES;
        if may {
            recent.push(now);
        }
        may
    }
}

/// The programs of other software that run ahead of NPL's programs, by the name of the device.
pub fn programs_ahead(devices: &[Device], attachments: &BTreeMap<u32, DeviceAttachments>) -> ProgramsAhead {
    let of = |device: &Device| {
        let found = attachments.get(&device.ifindex)?;
        let names = HOOKS
            .into_iter()
            .flat_map(|(direction, side)| found.ahead_of_npl(side).into_iter().map(move |name| shown(direction, name)));
        let names: BTreeSet<String> = names.collect();
        (!names.is_empty()).then(|| (device.name.clone(), names))
    };
    devices.iter().filter_map(of).collect()
}

fn shown(direction: Direction, name: &str) -> String {
    format!("{name} ({})", direction.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::devices::{DeviceKind, attachments::AttachmentOwner};

    fn eth0() -> Device {
        Device::new(2, "eth0", DeviceKind::Physical)
    }

    /// A device on which Cilium's filter runs before NPL's filter at ingress, and after NPL's filter at egress.
    fn behind_cilium() -> BTreeMap<u32, DeviceAttachments> {
        let other = |name: &str| AttachmentOwner::Other(name.to_owned());
        let attachments = DeviceAttachments {
            ingress: vec![other("cil_from_netdev"), AttachmentOwner::Npl],
            egress: vec![AttachmentOwner::Npl, other("cil_to_netdev")],
            ..DeviceAttachments::default()
        };
        BTreeMap::from([(2, attachments)])
    }

    fn reported() -> ProgramsAhead {
        BTreeMap::from([("eth0".to_owned(), BTreeSet::from(["cil_from_netdev (ingress)".to_owned()]))])
    }

    #[test]
    fn a_filter_is_moved_ahead_of_others_until_the_limit_and_again_after_the_window() {
        let (eth0, attachments, mut order) = (eth0(), behind_cilium(), FilterOrder::default());
        let mut decide = |now| order.decide(&[&eth0], &attachments, true, Moment(now));
        let moved = (BTreeSet::from([(2, Direction::Ingress)]), ProgramsAhead::new());
        for now in 0..5 {
            assert_eq!(decide(now), moved);
        }
        assert_eq!(decide(6), (BTreeSet::new(), reported()));
        assert_eq!(decide(WINDOW_MILLIS), moved);
    }

    #[test]
    fn links_are_not_moved_but_reported() {
        let (eth0, attachments) = (eth0(), behind_cilium());
        let decided = FilterOrder::default().decide(&[&eth0], &attachments, false, Moment(0));
        assert_eq!(decided, (BTreeSet::new(), reported()));
        assert_eq!(programs_ahead(&[eth0], &attachments), reported());
    }

    #[test]
    fn a_filter_at_the_head_is_left_there() {
        let (eth0, mut attachments) = (eth0(), behind_cilium());
        attachments.get_mut(&2).unwrap().ingress.reverse();
        let decided = FilterOrder::default().decide(&[&eth0], &attachments, true, Moment(0));
        assert_eq!(decided, (BTreeSet::new(), ProgramsAhead::new()));
    }
}
