// SPDX-License-Identifier: Apache-2.0
//! The plain text format of Prometheus, for scrapers that do not ask for `OpenMetrics`. The plain text format has
//! neither units nor the type `info`, and the lines `# HELP` and `# TYPE` of a counter contain the suffix `_total`.

use std::fmt::Write as _;

/// The media type of the text that [`from_openmetrics`] returns.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Converts a text in the `OpenMetrics` format. Only comment lines change, because the lines with samples are the same
/// in both formats.
pub(super) fn from_openmetrics(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut help = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            // The `# HELP` line is written together with the `# TYPE` line after it, because the type determines the
            // metric's name in both lines.
            help = rest.split_once(' ').map(|(_, shown)| shown);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let (ending, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                other => ("", other),
            };
            let help = help.take().unwrap_or_default();
            let _infallible = writeln!(plain, "# HELP {name}{ending} {help}\n# TYPE {name}{ending} {kind}");
        } else if !line.starts_with("# ") {
            plain += line;
            plain.push('\n');
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::from_openmetrics;

    #[test]
    fn comments_name_the_series_and_samples_stay() {
        let text = "# HELP a Help of a.\n# TYPE a counter\n# UNIT a packets\na_total{b=\"# c\"} 1\n# HELP i Build.\n# TYPE i \
                    info\ni_info{v=\"1\"} 1\n# HELP h Time.\n# TYPE h histogram\nh_bucket{le=\"+Inf\"} 2\nh_count 2\n# EOF\n";
        let expected = "# HELP a_total Help of a.\n# TYPE a_total counter\na_total{b=\"# c\"} 1\n# HELP i_info Build.\n# TYPE \
                        i_info gauge\ni_info{v=\"1\"} 1\n# HELP h Time.\n# TYPE h histogram\nh_bucket{le=\"+Inf\"} 2\nh_count 2\n";
        assert_eq!(from_openmetrics(text), expected);
    }
}
