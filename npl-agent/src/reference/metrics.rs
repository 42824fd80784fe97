// SPDX-License-Identifier: Apache-2.0
//! Renders `metrics.md` from [`crate::metrics::catalog`].

use std::fmt::Write as _;

use super::markdown::{anchor, code, codes, heading, prose, table};
use crate::metrics::{Label, MetricInfo, Values, catalog};

pub(super) fn body() -> String {
    let metrics = catalog();
    let mut text = String::from(
        "Counters of the kernel programs, `npl_datapath_*`, survive a restart of the agent; the other counters start at zero. A \
         histogram NAME has the series NAME`_bucket`, NAME`_sum` and NAME`_count`.\n\
         Alerts: [alerts.md](../alerts.md). Signals, causes and actions: \
         [troubleshoot.md](../troubleshoot.md#metrics-that-signal-trouble).\n\n",
    );
    text += &table(
        &["metric", "type", "labels", "meaning"],
        metrics.iter().map(|MetricInfo { name, kind, help, labels }| {
            let link = format!("[{}]({})", code(name), anchor(name));
            let labels: Vec<_> = labels.iter().map(|label| label.name).collect();
            vec![link, kind.clone(), codes(&labels), prose(help)]
        }),
    );
    for MetricInfo { name, kind, help, labels } in &metrics {
        text += &heading(2, name);
        let _infallible = writeln!(text, "{} Type: {kind}.", prose(help));
        let rows: Vec<_> = labels.iter().flat_map(rows).collect();
        if !rows.is_empty() {
            let _infallible = write!(text, "\n{}", table(&["label", "value", "meaning"], rows));
        }
    }
    text
}

fn rows(label: &Label) -> Vec<Vec<String>> {
    let row = |value: String, meaning: &str| vec![code(label.name), value, meaning.to_owned()];
    match label.values {
        Values::Listed(values) => values.iter().map(|(value, meaning)| row(code(value), meaning)).collect(),
        Values::Reasons => vec![row("a reason".to_owned(), "[Reasons](reasons.md).")],
        Values::EventReasons => vec![row("the reason of an Event".to_owned(), "[Events](events.md).")],
        Values::Build(meaning) => vec![row("one value".to_owned(), meaning)],
        Values::Names(meaning) => vec![row("any value".to_owned(), meaning)],
    }
}
