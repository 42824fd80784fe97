// SPDX-License-Identifier: Apache-2.0
//! `npl-agent`: parses the command line, starts logging and calls the library.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use npl_agent::{
    agent::run,
    cli,
    config::{
        Config, ConfigError,
        args::{Cli, Command, RunArgs},
        environment,
        kubectl_args::KubectlCli,
    },
    core::{pages, verdict::HealthVerdict},
    process::{
        memory,
        telemetry::{self, LogFormat},
    },
};
use tracing::warn;

/// The exit code for usage errors, the same as that of clap.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    if cli::kubectl::is_plugin(std::env::args_os().next().as_deref()) {
        return run_plugin();
    }
    let outcome = match Cli::try_parse() {
        Ok(cli) => dispatch(cli),
        Err(error) => match ConfigError::from_clap(&error) {
            Some(refused) => return usage_error(refused),
            None => error.exit(),
        },
    };
    outcome.unwrap_or_else(|error| {
        cli::report_error(&error);
        ExitCode::FAILURE
    })
}

/// Runs the program as the kubectl plug-in `kubectl npl`.
fn run_plugin() -> ExitCode {
    let outcome = match KubectlCli::try_parse() {
        Ok(cli) => cli::kubectl::run(&cli),
        Err(error) => match ConfigError::from_clap(&error) {
            Some(refused) => return usage_error(refused),
            None => error.exit(),
        },
    };
    outcome.unwrap_or_else(|error| {
        cli::report_error(&error);
        ExitCode::from(HealthVerdict::CannotTell.exit_code())
    })
}

fn usage_error(error: impl Into<anyhow::Error>) -> ExitCode {
    cli::report_error(&error.into());
    ExitCode::from(USAGE)
}

/// Logs or prints the error with which the agent exits.
fn report_fatal(format: LogFormat, error: &anyhow::Error) {
    if !telemetry::log_fatal(format, error) {
        cli::report_error(error);
    }
}

fn run_agent(args: RunArgs, runtime: &tokio::runtime::Runtime) -> ExitCode {
    let format = args.log_format;
    for name in environment::unknown_variables() {
        warn!(
            see = pages::url(pages::OPTIONS),
            name,
            "this environment variable begins with NPL_, but the agent has no variable of this name: check the spelling"
        );
    }
    let config = match Config::try_from(args) {
        Ok(config) => config,
        Err(error) => {
            report_fatal(format, &error.into());
            return ExitCode::from(USAGE);
        }
    };
    match runtime.block_on(run::run(config)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report_fatal(format, &error);
            ExitCode::FAILURE
        }
    }
}

fn dispatch(cli: Cli) -> anyhow::Result<ExitCode> {
    memory::use_one_heap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let outcome = match cli.command {
        Command::Run(args) => {
            let filter = std::env::var(telemetry::FILTER_VARIABLE).ok();
            if let Err(error) = telemetry::init(args.log_format, filter.as_deref()) {
                return Ok(usage_error(error));
            }
            Ok(run_agent(*args, &runtime))
        }
        Command::Status(args) => runtime.block_on(cli::status::show(&args)),
        Command::Mappings(args) => runtime.block_on(cli::mappings::show(&args)).map(|()| ExitCode::SUCCESS),
        Command::Why(args) => runtime.block_on(cli::why::show(&args)),
        Command::Trace(args) => runtime.block_on(cli::trace::run(&args)).map(|()| ExitCode::SUCCESS),
        Command::Flows(args) => runtime.block_on(cli::flows::show(&args)).map(|()| ExitCode::SUCCESS),
        Command::Doctor(args) => runtime.block_on(cli::doctor::show(&args)),
        Command::Top(args) => runtime.block_on(cli::top::show(&args)).map(|()| ExitCode::SUCCESS),
        Command::Bundle(args) => runtime.block_on(cli::bundle::show(&args)).map(|()| ExitCode::SUCCESS),
        Command::Echo(command) => cli::echo::run(&command).map(|()| ExitCode::SUCCESS),
        Command::Generate(command) => cli::generate::run(Cli::command(), &command).map(|()| ExitCode::SUCCESS),
        Command::Load(args) => cli::load::load(&args).map(|()| ExitCode::SUCCESS),
        Command::Retire(args) => runtime.block_on(cli::retire::retire(args)).map(|()| ExitCode::SUCCESS),
        Command::Cleanup(args) => runtime.block_on(cli::cleanup::remove_and_stay(&args)).map(|()| ExitCode::SUCCESS),
    };
    // A blocking thread may still be in a system call. The process exits without waiting for this thread.
    runtime.shutdown_background();
    outcome
}
