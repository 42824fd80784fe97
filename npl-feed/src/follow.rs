// SPDX-License-Identifier: Apache-2.0
//! Runs the main loop of the feed, which applies changes of the cluster, and publishes a snapshot if the snapshot's
//! content has changed.

use std::{sync::Arc, time::Duration};

use npl_agent::{
    core::{model::settings::PortRange, pages},
    process::memory,
};
use tokio::{
    sync::{mpsc::Receiver, watch},
    time::{Instant, sleep_until},
};
use tracing::{info, warn};

use crate::{
    core::{
        entries::LeftOut,
        model::Change,
        snapshot::Snapshot,
        state::{Refusal, State},
    },
    status::Status,
};

/// The receiver of the latest snapshot, which is `None` until Pods, Services and Nodes have been listed.
pub type Published = watch::Receiver<Option<Arc<Snapshot>>>;

/// The sender that publishes snapshots to xDS, DNS and HTTP.
pub type Publisher = watch::Sender<Option<Arc<Snapshot>>>;

/// Applies changes and publishes snapshots until the sender of the changes is dropped.
pub async fn run(
    mut changes: Receiver<Change>,
    range: PortRange,
    drain: Duration,
    status: Arc<Status>,
    publisher: Publisher,
) {
    let started = Instant::now();
    let mut state = State::new(range, millis(drain));
    loop {
        let next_end = state.next_end().map(|end| started + Duration::from_millis(end));
        let first = tokio::select! {
            change = changes.recv() => match change {
                Some(change) => Some(change),
                None => return,
            },
            () = at(next_end) => None,
        };
        let now = millis(started.elapsed());
        state.expire(now);
        // All queued changes are applied before a snapshot is computed, so many changes cause only one snapshot.
        let mut next = first;
        while let Some(change) = next {
            state.apply(change, now);
            next = changes.try_recv().ok();
        }
        publish(&mut state, &status, &publisher);
    }
}

fn publish(state: &mut State, status: &Status, publisher: &Publisher) {
    if !state.is_complete() {
        return;
    }
    let is_first = publisher.borrow().is_none();
    let changed = state.refresh();
    let refusals = state.take_refusals();
    refusals.iter().for_each(log);
    if !refusals.is_empty() {
        status.set_left_out(&state.left_out_by_reason());
    }
    let Some(snapshot) = changed.or_else(|| is_first.then(|| state.snapshot())) else { return };
    if is_first {
        info!("Pods, Services and Nodes are listed; the feed is ready");
    }
    status.record_snapshot(snapshot.groups().count(), snapshot.groups().map(|group| group.members.len()).sum());
    publisher.send_replace(Some(Arc::new(snapshot)));
    if is_first {
        // Decoding the lists of a large cluster leaves much free memory in the heap. The feed returns this memory to
        // the kernel.
        memory::give_back();
    }
}

fn log(refusal: &Refusal) {
    let Refusal { pod, left_out } = refusal;
    if left_out.is_empty() {
        info!(%pod, "the feed no longer leaves out entries of this Pod");
        return;
    }
    let reasons: Vec<String> = left_out.iter().map(|(reason, count)| format!("{reason}={count}")).collect();
    let advice: Vec<&str> = left_out.keys().copied().map(advice).collect();
    warn!(
        see = pages::url(pages::FEED_SECURITY), %pod, reasons = reasons.join(","), advice = advice.join("; "),
        "entries of the Pod's annotation are not served: the field `advice` has the reason and the settings to check"
    );
}

/// Returns what the operator should check if the feed leaves out entries for this reason.
const fn advice(reason: LeftOut) -> &'static str {
    match reason {
        LeftOut::Malformed => "malformed: check who writes the annotation, and the version of the agent",
        LeftOut::UnknownNode => "unknown_node: check that the Pod's Node exists",
        LeftOut::ForeignAddress => {
            "foreign_address: the status of the Pod's Node does not list the address; check who writes the annotation, \
             and the agents' --node-ip (chart: config.nodeIp)"
        }
        LeftOut::PortOutOfRange => {
            "port_out_of_range: check who writes the annotation, and that the feed's --port-range includes the agents' \
             --port-range (chart: config.portRange)"
        }
        LeftOut::OtherPodPort => {
            "other_pod_port: a Pod on the host network is reached only at its own port; check who writes the annotation"
        }
        LeftOut::Oversized => {
            "oversized: the Pod's annotation, labels or container ports exceed the feed's limits, which the page names"
        }
        LeftOut::Contested => "contested: another Pod publishes the same node port; check who writes the annotations",
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_names_the_reason_and_the_settings_that_cause_it() {
        for reason in LeftOut::ALL {
            assert!(advice(reason).starts_with(&format!("{reason}: ")), "{}", advice(reason));
        }
        for (reason, settings) in [
            (LeftOut::ForeignAddress, ["--node-ip", "config.nodeIp"]),
            (LeftOut::PortOutOfRange, ["--port-range", "config.portRange"]),
        ] {
            for setting in settings {
                assert!(advice(reason).contains(setting), "{setting}");
            }
        }
    }
}
