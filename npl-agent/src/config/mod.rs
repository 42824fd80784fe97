// SPDX-License-Identifier: Apache-2.0
//! Validates the command line. The rest of the agent never sees [`RunArgs`].

pub mod args;
mod value;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

pub use self::value::ValueError;
use crate::{
    config::args::RunArgs,
    core::{
        devices::{DeviceSelection, redirect::Forwarding, xdp::Attach},
        model::{Family, settings::Settings},
    },
    datapath::CgroupSelection,
    kube::AnnotationKeys,
    nft_guard::GuardMode,
};

/// The families that the datapath supports.
const SERVED_FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// The validated flags of `run`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// This Node.
    pub node_name: String,
    /// The kubeconfig file; the Pod's service account if there is none.
    pub kubeconfig: Option<PathBuf>,
    /// The constants of all decisions.
    pub settings: Settings,
    /// The devices that clients' packets arrive on.
    pub devices: DeviceSelection,
    /// How translated packets reach Pods.
    pub forwarding: Forwarding,
    /// Whether TC or XDP translates requests.
    pub attach: Attach,
    /// The annotation keys.
    pub annotation_keys: AnnotationKeys,
    /// How often the kernel is compared with the desired state.
    pub resync: Duration,
    /// The directory of the BPF file system.
    pub bpffs: PathBuf,
    /// The cgroup whose sockets may use mappings on the Node.
    pub cgroup: CgroupSelection,
    /// Whether the nftables guard exempts replies from masquerading and marks connections.
    pub guard: GuardMode,
    /// The address of metrics and probes.
    pub listen: SocketAddr,
}

/// An invalid value of a flag. The exit code is 2, as for all usage errors.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("--{flag}")]
pub struct ConfigError {
    /// The flag.
    pub flag: &'static str,
    /// The error, with an example of a valid value.
    #[source]
    pub source: ValueError,
}

fn flag<T, E: Into<ValueError>>(flag: &'static str, value: Result<T, E>) -> Result<T, ConfigError> {
    value.map_err(|err| ConfigError { flag, source: err.into() })
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
            attach,
            node_ip,
            annotation_domain,
            annotation_format,
            drain,
            quarantine,
            resync,
            bpffs,
            cgroup,
            nft_guard,
            retire,
            listen,
            log_format: _, // logging has begun before this
        } = args;
        let settings = Settings {
            port_range: flag("port-range", port_range.parse())?,
            node_ip: flag("node-ip", value::node_ip(&node_ip))?,
            annotation_format: flag("annotation-format", annotation_format.parse())?,
            families: SERVED_FAMILIES.to_vec(),
            protocols: flag("protocols", value::protocols(&protocols))?,
            drain_millis: flag("drain", value::millis(&drain))?,
            quarantine_millis: flag("quarantine", value::millis(&quarantine))?,
            is_retiring: retire,
        };
        let forwarding = flag("forwarding", forwarding.parse())?;
        Ok(Self {
            node_name: flag("node-name", value::node_name(node_name))?,
            kubeconfig,
            settings,
            devices: flag("devices", value::devices(&devices))?,
            forwarding,
            attach: flag("attach", value::attach(&attach, forwarding))?,
            annotation_keys: AnnotationKeys::new(flag("annotation-domain", value::domain(&annotation_domain))?),
            resync: flag("resync", value::interval(&resync))?,
            bpffs: flag("bpffs", value::directory(bpffs))?,
            cgroup: flag("cgroup", value::cgroup(&cgroup))?,
            guard: flag("nft-guard", value::guard(&nft_guard))?,
            listen: flag("listen", value::listen(&listen))?,
        })
    }
}

#[cfg(test)]
mod tests;
