// SPDX-License-Identifier: Apache-2.0
//! Renders `flags.md` from clap's model of the command line.

use std::fmt::Write as _;

use clap::{Arg, Command, CommandFactory as _};

use super::markdown::{anchor, code, heading, prose, table};
use crate::{
    config::{args::Cli, kubectl_args::KubectlCli},
    process::telemetry,
};

pub(super) fn body() -> String {
    let agent = Cli::command();
    let plugin = KubectlCli::command();
    let commands: Vec<(String, &Command)> = [("npl-agent", &agent), ("kubectl npl", &plugin)]
        .into_iter()
        .flat_map(|(name, of)| subcommands(name, of))
        .collect();
    let mut text =
        "A flag takes precedence over its variable. An invalid value ends the command with exit code 2 and an error \
         message that names the flag and a valid example.\n\n"
            .to_owned();
    text += &table(
        &["command", "purpose"],
        commands.iter().map(|(title, subcommand)| vec![format!("[`{title}`]({})", anchor(title)), about(subcommand)]),
    );
    let _infallible = write!(
        text,
        "\nThe variable `{}` has no flag: it selects the log lines of `npl-agent run` by level and module, for example \
         `npl_agent=debug,warn`. Default: `{}`.\n",
        telemetry::FILTER_VARIABLE,
        telemetry::DEFAULT_FILTER
    );
    for (title, subcommand) in &commands {
        text += &section(title, subcommand);
    }
    text += &heading(2, "kubectl npl");
    text += "Every command of the plug-in has these flags.\n\n";
    text += &section_of_flags("kubectl npl", &plugin);
    text
}

/// Renders the flags of a program without subcommands, as the body of a page.
pub fn of_program(command: &Command) -> String {
    section(command.get_name(), command)
}

/// Returns the subcommands of a program that are not hidden, each with the title of its section.
fn subcommands<'a>(program: &'static str, command: &'a Command) -> impl Iterator<Item = (String, &'a Command)> {
    let shown = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    shown.map(move |subcommand| (format!("{program} {}", subcommand.get_name()), subcommand))
}

fn about(subcommand: &Command) -> String {
    subcommand.get_long_about().or(subcommand.get_about()).map(|text| prose(&text.to_string())).unwrap_or_default()
}

fn section(title: &str, subcommand: &Command) -> String {
    let examples = subcommand.get_after_help().map(|text| format!("\n```text\n{text}\n```\n")).unwrap_or_default();
    heading(2, title) + &about(subcommand) + "\n" + &examples + "\n" + &section_of_flags(title, subcommand)
}

/// Renders the table of a command's flags and arguments, and one section for each flag or argument.
fn section_of_flags(title: &str, command: &Command) -> String {
    let flags: Vec<&Arg> = command.get_arguments().filter(|flag| !flag.is_hide_set()).collect();
    let short = title.strip_prefix("npl-agent ").unwrap_or(title);
    let name_of = |flag: &Arg| format!("{short} {}", shown_name(flag));
    let mut text = table(
        &["flag", "variable", "default"],
        flags.iter().map(|flag| {
            let link = format!("[`{}`]({})", shown_name(flag), anchor(&name_of(flag)));
            vec![link, shown_variable(flag), default(flag)]
        }),
    );
    for flag in flags {
        text += &heading(3, &name_of(flag));
        let _infallible =
            writeln!(text, "{}, variable {}. Default: {}.", code(&usage(flag)), shown_variable(flag), default(flag));
        let _infallible = writeln!(text, "\n{}", help(flag));
    }
    text
}

/// Returns `--flag`, or the name of a positional argument.
fn shown_name(flag: &Arg) -> String {
    flag.get_long().map_or_else(|| flag.get_id().as_str().to_ascii_uppercase(), |name| format!("--{name}"))
}

fn help(flag: &Arg) -> String {
    let sentences = flag.get_long_help().or(flag.get_help()).map(|text| prose(&text.to_string())).unwrap_or_default();
    if !flag.get_action().takes_values() {
        let variable = if flag.get_env().is_some() { " The variable takes `true` or `false`." } else { "" };
        return sentences + variable;
    }
    let values = flag.get_possible_values();
    let shown = values.iter().map(|value| {
        let meaning = value.get_help().map(|text| prose(&text.to_string())).unwrap_or_default();
        format!("\n* {}: {meaning}", code(value.get_name()))
    });
    let list: String = shown.collect();
    if list.is_empty() { sentences } else { sentences + "\n" + &list }
}

/// Returns the environment variable of a flag; `none` for a flag that can only be given on the command line.
fn shown_variable(flag: &Arg) -> String {
    flag.get_env().map_or_else(|| "none".to_owned(), |name| code(&name.to_string_lossy()))
}

fn default(flag: &Arg) -> String {
    let values: Vec<_> = flag.get_default_values().iter().map(|value| code(&value.to_string_lossy())).collect();
    match values.as_slice() {
        [] if flag.is_required_set() => "none; required".to_owned(),
        [] => "unset".to_owned(),
        values => values.join(", "),
    }
}

/// Returns the flag with its value, as a user writes it on the command line.
fn usage(flag: &Arg) -> String {
    let values: Vec<_> = flag.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
    let names = || flag.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect();
    let values: Vec<String> = if values.is_empty() { names() } else { values };
    let values = values.join("|");
    match flag.get_long() {
        None => values,
        Some(name) if !flag.get_action().takes_values() => format!("--{name}"),
        Some(name) if flag.is_require_equals_set() => format!("--{name}[={values}]"),
        Some(name) => format!("--{name} {values}"),
    }
}
