// SPDX-License-Identifier: Apache-2.0
//! The demo: from `kubectl annotate service` to packets answered by Pods, on one machine and on real parts.

mod answers;
mod counters;
mod keep;
mod publish;
mod real;
mod replace;
mod report;
mod restart;
mod stage;
mod story;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use npl_testkit::interrupt;

use crate::report::Report;

/// Shows NodePortLocal's main job on one machine: a real API server, the real agent, network namespaces as machines.
#[derive(Debug, Parser)]
#[command(name = "npl-demo")]
struct Arguments {
    /// Tell it on a real Kubernetes of two Nodes.
    #[arg(long)]
    real_cluster: bool,

    /// Leave everything up at the end, say how to look around, and remove it on Ctrl-C.
    #[arg(long)]
    keep: bool,

    /// How the story is told.
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// How the story is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Output {
    /// For people.
    #[default]
    Table,
    /// For programs.
    Json,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let told = interrupt::watch().and_then(|()| {
        let mut report = Report::new(arguments.output == Output::Table);
        let tell = if arguments.real_cluster { real::tell } else { story::tell };
        tell(&mut report, arguments.keep)?;
        report.close()
    });
    match told {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(_interrupted) if interrupt::is_requested() => {
            complain("interrupted; everything is removed");
            ExitCode::from(interrupt::EXIT_CODE)
        }
        Err(err) => {
            complain(&format!("{err:#}"));
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stderr, reason = "the last words of a program")]
fn complain(message: &str) {
    eprintln!("npl-demo: {message}");
}
