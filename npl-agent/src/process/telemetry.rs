// SPDX-License-Identifier: Apache-2.0
//! The log, on standard error. Standard output is for the results of commands.

use std::io::{self, IsTerminal};

use clap::ValueEnum;
use tracing_subscriber::{
    EnvFilter, Layer, Registry, filter::ParseError, layer::SubscriberExt, util::SubscriberInitExt,
};

/// The variable with the log filter.
pub const FILTER_VARIABLE: &str = "NPL_LOG";

/// kube logs every failed request at `error`; the agent logs the same once, with its effect.
const DEFAULT_FILTER: &str = "warn,npl_agent=info,kube_client=off,kube_runtime=off";

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object per line, for log collectors.
    Json,
}

/// Why the log cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// `NPL_LOG` cannot be parsed.
    #[error("read {FILTER_VARIABLE}={text:?}: give levels by module, for example npl_agent=debug,warn")]
    Filter {
        /// The value.
        text: String,
        /// The parser's error.
        #[source]
        source: ParseError,
    },
    /// The log has already been started.
    #[error("start logging: it has already been started")]
    AlreadyStarted(#[source] tracing_subscriber::util::TryInitError),
}

/// Starts the log; `filter` is the value of [`FILTER_VARIABLE`].
pub fn init(format: LogFormat, filter: Option<&str>) -> Result<(), TelemetryError> {
    let lines =
        tracing_subscriber::fmt::layer::<Registry>().with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    let lines = match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let filtered = lines.with_filter(parse_filter(filter)?);
    tracing_subscriber::registry().with(filtered).try_init().map_err(TelemetryError::AlreadyStarted)
}

/// An empty variable counts as unset, since the chart may set it so.
fn parse_filter(text: Option<&str>) -> Result<EnvFilter, TelemetryError> {
    let text = text.map(str::trim).filter(|text| !text.is_empty()).unwrap_or(DEFAULT_FILTER);
    EnvFilter::try_new(text).map_err(|source| TelemetryError::Filter { text: text.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::parse_filter;

    #[test]
    fn an_unset_or_empty_filter_is_the_default() {
        for text in [None, Some(""), Some("  ")] {
            let filter = parse_filter(text).unwrap().to_string();
            assert!(filter.contains("npl_agent=info") && filter.contains("kube_client=off"), "{filter}");
        }
    }

    #[test]
    fn a_bad_filter_is_refused_with_an_example() {
        let err = parse_filter(Some("npl_agent=loud")).unwrap_err();
        assert_eq!(
            err.to_string(),
            r#"read NPL_LOG="npl_agent=loud": give levels by module, for example npl_agent=debug,warn"#
        );
    }
}
