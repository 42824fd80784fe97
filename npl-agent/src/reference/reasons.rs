// SPDX-License-Identifier: Apache-2.0
//! Renders `reasons.md` from [`npl_common::reason`].

use npl_common::{names::MAP_REASON, reason::Reason};

use super::markdown::{code, prose, table};

pub(super) fn body() -> String {
    let rows = Reason::ALL.iter().map(|reason| {
        let number = (*reason as u32).to_string();
        vec![code(reason.name()), number, reason.packet().to_owned(), prose(reason.help())]
    });
    let table = table(&["reason", "number", "packet", "meaning"], rows);
    format!(
        "`npl-agent status` and the metric [`npl_datapath_reason_packets_total`](metrics.md#npl_datapath_reason_packets_total) \
         show the counters by name, the map [`{MAP_REASON}`](maps.md) by number.\n\
         A packet is not counted if no mapping could match it even if every port of the node port range were mapped, for \
         example because its destination port is outside of the range. Of a fragmented datagram that is passed \
         unchanged, only the first fragment is counted.\n\
         A packet that is passed unchanged goes to the next program of the hook, and then to the host's stack. Typical \
         causes and actions: [troubleshoot.md](../troubleshoot.md#drop-reasons).\n\n{table}"
    )
}
