// SPDX-License-Identifier: Apache-2.0
//! The command line of the kubectl plug-in.

use std::{path::PathBuf, str::FromStr, time::Duration};

use clap::{Args, Parser, Subcommand};

use super::{
    args::{GenerateCommand, OutputFormat},
    value,
};
use crate::core::why::Question;

/// Show and check the node ports of the whole cluster from a workstation, through `kubectl` with its contexts and
/// credentials.
#[derive(Debug, Clone, Parser)]
#[command(name = "kubectl-npl", bin_name = "kubectl npl", version, propagate_version = true)]
pub struct KubectlCli {
    /// The cluster.
    #[command(flatten)]
    pub connection: ConnectionArgs,
    /// The subcommand.
    #[command(subcommand)]
    pub command: KubectlCommand,
}

/// How to reach the cluster, and in which namespace the agents run.
#[derive(Debug, Clone, Args)]
pub struct ConnectionArgs {
    /// Use this context of the kubeconfig.
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,

    /// Use this kubeconfig file.
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// The namespace in which the agents run.
    #[arg(long, global = true, env = "NPL_AGENT_NAMESPACE", value_name = "NAME", default_value = "npl-system")]
    pub agent_namespace: String,

    /// The domain of the annotations. Give the value of the agents' flag of the same name.
    #[arg(
        long, global = true, env = "NPL_ANNOTATION_DOMAIN", value_name = "DOMAIN",
        default_value = "nodeportlocal.antrea.io", value_parser = value::domain
    )]
    pub annotation_domain: String,
}

const TEST_EXAMPLES: &str = "Examples:
  kubectl npl test                                 two Nodes with agents
  kubectl npl test --node node-1 --node node-2     these Nodes
  kubectl npl test -o json | jq '.rows[] | select(.result == \"failed\")'";

const BUNDLE_EXAMPLES: &str = "Examples:
  kubectl npl bundle > npl-bundle.tar.gz                                     every Node
  kubectl npl bundle --node node-1 --node node-2 --file npl-bundle.tar.gz    these Nodes
  kubectl npl bundle --create-pods > npl-bundle.tar.gz                       also Nodes whose agent does not run";

const ON_EXAMPLES: &str = "Examples:
  kubectl npl on node-1 flows --pod web-0
  kubectl npl on node-1 doctor
  kubectl npl on node-2 --create-pod --image registry.example/npl-agent:0.1.0 doctor     before the installation
  kubectl npl on node-2 --create-pod cleanup     a Node without an agent";

/// The subcommands of the plug-in.
#[derive(Debug, Clone, Subcommand)]
pub enum KubectlCommand {
    /// Show the published node ports of all Pods, from their annotations.
    #[command(after_help = "Examples:\n  kubectl npl mappings\n  kubectl npl mappings -n shop --node node-1")]
    Mappings(ClusterMappingsArgs),
    /// Show, for a Service, the members that each replica of npl-feed sends to load balancers. Exits with 1 if the
    /// replicas differ, 2 if a replica does not answer.
    #[command(after_help = "Examples:\n  kubectl npl members web\n  kubectl npl members web:http -n shop -o json")]
    Members(MembersArgs),
    /// Show for each Node whether the Node serves its node ports, as the Node's agent reports. Exits with 0 if all
    /// Nodes are healthy, 1 if traffic of a Node is at risk, 2 if the state of a Node cannot be read.
    #[command(after_help = "Examples:\n  kubectl npl status\n  kubectl npl status --node node-1 -o json")]
    Status(ClusterStatusArgs),
    /// Compare the annotations of all Pods with the Services and with the addresses of the Nodes. Exits with 1 on any
    /// inconsistency.
    #[command(after_help = "Examples:\n  kubectl npl check\n  kubectl npl check -n shop -o json")]
    Check(CheckArgs),
    /// Explain why a Pod or a Service is served or not, with the answers of the agents on the Nodes of its Pods.
    #[command(after_help = "Examples:\n  kubectl npl why pod/shop/web-0\n  kubectl npl why service/shop/web")]
    Why(ClusterWhyArgs),
    /// Try every path to node ports with echo Pods on two Nodes, and remove the Pods again. Prints a row for each path.
    /// For each path that fails, also prints the findings of `npl-agent doctor` on the Node that serves the mapping.
    /// Ends after 8 minutes at the latest, then removes the Pods within 5 minutes. Exits with 0 if every path that can
    /// be tried passes, 1 if a path fails, 2 if the result of a path is unknown or the Pods cannot be removed.
    #[command(after_help = TEST_EXAMPLES)]
    Test(TestArgs),
    /// Write one support archive of the whole cluster: the archive of `npl-agent bundle` of every Node, the results of
    /// `kubectl npl status`, `mappings` and `check`, and lists of the Nodes and agents. The command runs in the agents'
    /// Pods; with `--create-pods`, the archive also has the documents of Nodes where no agent runs. If the documents of
    /// a Node cannot be read, the command continues with the other Nodes, and summary.json contains the reason. The
    /// archive contains no Secret, no environment, no log, no label, and no annotation of other software. Exits with 2
    /// if documents of a Node or of the cluster are missing, or if the created Pods cannot be removed.
    #[command(after_help = BUNDLE_EXAMPLES)]
    Bundle(ClusterBundleArgs),
    /// Run a command of the agent on a Node: status, mappings, why, flows, trace, doctor, bundle, cleanup. The command
    /// runs in the agent's Pod; if no agent runs on the Node, `--create-pod` creates a Pod for this command only. Exits
    /// with the exit code of the command.
    #[command(after_help = ON_EXAMPLES)]
    On(OnArgs),
    /// The hidden commands.
    #[command(flatten)]
    Generate(GenerateCommand),
}

/// Flags of `kubectl npl mappings`.
#[derive(Debug, Clone, Args)]
pub struct ClusterMappingsArgs {
    /// Show only the node ports of Pods in this namespace.
    #[arg(long, short, value_name = "NAME")]
    pub namespace: Option<String>,

    /// Show only the node ports of Pods on this Node.
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,

    /// Print the result in this format.
    #[arg(long, short, value_enum, default_value_t)]
    pub output: OutputFormat,
}

/// Flags of `kubectl npl members`.
#[derive(Debug, Clone, Args)]
pub struct MembersArgs {
    /// The Service, and the name or number of one of its ports. Without a port: all ports.
    #[arg(value_name = "SERVICE[:PORT]")]
    pub service: ServiceName,

    /// The namespace of the Service. Unset: that of the current context.
    #[arg(long, short, value_name = "NAME")]
    pub namespace: Option<String>,

    /// Report a difference between replicas only if it lasts this long, since replicas may notice a new or deleted Pod
    /// at different times.
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = value::duration)]
    pub settle: Duration,

    /// Print the result in this format.
    #[arg(long, short, value_enum, default_value_t)]
    pub output: OutputFormat,
}

/// The name of a Service, with or without one of its ports. Another flag gives the namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceName {
    /// The name of the Service.
    pub name: String,
    /// The name or number of a port; `None` for all ports.
    pub port: Option<String>,
}

impl FromStr for ServiceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, port) = match text.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (text, None),
        };
        let is_valid = |part: &str| {
            !part.is_empty()
                && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        };
        if !is_valid(name) || port.is_some_and(|port| !is_valid(port)) {
            return Err(format!("{text:?} is not SERVICE[:PORT]: give for example web or web:http, and -n NAMESPACE"));
        }
        Ok(Self { name: name.to_owned(), port: port.map(str::to_owned) })
    }
}

/// Flags of `kubectl npl status`.
#[derive(Debug, Clone, Args)]
pub struct ClusterStatusArgs {
    /// Show only the status of this Node.
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,

    /// Print the result in this format.
    #[arg(long, short, value_enum, default_value_t)]
    pub output: OutputFormat,
}

/// Flags of `kubectl npl check`.
#[derive(Debug, Clone, Args)]
pub struct CheckArgs {
    /// Check only the Pods and Services of this namespace.
    #[arg(long, short, value_name = "NAME")]
    pub namespace: Option<String>,

    /// Report only inconsistencies that last this long, since annotations are written some time after a Pod changes.
    #[arg(long, value_name = "DURATION", default_value = "3s", value_parser = value::duration)]
    pub settle: Duration,

    /// Print the result in this format.
    #[arg(long, short, value_enum, default_value_t)]
    pub output: OutputFormat,
}

/// Flags of `kubectl npl why`.
#[derive(Debug, Clone, Args)]
pub struct ClusterWhyArgs {
    /// The Pod, a port of the Pod, or the Service.
    #[arg(value_name = "pod/NAMESPACE/NAME[:PORT]|service/NAMESPACE/NAME")]
    pub object: Question,

    /// Print the result in this format.
    #[arg(long, short, value_enum, default_value_t)]
    pub output: OutputFormat,
}

/// Flags of `kubectl npl test`.
#[derive(Debug, Clone, Args)]
pub struct TestArgs {
    /// Run the echo Pods on this Node; for two Nodes, give the flag twice. Unset: on the first two Nodes that are
    /// ready, are not cordoned and have a running agent.
    #[arg(long, value_name = "NAME")]
    pub node: Vec<String>,

    /// Run the echo Pods with this image, which must contain this version of npl-agent. Unset: with the image of the
    /// running agent, which the Nodes have pulled already.
    #[arg(long, value_name = "REFERENCE")]
    pub image: Option<String>,

    /// Print the result in this format.
    #[arg(long, short, value_enum, default_value_t)]
    pub output: OutputFormat,
}

/// Flags of `kubectl npl bundle`.
#[derive(Debug, Clone, Args)]
pub struct ClusterBundleArgs {
    /// Collect only the documents of this Node; for several Nodes, repeat the flag. Unset: every Node.
    #[arg(long, value_name = "NAME")]
    pub node: Vec<String>,

    /// Write the archive to this file, which must not exist yet. `-` or unset: to standard output.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// Include all flows of each Node. Flows contain the addresses of clients.
    #[arg(long)]
    pub flows: bool,

    /// On each Node where no agent runs, create a Pod for this command only, collect the Node's documents in this Pod,
    /// and remove the Pod afterwards. The documents contain kernel state, but no names of Pods and Services. The Pods
    /// have the host network, `CAP_BPF`, `CAP_NET_ADMIN` and the Node's whole BPF file system, but no credentials for
    /// the API server.
    #[arg(long)]
    pub create_pods: bool,

    /// Create the Pods with this image, which must contain this version of npl-agent. Unset: with the image of an agent
    /// of the cluster.
    #[arg(long, value_name = "REFERENCE", requires = "create_pods")]
    pub image: Option<String>,
}

/// Arguments of `kubectl npl on`.
#[derive(Debug, Clone, Args)]
pub struct OnArgs {
    /// The Node.
    #[arg(value_name = "NODE")]
    pub node: String,

    /// If no agent runs on the Node, create a Pod there for this command only, and remove the Pod afterwards. The Pod
    /// has the rights of the agent's container: host network, BPF file system, `CAP_BPF` and `CAP_NET_ADMIN`. Give this
    /// flag before COMMAND.
    #[arg(long)]
    pub create_pod: bool,

    /// Create the Pod with this image, which must contain this version of npl-agent. Unset: with the image of an agent
    /// on another Node.
    #[arg(long, value_name = "REFERENCE", requires = "create_pod")]
    pub image: Option<String>,

    /// The command of the agent and its flags.
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_after_the_node_are_of_the_plugin_and_flags_after_the_command_are_of_the_command() {
        let on = |line: &str| match KubectlCli::try_parse_from(line.split(' ')).map(|cli| cli.command) {
            Ok(KubectlCommand::On(args)) => Ok((args.create_pod, args.image, args.arguments.join(" "))),
            other => Err(format!("{other:?}")),
        };
        let expected = Ok((true, Some("a:1".to_owned()), "flows --image b -o json".to_owned()));
        assert_eq!(on("kubectl-npl on n --create-pod --image a:1 flows --image b -o json"), expected);
        assert_eq!(on("kubectl-npl on --create-pod --image a:1 n flows --image b -o json"), expected);
        assert_eq!(on("kubectl-npl on n doctor --create-pod"), Ok((false, None, "doctor --create-pod".to_owned())));
        assert!(on("kubectl-npl on n --image a:1 doctor").unwrap_err().contains("--create-pod"));
    }

    #[test]
    fn a_service_and_its_port_are_read_and_other_text_is_refused_with_an_example() {
        let of = |name: &str, port: Option<&str>| ServiceName { name: name.to_owned(), port: port.map(str::to_owned) };
        assert_eq!("web".parse(), Ok(of("web", None)));
        assert_eq!("web:80".parse(), Ok(of("web", Some("80"))));
        for text in ["", "web:", ":80", "shop/web", "Web", "web:a:b"] {
            assert!(text.parse::<ServiceName>().unwrap_err().contains("give for example web"), "{text}");
        }
    }
}
