// SPDX-License-Identifier: Apache-2.0
//! The network of a cluster: the CNI plug-in for Pods and kube-proxy for Services.

use std::fmt;

use clap::ValueEnum as _;
use npl_testkit::real_cluster::{Cni, KubeProxy};

/// A combination of CNI plug-in and kube-proxy mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Network {
    pub(crate) cni: Cni,
    pub(crate) kube_proxy: KubeProxy,
}

impl Network {
    pub(crate) const fn new(cni: Cni, kube_proxy: KubeProxy) -> Self {
        Self { cni, kube_proxy }
    }

    /// Returns all combinations of a CNI plug-in and a kube-proxy mode with which the plug-in runs.
    pub(crate) fn all() -> Vec<Self> {
        let all = |cni: Cni| KubeProxy::value_variants().iter().map(move |kube_proxy| Self::new(cni, *kube_proxy));
        let runs = |network: &Self| network.cni.kube_proxy_modes().contains(&network.kube_proxy);
        Cni::value_variants().iter().copied().flat_map(all).filter(runs).collect()
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.cni, self.kube_proxy)
    }
}
