// SPDX-License-Identifier: Apache-2.0
//! Cilium as the Pod network, policy engine and Service proxy: Cilium's agent is a process on each Node. Cilium's
//! operator does not run: the test kit creates the custom resource definitions from the files of Cilium's source, and
//! Cilium's agent reads the Pod ranges from the Node objects.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use aya::programs::{SchedClassifier, TcAttachType};

use super::binaries::find_directory;
use super::cni;
use super::init::SETTINGS;
use super::network::{NodeNumber, POD_RANGES};
use super::provider::Place;
use crate::api_client::ApiClient;
use crate::cluster::{Cluster, timeout_option};
use crate::control_plane::{Account, ControlPlane, write_secret};
use crate::netns::Netns;
use crate::poll;
use crate::process::Process;
use crate::tools;

/// The environment variable with the directory of Cilium's programs and files.
const VARIABLE: &str = "NPL_CILIUM_DIR";

/// The environment variable with the directory of the C compiler that compiles Cilium's kernel programs.
const COMPILER_VARIABLE: &str = "NPL_CLANG_DIR";

/// The API server user of Cilium.
const USER: &str = "npl:cilium";

/// Cilium's agent and CNI plug-in, its custom resource definitions, and the source of its kernel programs.
const FILES: [&str; 4] = ["daemon", "cilium-cni", "crds", "bpf"];

/// The programs of Cilium on the uplink. Pods of the Node have no network until the agent has attached both programs,
/// which happens after the Node becomes ready.
const UPLINK_PROGRAMS: [(TcAttachType, &str); 2] =
    [(TcAttachType::Ingress, "cil_from_netdev"), (TcAttachType::Egress, "cil_to_netdev")];

/// The directory for temporary files of Cilium's agent inside the Node. containerd ignores a settings file that is
/// renamed into the directory of the CNI settings. This directory and the directory of the CNI settings are therefore
/// on different mounts: Cilium's agent cannot rename its temporary file, and creates the settings file in place.
const AGENT_TEMPORARY: &str = "/var/lib/cilium-temporary";

/// The same directory, relative to the Node's directory.
const AGENT_TEMPORARY_OUTSIDE: &str = "lib/cilium-temporary";

/// The directory of [`COMPILER`] inside the Node, relative to the root.
const COMPILER_FOLDER: &str = "run/npl/compiler";

/// Compiles one of Cilium's kernel programs with the compiler `$NPL_CLANG`, and stores the object in the directory
/// `$TMPDIR`. Cilium's agent kills this script when the creation of a Pod takes longer than 90 s, which happens on a
/// busy machine. The compilation then continues, and the script answers the agent's next attempt with the stored
/// object.
const COMPILER: &str = r#"#!/bin/sh
case " $* " in *" -c "*) ;; *) exec "$NPL_CLANG" "$@" ;; esac
key=$({ printf '%s\n' "$@"; "$NPL_CLANG" "$@" -E; } | sha256sum | cut -d ' ' -f 1)
export object="$TMPDIR/$key"
# The compilation must not write to the agent's pipe: the agent would wait until the compilation closes the pipe.
setsid flock "$object.lock" sh -c '
    [ -e "$object" ] || { "$NPL_CLANG" "$@" >"$object.new" && mv "$object.new" "$object"; }
' sh "$@" </dev/null >/dev/null 2>"$object.errors" &
wait
[ -e "$object" ] || { cat "$object.errors" >&2; exit 1; }
exec cat "$object"
"#;

/// The time limit for the programs and routes of a Node. The compilation of the programs takes half a minute on two
/// idle cores, and several times as long if the machine is busy.
const LIMIT: Duration = Duration::from_mins(6);

/// The API server account of Cilium.
pub(super) fn account() -> Account {
    Account::new(USER, &["system:masters"])
}

/// The transport of packets between Pods of different Nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Routing {
    /// VXLAN between the Nodes; iptables rules masquerade packets of Pods, and the stack forwards packets to Pods.
    Vxlan,
    /// Routes between the Nodes; kernel programs masquerade packets of Pods, and forward packets to Pods.
    Native,
}

/// Cilium's programs, files and settings.
#[derive(Clone, Debug)]
pub(super) struct Cilium {
    folder: PathBuf,
    compiler: PathBuf,
    routing: Routing,
}

impl Cilium {
    /// Finds the directories with Cilium's programs and files, and with clang.
    pub(super) fn find(routing: Routing) -> Result<Self> {
        let folder = find_directory(VARIABLE, "Cilium", &FILES)?;
        let compiler = find_directory(COMPILER_VARIABLE, "clang", &["clang"])?;
        Ok(Self { folder, compiler, routing })
    }

    /// Adds Cilium's CNI plug-in and agent to a Node. Returns the path of the plug-ins' directory inside the Node.
    pub(super) fn prepare(&self, directory: &Path, machines: &Path) -> Result<PathBuf> {
        let (plugins, inside) = cni::link_plugins(directory, machines)?;
        tools::copy_program(&self.folder.join("cilium-cni"), &plugins.join("cilium-cni"))?;
        let folder = directory.join("run/npl");
        tools::copy_program(&self.folder.join("daemon"), &folder.join("cilium-agent"))?;
        // The agent reads the source of its programs from the directory `bpf` below `--lib-dir`.
        let library = folder.join("cilium");
        let compiler = directory.join(COMPILER_FOLDER);
        for new in [&library, &compiler, &directory.join(AGENT_TEMPORARY_OUTSIDE)] {
            fs::create_dir(new).with_context(|| format!("create {}", new.display()))?;
        }
        symlink(self.folder.join("bpf"), library.join("bpf")).context("link the source of Cilium's programs")?;
        tools::write_program(&compiler.join("clang"), COMPILER)?;
        Ok(inside)
    }

    /// Creates Cilium's custom resource definitions and waits until the API server serves them.
    pub(super) fn define(&self, cluster: &Cluster) -> Result<()> {
        let folder = self.folder.join("crds").display().to_string();
        cluster.kubectl(&["create", "--recursive", "--filename", &folder])?;
        let established = ["wait", "--for=condition=Established", timeout_option()];
        cluster.kubectl(&[&established[..], &["--recursive", "--filename", &folder]].concat()).map(drop)
    }

    /// Sets the Pod ranges of a Node whose kubelet runs, and starts the Node's agent.
    pub(super) fn start(&self, place: Place<'_>, plane: &ControlPlane, client: &ApiClient) -> Result<Process> {
        cni::assign_ranges(client, place.number)?;
        write_secret(&place.directory.join("run/npl/cilium.kubeconfig"), &plane.kubeconfig(USER)?)?;
        self.run(place)
    }

    /// Starts the agent of a Node that [`Self::start`] has prepared.
    pub(super) fn run(&self, place: Place<'_>) -> Result<Process> {
        let Place { number, space, directory, .. } = place;
        let mut command = Command::new(Path::new(SETTINGS).join("cilium-agent"));
        let search = std::env::var("PATH").context("read the search path")?;
        command
            .args(FLAGS)
            .args(self.mode())
            .env("PATH", format!("/{COMPILER_FOLDER}:{search}"))
            .env("NPL_CLANG", self.compiler.join("clang"))
            .env("K8S_NODE_NAME", number.name())
            .env("CILIUM_K8S_NAMESPACE", "kube-system")
            .env("TMPDIR", AGENT_TEMPORARY);
        space.spawn(&format!("cilium-agent of {}", number.name()), command, &directory.join("log/cilium-agent.log"))
    }

    /// Returns the flags of the routing mode.
    fn mode(&self) -> Vec<String> {
        let [v4, v6] = POD_RANGES;
        match self.routing {
            Routing::Vxlan => vec!["--routing-mode=tunnel".to_owned(), "--tunnel-protocol=vxlan".to_owned()],
            Routing::Native => vec![
                "--routing-mode=native".to_owned(),
                "--auto-direct-node-routes=true".to_owned(),
                format!("--ipv4-native-routing-cidr={v4}"),
                format!("--ipv6-native-routing-cidr={v6}"),
                "--enable-bpf-masquerade=true".to_owned(),
            ],
        }
    }

    /// Waits until the agent has attached its programs to the uplink, and has added the routes to the Pods of all other
    /// Nodes.
    pub(super) fn wait_for_programs(&self, place: Place<'_>, daemon: &Process, all: &[NodeNumber]) -> Result<()> {
        let Place { number, netns, .. } = place;
        let has_programs =
            || UPLINK_PROGRAMS.iter().all(|(hook, name)| is_attached(netns, *hook, name).unwrap_or_default());
        let is_routed = |to: &NodeNumber| {
            let leads_there = |(pods, node): (IpAddr, IpAddr)| {
                let next_hop = match self.routing {
                    Routing::Vxlan => "dev cilium_host ".to_owned(),
                    Routing::Native => format!("via {node} "),
                };
                netns.ip(&format!("route get {pods}")).is_ok_and(|route| route.contains(&next_hop))
            };
            to.bridge_addresses().into_iter().zip(to.addresses()).all(leads_there)
        };
        let others = || all.iter().filter(|it| **it != number);
        let name = number.name();
        poll::until(&format!("Cilium's programs on {name}"), LIMIT, || has_programs().then_some(()))
            .and_then(|_| {
                poll::until(&format!("the routes of {name}"), LIMIT, || others().all(is_routed).then_some(()))
            })
            .map(drop)
            .with_context(|| daemon.log_tail(10))
    }
}

/// Whether a program with this name is attached to a hook of the Node's uplink by a TCX link.
fn is_attached(netns: &Netns, hook: TcAttachType, name: &str) -> Result<bool> {
    let (_, programs) =
        netns.run(|| SchedClassifier::query_tcx("eth0", hook))?.context("list the uplink's programs")?;
    Ok(programs.iter().any(|program| program.name_as_str() == Some(name)))
}

/// The flags of both routing modes.
const FLAGS: [&str; 18] = [
    "--k8s-kubeconfig-path=/run/npl/cilium.kubeconfig",
    "--state-dir=/run/cilium",
    "--lib-dir=/run/npl/cilium",
    "--bpf-root=/sys/fs/bpf",
    "--cgroup-root=/run/cilium/cgroupv2",
    "--write-cni-conf-when-ready=/run/npl/cni/05-cilium.conflist",
    "--cni-exclusive=false",
    "--ipam=kubernetes",
    "--identity-allocation-mode=crd",
    "--enable-ipv4=true",
    "--enable-ipv6=true",
    "--kube-proxy-replacement=true",
    "--enable-ipv4-masquerade=true",
    "--enable-ipv6-masquerade=true",
    // Envoy (the layer-7 proxy), Hubble and the health checks would need further processes.
    "--enable-l7-proxy=false",
    "--enable-hubble=false",
    "--enable-health-checking=false",
    "--enable-endpoint-health-checking=false",
];

#[cfg(test)]
mod tests {
    use super::*;

    /// A compiler that counts its runs, and whose run lasts until the test creates the object.
    const FAKE: &str = r#"#!/bin/sh
case "$*" in *-E*) echo source; exit ;; esac
echo run >>"$TMPDIR/runs"
until [ -e "$TMPDIR/made" ]; do sleep 0.01; done
cat "$TMPDIR/made"
"#;

    #[test]
    fn a_compilation_whose_caller_was_killed_answers_the_next_call() {
        let folder = std::env::temp_dir().join(format!("npl-compiler-{}", std::process::id()));
        let fake = folder.join("fake");
        fs::create_dir_all(&folder).unwrap();
        let program = folder.join("clang");
        tools::write_program(&program, COMPILER).unwrap();
        tools::write_program(&fake, FAKE).unwrap();
        let compile = || {
            let mut command = Command::new("sh");
            command.arg(&program).args(["-c", "a.c", "-o", "-"]).env("NPL_CLANG", &fake).env("TMPDIR", &folder);
            command
        };

        let mut killed = compile().spawn().unwrap();
        let runs = || fs::read_to_string(folder.join("runs")).ok();
        poll::until("the first run of the compiler", LIMIT, || runs().filter(|runs| runs == "run\n")).unwrap();
        killed.kill().unwrap();
        killed.wait().unwrap();
        fs::write(folder.join("made"), "object").unwrap();
        assert_eq!(tools::output(&mut compile()).unwrap(), "object");
        assert_eq!(runs().unwrap(), "run\n", "the compiler must run once");
        fs::remove_dir_all(&folder).unwrap();
    }
}
