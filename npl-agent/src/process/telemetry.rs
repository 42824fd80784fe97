// SPDX-License-Identifier: Apache-2.0
//! Sets up logging to standard error. Logs do not go to standard output, which is only for the results of commands.

use std::io::{self, IsTerminal};

use clap::ValueEnum;
use tracing::{Level, error};
use tracing_subscriber::{
    EnvFilter, Layer, Registry, filter::ParseError, fmt::MakeWriter, layer::SubscriberExt, util::SubscriberInitExt,
};

use crate::core::pages;

/// The environment variable with the log filter, in the syntax of `tracing_subscriber::EnvFilter`.
pub const FILTER_VARIABLE: &str = "NPL_LOG";

/// The default log filter. The filter excludes the library kube, because kube logs every failed request at level
/// `error`. The agent logs failed requests itself, with the effect of the failure.
#[cfg(not(feature = "trace"))]
pub(crate) const DEFAULT_FILTER: &str = "warn,npl_agent=info,kube_client=off,kube_runtime=off";
/// The default filter of the trace build, which includes the logs of the kernel programs.
#[cfg(feature = "trace")]
pub(crate) const DEFAULT_FILTER: &str = "warn,npl_agent=info,npl_ebpf=debug,kube_client=off,kube_runtime=off";

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum LogFormat {
    /// One line of text per event.
    #[default]
    Text,
    /// One JSON object per line, for log collectors.
    Json,
}

/// Why logging cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// `NPL_LOG` has a syntax error.
    #[error("parse {FILTER_VARIABLE}={text:?}: set log levels by module, for example npl_agent=debug,warn")]
    Filter {
        /// The value of the variable.
        text: String,
        /// The syntax error.
        #[source]
        source: ParseError,
    },
    /// [`init`] was called twice.
    #[error("start logging: logging is already started")]
    AlreadyStarted(#[source] tracing_subscriber::util::TryInitError),
}

/// Starts the logging of a program other than the agent, such as `npl-feed`, whose default filter is `default`.
///
/// # Errors
///
/// If the filter has a syntax error, or logging is already started.
pub fn init_with_default(format: LogFormat, filter: Option<&str>, default: &str) -> Result<(), TelemetryError> {
    init(format, Some(filter.map(str::trim).filter(|text| !text.is_empty()).unwrap_or(default)))
}

/// Starts logging. `filter` is the value of [`FILTER_VARIABLE`]. If the variable is unset or empty, the default filter
/// is used.
///
/// # Errors
///
/// If the filter has a syntax error, or logging is already started.
pub fn init(format: LogFormat, filter: Option<&str>) -> Result<(), TelemetryError> {
    let filtered = lines(format, io::stderr, io::stderr().is_terminal()).with_filter(parse_filter(filter)?);
    tracing_subscriber::registry().with(filtered).try_init().map_err(TelemetryError::AlreadyStarted)
}

fn lines<W>(format: LogFormat, writer: W, has_colors: bool) -> Box<dyn Layer<Registry> + Send + Sync>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt::layer::<Registry>().with_writer(writer).with_ansi(has_colors);
    match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    }
}

/// If the log format is JSON, logs the error that ends the agent, with the error's causes, so that log collectors can
/// parse the line. Returns whether the error was logged. If the error was not logged, the caller prints it as text.
#[must_use]
pub fn log_fatal(format: LogFormat, error: &anyhow::Error) -> bool {
    let is_logged = format == LogFormat::Json && tracing::enabled!(Level::ERROR);
    if is_logged {
        error!(see = pages::url(pages::NOT_READY), "{error:#}");
    }
    is_logged
}

/// Parses a log filter. An empty text means the default filter, because a Helm chart renders an unset value as an empty
/// variable.
fn parse_filter(text: Option<&str>) -> Result<EnvFilter, TelemetryError> {
    let text = text.map(str::trim).filter(|text| !text.is_empty()).unwrap_or(DEFAULT_FILTER);
    EnvFilter::try_new(text).map_err(|source| TelemetryError::Filter { text: text.to_owned(), source })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{
        io::{self, Write},
        sync::{Arc, Mutex},
    };

    use tracing_subscriber::layer::SubscriberExt as _;

    use super::{LogFormat, lines, log_fatal, parse_filter};

    /// Log lines in memory.
    #[derive(Clone, Default)]
    pub(crate) struct Written(Arc<Mutex<Vec<u8>>>);

    impl Written {
        pub(crate) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_error_that_ends_the_agent_is_json_if_the_log_is() {
        let written = Written::default();
        let writer = written.clone();
        let log = tracing_subscriber::registry().with(lines(LogFormat::Json, move || writer.clone(), false));
        let error = anyhow::anyhow!("the port is in use").context("serve probes");
        tracing::subscriber::with_default(log, || {
            assert!(log_fatal(LogFormat::Json, &error));
            assert!(!log_fatal(LogFormat::Text, &error), "the caller reports it");
        });
        let text = written.text();
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["level"], "ERROR", "{text}");
        assert_eq!(line["message"], "serve probes: the port is in use", "{text}");
    }

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
            r#"parse NPL_LOG="npl_agent=loud": set log levels by module, for example npl_agent=debug,warn"#
        );
    }
}
