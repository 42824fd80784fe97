// SPDX-License-Identifier: Apache-2.0
//! The fuzz target `command_line`: arguments of the programs, and the configuration that results from the arguments.

use std::{collections::BTreeSet, ffi::OsString, os::unix::ffi::OsStringExt as _, time::Duration};

use clap::Parser;

use super::{
    Config, ConfigError,
    args::{Cli, Command},
    environment,
    kubectl_args::KubectlCli,
    value::is_subdomain,
};
use crate::{
    core::devices::DeviceSelection,
    fuzzing::{Input, assert_is_one_line},
};

/// The maximum number of arguments of one input.
const MAX_ARGUMENTS: usize = 16;
const DAY: Duration = Duration::from_hours(24);

/// Checks the command line. The first byte of the input selects the program: `npl-agent`, `npl-agent run` with the flag
/// `--node-name`, the kubectl plug-in, or the names of environment variables. The remaining bytes are arguments, each
/// on a line of its own; `\0` in an argument stands for a line break.
pub fn command_line(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let program = input.byte() % 4;
    let lines = input.rest().split(|byte| *byte == b'\n').take(MAX_ARGUMENTS);
    let arguments: Vec<OsString> = lines.map(argument).collect();
    let all = |start: &[&str]| start.iter().map(OsString::from).chain(arguments.clone()).collect::<Vec<_>>();
    match program {
        0 => check_agent(all(&["npl-agent"])),
        1 => check_agent(all(&["npl-agent", "run", "--node-name", "worker-1"])),
        2 => drop(parse::<KubectlCli>(all(&["kubectl-npl"]))),
        _ => check_variables(arguments),
    }
}

fn argument(line: &[u8]) -> OsString {
    OsString::from_vec(line.iter().map(|byte| if *byte == 0 { b'\n' } else { *byte }).collect())
}

/// Parses a command line. Asserts that the error of one of NPL's value parsers is one line with the flag.
fn parse<T: Parser>(arguments: Vec<OsString>) -> Option<T> {
    match T::try_parse_from(arguments) {
        Ok(parsed) => Some(parsed),
        Err(error) => {
            let text = ConfigError::from_clap(&error).map(|refused| refused.to_string());
            match text {
                Some(text) => assert_is_complaint(&text),
                None => assert!(!error.to_string().is_empty()),
            }
            None
        }
    }
}

fn assert_is_complaint(text: &str) {
    assert_is_one_line(text);
    assert!(text.starts_with("--") || text.starts_with('<') || text.starts_with('['), "no flag: {text:?}");
}

fn check_agent(arguments: Vec<OsString>) {
    let Some(Cli { command: Command::Run(args) }) = parse(arguments) else { return };
    let config = match Config::try_from(*args) {
        Ok(config) => config,
        Err(error) => return assert_is_complaint(&error.to_string()),
    };
    let settings = &config.settings;
    assert!(settings.port_range.start().0 != 0 && settings.port_range.start() < settings.port_range.end());
    assert!(settings.port_range.len() >= 2);
    assert!(!settings.protocols.is_empty() && !settings.families.is_empty());
    for millis in [settings.drain_millis, settings.quarantine_millis] {
        assert!(Duration::from_millis(millis) <= DAY, "{millis} ms");
    }
    assert!(config.resync >= Duration::from_secs(1) && config.resync <= DAY, "{:?}", config.resync);
    assert!(is_subdomain(&config.node_name, 253) && is_subdomain(&config.annotation_keys.mapping, 63));
    for path in [&config.bpffs, &config.runtime_dir] {
        assert!(path.is_absolute(), "{}", path.display());
    }
    if let DeviceSelection::Named(names) = &config.devices {
        let is_name = |name: &String| (1..=15).contains(&name.len()) && !name.contains(char::is_whitespace);
        assert!(!names.is_empty() && names.iter().all(is_name), "{names:?}");
    }
}

/// Checks that only variables with the prefix of NPL are reported as unknown, and none that a flag reads.
fn check_variables(names: Vec<OsString>) {
    let names: BTreeSet<String> = names.into_iter().filter_map(|name| name.into_string().ok()).collect();
    let known = environment::known();
    for name in environment::unknown(&names, &known) {
        assert!(names.contains(&name) && name.starts_with("NPL_") && !known.contains(&name), "{name:?}");
    }
}
