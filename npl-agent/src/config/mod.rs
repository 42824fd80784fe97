// SPDX-License-Identifier: Apache-2.0
//! The checked configuration of the command `run`. Other modules of the agent use [`Config`], never [`RunArgs`].

pub mod args;
pub mod echo_args;
pub mod environment;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
pub mod kubectl_args;
pub mod label_selector;
pub mod load_args;
pub mod trace_args;
pub mod value;

use std::{error::Error as _, net::SocketAddr, path::PathBuf, time::Duration};

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::{
    config::args::RunArgs,
    core::{
        devices::{
            DeviceSelection,
            redirect::{Forwarding, NetworkPolicy},
            xdp::Attach,
        },
        model::{Family, settings::Settings},
        sizes::MaxFlows,
    },
    datapath::{CgroupSelection, ClientScope},
    kube::AnnotationKeys,
    nft_guard::GuardMode,
};

/// The IP families that the datapath serves.
const SERVED_FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// The checked configuration of `run`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The name of this Node.
    pub node_name: String,
    /// The kubeconfig file. `None`: the agent uses its Pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// The settings on which the decisions about node ports depend.
    pub settings: Settings,
    /// The devices on which the programs translate packets.
    pub devices: DeviceSelection,
    /// How translated packets reach the Pod.
    pub forwarding: Forwarding,
    /// Whether packets are redirected on a Node with a policy engine that a redirect bypasses.
    pub network_policy: NetworkPolicy,
    /// Whether TC or XDP translates requests.
    pub attach: Attach,
    /// The keys of the annotations.
    pub annotation_keys: AnnotationKeys,
    /// The label selector of the Services to watch. `None`: the agent watches all Services.
    pub service_selector: Option<String>,
    /// The interval at which the kernel's state is compared with the desired state.
    pub resync: Duration,
    /// The mount point of the BPF file system.
    pub bpffs: PathBuf,
    /// The number of TCP flows of each IP family that the flow tables have room for.
    pub max_flows: MaxFlows,
    /// The local processes whose sockets can connect to mappings.
    pub cgroup: CgroupSelection,
    /// Which processes of the cgroup are served: all, or only those in the host's network namespace.
    pub local_clients: ClientScope,
    /// Whether the agent maintains the nftables table `inet npl`.
    pub guard: GuardMode,
    /// The folder of the local socket.
    pub runtime_dir: PathBuf,
    /// The address and port of the HTTP server for probes and metrics.
    pub listen: SocketAddr,
    /// The address and port of the HTTP server that serves only metrics.
    pub metrics_listen: Option<SocketAddr>,
    /// The maximum number of Service ports whose traffic the agent serves as separate series; 0 disables these metrics.
    pub service_metrics: usize,
}

/// A flag has an invalid value. The process exits with code 2, as for clap's usage errors.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{flag}: {reason}")]
pub struct ConfigError {
    /// The flag, for example `--drain`.
    pub flag: String,
    /// The reason, with an example of a valid value.
    pub reason: String,
}

impl ConfigError {
    /// Extracts the error of one of NPL's value parsers, without the usage lines that clap adds. Returns `None` for
    /// errors that clap itself finds, such as an unknown flag.
    pub fn from_clap(error: &clap::Error) -> Option<Self> {
        let (ErrorKind::ValueValidation, Some(reason), Some(ContextValue::String(argument))) =
            (error.kind(), error.source(), error.get(ContextKind::InvalidArg))
        else {
            return None;
        };
        // clap gives the argument in the form `--drain <DURATION>`.
        let flag = argument.split(' ').next().unwrap_or_default();
        Some(Self { flag: flag.to_owned(), reason: reason.to_string() })
    }
}

impl TryFrom<RunArgs> for Config {
    type Error = ConfigError;

    fn try_from(args: RunArgs) -> Result<Self, ConfigError> {
        let RunArgs {
            node_name,
            kubeconfig,
            port_range,
            protocols,
            devices,
            forwarding,
            ignore_network_policy,
            attach,
            node_ip,
            annotation_domain,
            namespaces,
            service_selector,
            annotation_format,
            protocol_pairing,
            requested_node_ports,
            drain,
            quarantine,
            resync,
            bpffs,
            max_flows,
            cgroup,
            local_clients,
            nft_guard,
            retire,
            runtime_dir,
            listen,
            metrics_listen,
            service_metrics,
            log_format: _, // logging has already started
        } = args;
        match (attach, forwarding) {
            (Attach::Xdp, Forwarding::Redirect | Forwarding::Offload) => return Err(xdp_needs_stack(forwarding)),
            (Attach::Tc | Attach::Auto, _) | (_, Forwarding::Stack) => {}
        }
        let settings = Settings {
            port_range,
            node_ip,
            annotation_format,
            protocol_pairing,
            namespaces: namespaces.unwrap_or_default(),
            families: SERVED_FAMILIES.to_vec(),
            protocols: protocols.into_iter().collect(),
            drain_millis: millis(drain),
            quarantine_millis: millis(quarantine),
            requested_node_ports,
            is_retiring: retire,
        };
        Ok(Self {
            node_name,
            kubeconfig,
            settings,
            devices,
            forwarding,
            network_policy: if ignore_network_policy { NetworkPolicy::Ignored } else { NetworkPolicy::Applies },
            attach,
            annotation_keys: AnnotationKeys::new(&annotation_domain),
            service_selector,
            resync,
            bpffs,
            max_flows,
            cgroup,
            local_clients,
            guard: nft_guard,
            runtime_dir,
            listen,
            metrics_listen,
            service_metrics: service_metrics.into(),
        })
    }
}

/// The error for `--attach xdp` without `--forwarding stack`. clap can declare conflicts between flags, but not between
/// values of flags.
fn xdp_needs_stack(forwarding: Forwarding) -> ConfigError {
    let forwarding = forwarding.as_str();
    let reason = format!(
        "\"xdp\" cannot be combined with --forwarding {forwarding}: the kernel stack forwards packets that XDP translates; \
         give auto or tc"
    );
    ConfigError { flag: "--attach".to_owned(), reason }
}

/// Converts a duration to milliseconds. The result always fits into 64 bits, because [`value::duration`] accepts at
/// most a day.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod manifest_tests;
#[cfg(test)]
mod tests;
