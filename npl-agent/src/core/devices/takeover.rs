// SPDX-License-Identifier: Apache-2.0
//! Decides whether this agent may detach the programs of an earlier agent whose maps this agent cannot use.

use std::collections::{BTreeMap, BTreeSet};

/// Returns the names of the devices that only the earlier agent's programs serve: uplinks that have these programs, and
/// to which this agent's programs could not be attached. `unattached` contains the names of all uplinks to which this
/// agent's programs could not be attached, by ifindex. `former` contains the ifindex of every device with programs of
/// the earlier agent.
///
/// A device without programs of the earlier agent is not in the result, because detaching those programs does not
/// affect the device.
pub fn served_by_former_only(unattached: &BTreeMap<u32, String>, former: &BTreeSet<u32>) -> BTreeSet<String> {
    let is_served = |(ifindex, _): &(&u32, &String)| former.contains(ifindex);
    unattached.iter().filter(is_served).map(|(_, name)| name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_device_that_the_earlier_agent_serves_keeps_its_programs() {
        let unattached = BTreeMap::from([(2, "eth0".to_owned()), (3, "eth1".to_owned())]);
        let kept = |former: &[u32]| served_by_former_only(&unattached, &former.iter().copied().collect());
        assert_eq!(kept(&[3, 9]), BTreeSet::from(["eth1".to_owned()]));
        assert_eq!(kept(&[9]), BTreeSet::new(), "eth0 and eth1 have no programs of the earlier agent");
        assert_eq!(served_by_former_only(&BTreeMap::new(), &BTreeSet::from([2, 3])), BTreeSet::new());
    }
}
