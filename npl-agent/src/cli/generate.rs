// SPDX-License-Identifier: Apache-2.0
//! The hidden commands `completion` and `man`. Both commands use clap's definition of the command line: `completion`
//! prints the completion script of a shell, and `man` writes the man pages.

use std::{fs, io, path::Path};

use anyhow::Context as _;
use clap::Command;
use clap_complete::Shell;

use crate::config::args::GenerateCommand;

/// Depending on the command, prints a shell's completion script for `program`, or writes the man pages of `program` and
/// of its subcommands.
///
/// # Errors
///
/// If standard output cannot be written, or if the directory or a man page cannot be created.
pub fn run(mut program: Command, command: &GenerateCommand) -> anyhow::Result<()> {
    match command {
        GenerateCommand::Completion { shell } => super::print(&completion_text(&mut program, *shell)?),
        GenerateCommand::Man { directory } => man_pages(program, directory),
    }
}

fn completion_text(command: &mut Command, shell: Shell) -> anyhow::Result<String> {
    let name = command.get_name().to_owned();
    let mut text = Vec::new();
    clap_complete::generate(shell, command, name, &mut text);
    String::from_utf8(text).context("the completion is not UTF-8")
}

/// Creates the directory `folder`, and writes the man pages of a program and of its subcommands into it.
fn man_pages(command: Command, folder: &Path) -> anyhow::Result<()> {
    let write = || -> io::Result<()> {
        fs::create_dir_all(folder)?;
        clap_mangen::generate_to(command, folder)
    };
    write().with_context(|| format!("write man pages into {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, ValueEnum as _};
    use clap_complete::Shell;

    use super::{completion_text, man_pages};
    use crate::config::{args::Cli, kubectl_args::KubectlCli};

    #[test]
    fn every_shell_completes_every_command() {
        for shell in Shell::value_variants() {
            let text = completion_text(&mut Cli::command(), *shell).unwrap();
            for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
                assert!(text.contains(command.get_name()), "{shell} does not complete {}", command.get_name());
            }
        }
    }

    #[test]
    fn every_command_that_is_shown_has_a_man_page() {
        let folder = std::env::temp_dir().join(format!("npl-man-{}", std::process::id()));
        for command in [Cli::command(), KubectlCli::command()] {
            man_pages(command.clone(), &folder).unwrap();
            for subcommand in command.get_subcommands().filter(|it| !it.is_hide_set()) {
                let page = folder.join(format!("{}-{}.1", command.get_name(), subcommand.get_name()));
                let text = std::fs::read_to_string(&page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
                assert!(text.contains(".SH SYNOPSIS"), "{text}");
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
