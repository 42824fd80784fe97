// SPDX-License-Identifier: Apache-2.0
//! The demo shows, on one machine and with the real agent and API server, each step from `kubectl annotate service` to
//! the responses of the Pods.

mod answers;
mod counters;
mod environment;
mod keep;
mod publish;
mod real;
mod replace;
mod report;
mod restart;
mod steps;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use npl_testkit::interrupt;

use crate::report::Report;

/// Demonstrates NodePortLocal on one machine. Agent and API server are real; network namespaces stand in for machines.
#[derive(Debug, Parser)]
#[command(name = "npl-demo")]
struct Arguments {
    /// Run the demo on a real Kubernetes cluster of two Nodes.
    #[arg(long)]
    real_cluster: bool,

    /// Leave all parts running at the end, print how to access them, and remove them on Ctrl-C.
    #[arg(long)]
    keep: bool,

    /// The output format.
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// The output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Output {
    /// Text, printed while the demo runs.
    #[default]
    Table,
    /// JSON, printed at the end.
    Json,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = interrupt::watch().and_then(|()| {
        let mut report = Report::new(arguments.output == Output::Table);
        let demo = if arguments.real_cluster { real::run } else { steps::run };
        demo(&mut report, arguments.keep)?;
        report.close()
    });
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(_interrupted) if interrupt::is_requested() => {
            complain("interrupted; everything has been removed");
            ExitCode::from(interrupt::EXIT_CODE)
        }
        Err(err) => {
            complain(&format!("{err:#}"));
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stderr, reason = "the error message of a program")]
fn complain(message: &str) {
    eprintln!("npl-demo: {message}");
}
