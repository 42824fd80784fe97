// SPDX-License-Identifier: Apache-2.0
//! `flags.md`, from clap's model of the command line.

use std::fmt::Write as _;

use clap::{Arg, Command, CommandFactory as _};

use super::markdown::{anchor, code, heading, prose, table};
use crate::{config::args::Cli, process::telemetry};

pub(super) fn body() -> String {
    let command = Cli::command();
    let shown = || command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    let mut text =
        "A flag takes precedence over its variable. An invalid value ends the command with exit code 2 and one \
                    sentence that names the flag and a valid example.\n\n"
            .to_owned();
    text += &table(
        &["command", "purpose"],
        shown().map(|subcommand| {
            let title = title(subcommand);
            vec![format!("[`{title}`]({})", anchor(&title)), about(subcommand)]
        }),
    );
    let _infallible = write!(
        text,
        "\nThe variable `{}` has no flag: it selects the log lines of `npl-agent run` by level and module, for example \
         `npl_agent=debug,warn`. Default: `{}`.\n",
        telemetry::FILTER_VARIABLE,
        telemetry::DEFAULT_FILTER
    );
    for subcommand in shown() {
        text += &section(subcommand, &title(subcommand));
    }
    text
}

/// The flags of a program without subcommands, as the body of a page.
pub fn of_program(command: &Command) -> String {
    section(command, command.get_name())
}

fn title(subcommand: &Command) -> String {
    format!("npl-agent {}", subcommand.get_name())
}

fn about(subcommand: &Command) -> String {
    subcommand.get_long_about().or(subcommand.get_about()).map(|text| prose(&text.to_string())).unwrap_or_default()
}

fn section(subcommand: &Command, title: &str) -> String {
    let flags: Vec<&Arg> = subcommand.get_arguments().filter(|flag| flag.get_env().is_some()).collect();
    let name_of = |flag: &Arg| format!("{} --{}", subcommand.get_name(), flag.get_long().unwrap_or_default());
    let mut text = heading(2, title) + &about(subcommand) + "\n\n";
    text += &table(
        &["flag", "variable", "default"],
        flags.iter().map(|flag| {
            let link = format!("[`--{}`]({})", flag.get_long().unwrap_or_default(), anchor(&name_of(flag)));
            vec![link, code(&variable(flag)), default(flag)]
        }),
    );
    for flag in flags {
        text += &heading(3, &name_of(flag));
        let _infallible =
            writeln!(text, "{}, variable {}. Default: {}.", code(&usage(flag)), code(&variable(flag)), default(flag));
        let _infallible = writeln!(text, "\n{}", help(flag));
    }
    text
}

fn help(flag: &Arg) -> String {
    let sentences = flag.get_long_help().or(flag.get_help()).map(|text| prose(&text.to_string())).unwrap_or_default();
    if !flag.get_action().takes_values() {
        return sentences + " The variable takes `true` or `false`.";
    }
    let values = flag.get_possible_values();
    let shown = values.iter().map(|value| {
        let meaning = value.get_help().map(|text| prose(&text.to_string())).unwrap_or_default();
        format!("\n* {}: {meaning}", code(value.get_name()))
    });
    let list: String = shown.collect();
    if list.is_empty() { sentences } else { sentences + "\n" + &list }
}

fn variable(flag: &Arg) -> String {
    flag.get_env().unwrap_or_default().to_string_lossy().into_owned()
}

fn default(flag: &Arg) -> String {
    let values: Vec<_> = flag.get_default_values().iter().map(|value| code(&value.to_string_lossy())).collect();
    match values.as_slice() {
        [] if flag.is_required_set() => "none; required".to_owned(),
        [] => "unset".to_owned(),
        values => values.join(", "),
    }
}

/// The flag with its value, as on the command line.
fn usage(flag: &Arg) -> String {
    let name = flag.get_long().unwrap_or_default();
    if !flag.get_action().takes_values() {
        return format!("--{name}");
    }
    let values: Vec<_> = flag.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
    let names = || flag.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect();
    let values: Vec<String> = if values.is_empty() { names() } else { values };
    format!("--{name} {}", values.join("|"))
}
