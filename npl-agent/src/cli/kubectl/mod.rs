// SPDX-License-Identifier: Apache-2.0
//! `kubectl npl`: shows the node ports of the whole cluster from a workstation. The plug-in is the agent's binary, with
//! the file name `kubectl-npl`: kubectl finds a plug-in by its file name.
//!
//! The plug-in runs `kubectl` for every request, so it uses the user's contexts, credentials and proxies.

mod bundle;
mod check;
mod child;
mod cluster;
mod interrupt;
mod mappings;
mod members;
mod node_pod;
mod nodes;
mod parallel;
#[cfg(test)]
mod script;
mod status;
mod temporary;
mod test;
mod why;

use std::{
    cell::OnceCell,
    ffi::OsStr,
    io::Write as _,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, ExitCode, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use clap::CommandFactory as _;
use serde_json::Value;

use self::interrupt::Interrupt;
use crate::{
    cli::generate,
    config::kubectl_args::{ConnectionArgs, KubectlCli, KubectlCommand},
};

/// The file name under which the binary acts as the plug-in.
pub const PLUGIN: &str = "kubectl-npl";

/// Returns whether the binary was started as the plug-in.
pub fn is_plugin(program: Option<&OsStr>) -> bool {
    program.and_then(|program| Path::new(program).file_name()).is_some_and(|name| name == PLUGIN)
}

/// Returns the name under which the user has called the binary, for messages: that of the plug-in or of the agent.
pub(super) fn command_name(program: Option<&OsStr>) -> &'static str {
    if is_plugin(program) { "kubectl npl" } else { "npl-agent" }
}

/// Runs a command of the plug-in.
///
/// # Errors
///
/// If kubectl cannot be started, or if the command fails.
pub fn run(cli: &KubectlCli) -> anyhow::Result<ExitCode> {
    let kubectl = Kubectl { program: "kubectl", connection: &cli.connection, interrupt: None };
    match &cli.command {
        KubectlCommand::Mappings(args) => mappings::show(kubectl, args),
        KubectlCommand::Members(args) => members::show(kubectl, args),
        KubectlCommand::Status(args) => status::show(kubectl, args),
        KubectlCommand::Check(args) => check::show(kubectl, args),
        KubectlCommand::Why(args) => why::show(kubectl, args),
        KubectlCommand::Test(args) => test::run(kubectl, args),
        KubectlCommand::Bundle(args) => bundle::show(kubectl, args),
        KubectlCommand::On(args) => nodes::run_on(kubectl, args),
        KubectlCommand::Generate(command) => generate::run(KubectlCli::command(), command).map(|()| ExitCode::SUCCESS),
    }
}

/// The time for which kubectl may continue to create an object after a signal or after the end of the time limit.
const CREATION: Duration = Duration::from_secs(5);

/// Runs kubectl with the user's connection options.
#[derive(Debug, Clone, Copy)]
struct Kubectl<'a> {
    program: &'a str,
    connection: &'a ConnectionArgs,
    /// The signals and the time limit that end a request early; `None` if requests end only when kubectl exits.
    interrupt: Option<&'a Interrupt>,
}

impl<'a> Kubectl<'a> {
    /// Returns a copy of this value whose requests end early when a signal arrives or the time limit is over.
    const fn within(self, interrupt: &'a Interrupt) -> Self {
        Self { interrupt: Some(interrupt), ..self }
    }

    fn check(self) -> anyhow::Result<()> {
        self.interrupt.map_or(Ok(()), Interrupt::check)
    }

    fn command(self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program);
        command.args(self.options()).args(arguments).stdin(Stdio::null());
        command
    }

    /// Returns the options of kubectl that select the cluster.
    fn options(self) -> Vec<&'a OsStr> {
        let ConnectionArgs { context, kubeconfig, .. } = self.connection;
        let context = context.iter().flat_map(|context| ["--context".as_ref(), context.as_ref()]);
        let kubeconfig = kubeconfig.iter().flat_map(|file| ["--kubeconfig".as_ref(), file.as_os_str()]);
        context.chain(kubeconfig).collect()
    }

    /// Returns the command line of kubectl in a form that a user can copy and run.
    fn line(self, arguments: &[&str]) -> String {
        let options = self.options();
        let options = options.iter().map(|option| option.to_string_lossy());
        let words = options.chain(arguments.iter().map(|argument| (*argument).into()));
        format!("kubectl {}", words.collect::<Vec<_>>().join(" "))
    }

    /// Runs kubectl until it exits, or until a signal or the time limit ends the request.
    fn run(self, arguments: &[&str]) -> anyhow::Result<Output> {
        let mut command = self.command(arguments);
        child::output(start(&mut command)?, || self.check())
    }

    /// Runs kubectl, and returns its exit code and standard output. If kubectl fails and has printed nothing to
    /// standard output, returns its standard error as the error.
    fn output(self, arguments: &[&str]) -> anyhow::Result<(i32, String)> {
        let output = self.run(arguments)?;
        let code = output.status.code().context("kubectl was killed by a signal")?;
        if code != 0 && output.stdout.is_empty() {
            bail!("`kubectl {}`: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim_end());
        }
        Ok((code, String::from_utf8_lossy(&output.stdout).into_owned()))
    }

    /// Creates a Kubernetes object. After a signal or the end of the time limit, the creation may continue for
    /// [`CREATION`], so that this process usually learns whether the object exists.
    fn create(self, object: &Value) -> anyhow::Result<()> {
        let mut command = self.command(&["create", "--filename", "-"]);
        let mut kubectl = start(command.stdin(Stdio::piped()).process_group(0))?;
        if let Some(mut input) = kubectl.stdin.take() {
            // A write error is ignored: if kubectl ends before it has read the object, kubectl's standard error
            // contains the reason.
            drop(input.write_all(object.to_string().as_bytes()));
        }
        let interrupted = OnceCell::new();
        let check = || {
            self.check().or_else(|error| {
                let since: &Instant = interrupted.get_or_init(Instant::now);
                if since.elapsed() < CREATION { Ok(()) } else { Err(error) }
            })
        };
        let output = child::output(kubectl, check)?;
        succeeded(&output).context("`kubectl create`")
    }

    /// Removes a Kubernetes object and waits until the object is gone. A Ctrl-C of the terminal does not reach kubectl,
    /// because kubectl runs in a separate process group here.
    fn delete(self, arguments: &[&str]) -> anyhow::Result<()> {
        let mut command = self.command(&[&["delete"], arguments].concat());
        let output = child::output(start(command.process_group(0))?, || self.check())?;
        succeeded(&output)
    }

    /// Requests a list of Kubernetes objects, and returns the list's elements as JSON.
    fn list(self, arguments: &[&str]) -> anyhow::Result<Vec<Value>> {
        let output = self.run(&[&["get", "--output", "json"], arguments].concat())?;
        // If the API server rejects the request, kubectl prints an empty list, and the reason to standard error.
        succeeded(&output).with_context(|| format!("`kubectl get {}`", arguments.join(" ")))?;
        let mut list: Value = serde_json::from_slice(&output.stdout).context("decode the list of kubectl")?;
        let Some(Value::Array(items)) = list.get_mut("items").map(Value::take) else {
            bail!("`kubectl get {}` returned no list", arguments.join(" "));
        };
        Ok(items)
    }
}

fn start(command: &mut Command) -> anyhow::Result<Child> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("run kubectl: it must be on the PATH")
}

/// Returns whether kubectl has failed because the user lacks a permission: kubectl then prints
/// `Error from server (Forbidden): …`.
fn is_forbidden(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.to_string().contains("Error from server (Forbidden)"))
}

/// Returns an error with the command's standard error if the command has failed.
fn succeeded(output: &Output) -> anyhow::Result<()> {
    anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim_end());
    Ok(())
}

/// Returns the elements of the array at a JSON pointer of an object; none if the field is absent.
fn items_at<'a>(object: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    object.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
}

/// Returns whether the condition `Ready` of a Pod or Node is true.
fn is_ready(object: &Value) -> bool {
    items_at(object, "/status/conditions")
        .any(|condition| text_at(condition, "/type") == "Ready" && text_at(condition, "/status") == "True")
}

/// Returns the string at a JSON pointer of an object; empty if the field is absent.
fn text_at<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::kubectl::script::Script;

    #[test]
    fn messages_begin_with_the_name_by_which_the_user_calls_the_command() {
        for (program, name) in [
            (Some("/usr/local/bin/kubectl-npl"), "kubectl npl"),
            (Some("kubectl-npl"), "kubectl npl"),
            (Some("/npl-agent"), "npl-agent"),
            (None, "npl-agent"),
        ] {
            assert_eq!(command_name(program.map(OsStr::new)), name, "{program:?}");
        }
    }

    /// If the API server rejects a list, kubectl prints an empty list and exits with 1.
    #[test]
    fn the_error_of_a_rejected_list_states_the_reason() {
        let rejected = |name: &str, reason: &str| {
            let text = format!("echo '{{\"items\": []}}'; echo 'Error from server ({reason}): the reason' >&2; exit 1");
            Script::new(name, &text).with_kubectl(|kubectl| kubectl.list(&["nodes"])).unwrap_err()
        };
        let forbidden = rejected("list-forbidden", "Forbidden");
        assert_eq!(format!("{forbidden:#}"), "`kubectl get nodes`: Error from server (Forbidden): the reason");
        assert!(is_forbidden(&forbidden));
        assert!(!is_forbidden(&rejected("list-failed", "InternalError")));
    }
}
