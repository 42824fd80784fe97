// SPDX-License-Identifier: Apache-2.0
//! `kubectl npl`: shows the whole cluster from a workstation. The plug-in is the agent's binary under the name
//! `kubectl-npl`, by which kubectl finds it.
//!
//! The plug-in runs `kubectl` for every request, so it uses the user's contexts, credentials and proxies.

mod check;
mod cluster;
mod mappings;
mod members;
mod nodes;
mod status;
mod test;
mod why;

use std::{
    ffi::OsStr,
    io::Write as _,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context as _, bail};
use clap::CommandFactory as _;
use serde_json::Value;

use crate::{
    cli::generate,
    config::kubectl_args::{ConnectionArgs, KubectlCli, KubectlCommand},
};

/// The file name under which the binary acts as the plug-in.
pub const PLUGIN: &str = "kubectl-npl";

/// Whether the binary was started as the plug-in.
pub fn is_plugin(program: Option<&OsStr>) -> bool {
    program.and_then(|program| Path::new(program).file_name()).is_some_and(|name| name == PLUGIN)
}

/// Runs a command of the plug-in.
///
/// # Errors
///
/// If kubectl cannot be run or refuses a request.
pub fn run(cli: &KubectlCli) -> anyhow::Result<ExitCode> {
    let kubectl = Kubectl { connection: &cli.connection };
    match &cli.command {
        KubectlCommand::Mappings(args) => mappings::show(kubectl, args),
        KubectlCommand::Members(args) => members::show(kubectl, args),
        KubectlCommand::Status(args) => status::show(kubectl, args),
        KubectlCommand::Check(args) => check::show(kubectl, args),
        KubectlCommand::Why(args) => why::show(kubectl, args),
        KubectlCommand::Test(args) => test::run(kubectl, args),
        KubectlCommand::On(args) => nodes::run_on(kubectl, args),
        KubectlCommand::Generate(command) => generate::run(KubectlCli::command(), command).map(|()| ExitCode::SUCCESS),
    }
}

/// Runs kubectl with the user's connection options.
#[derive(Debug, Clone, Copy)]
struct Kubectl<'a> {
    connection: &'a ConnectionArgs,
}

impl Kubectl<'_> {
    fn command(self, arguments: &[&str]) -> Command {
        let ConnectionArgs { context, kubeconfig, .. } = self.connection;
        let mut command = Command::new("kubectl");
        command.args(context.iter().flat_map(|context| ["--context", context]));
        if let Some(kubeconfig) = kubeconfig {
            command.arg("--kubeconfig").arg(kubeconfig);
        }
        command.args(arguments).stdin(Stdio::null());
        command
    }

    /// The exit code and standard output of kubectl. If kubectl fails without standard output, its standard error is
    /// returned as the error.
    fn output(self, arguments: &[&str]) -> anyhow::Result<(i32, String)> {
        let output = self.command(arguments).output().context("run kubectl: it must be on the PATH")?;
        let code = output.status.code().context("kubectl was killed by a signal")?;
        if code != 0 && output.stdout.is_empty() {
            bail!("`kubectl {}`: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim_end());
        }
        Ok((code, String::from_utf8_lossy(&output.stdout).into_owned()))
    }

    /// Creates an object. A Ctrl-C of the terminal does not reach this kubectl, so that each object either exists or was
    /// refused.
    fn create(self, object: &Value) -> anyhow::Result<()> {
        let mut command = self.command(&["create", "--filename", "-"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut kubectl = command.spawn().context("run kubectl: it must be on the PATH")?;
        if let Some(mut input) = kubectl.stdin.take() {
            // If kubectl ends early, its standard error has the reason.
            drop(input.write_all(object.to_string().as_bytes()));
        }
        let output = kubectl.wait_with_output()?;
        let reason = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(output.status.success(), "`kubectl create`: {}", reason.trim_end());
        Ok(())
    }

    /// The elements of a Kubernetes list in JSON.
    fn list(self, arguments: &[&str]) -> anyhow::Result<Vec<Value>> {
        let (code, text) = self.output(&[&["get", "--output", "json"], arguments].concat())?;
        if code != 0 {
            bail!("`kubectl get {}` exited with {code}", arguments.join(" "));
        }
        let mut list: Value = serde_json::from_str(&text).context("decode the list of kubectl")?;
        let Some(Value::Array(items)) = list.get_mut("items").map(Value::take) else {
            bail!("`kubectl get {}` returned no list", arguments.join(" "));
        };
        Ok(items)
    }
}

/// The elements of the array at a JSON pointer of an object; none if the field is absent.
fn items_at<'a>(object: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    object.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
}

/// Whether the condition `Ready` of a Pod or Node is true.
fn is_ready(object: &Value) -> bool {
    items_at(object, "/status/conditions")
        .any(|condition| text_at(condition, "/type") == "Ready" && text_at(condition, "/status") == "True")
}

/// The string at a JSON pointer of an object; empty if the field is absent.
fn text_at<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}
