// SPDX-License-Identifier: Apache-2.0
//! The Go programs that are compiled from modules of npl-testkit.

/// The linker flags of Kubernetes' binaries. xtask replaces `VERSION` with the version of Kubernetes, and `MINOR` with
/// the minor number of this version.
pub(super) const LINKER_FLAGS: &str = "-s -w -X k8s.io/component-base/version.gitVersion=VERSION \
     -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=MINOR";

/// A part: programs that are compiled together into one directory of the cache.
pub(super) struct Part {
    /// The name of the part's directory in the cache, which is also the part's name in messages.
    pub(super) name: &'static str,
    pub(super) words: &'static str,
    pub(super) time: &'static str,
    /// The directory of the part's Go module in npl-testkit.
    pub(super) module: &'static str,
    /// The module in `go.mod` whose version is the version of the part.
    pub(super) versioned: &'static str,
    pub(super) linker_flags: &'static str,
    pub(super) packages: &'static [&'static str],
    /// The files and directories of the versioned module that are copied to the directory of the programs.
    pub(super) files: &'static [&'static str],
    /// The environment variables of the Go compiler for this part.
    pub(super) variables: &'static [(&'static str, &'static str)],
}

/// The programs of the control plane, for every command that starts a real API server.
pub(super) const CONTROL_PLANE: Part = Part {
    name: "control-plane",
    words: "Kubernetes' API server and etcd",
    time: "3 to 5 minutes",
    module: "control-plane",
    versioned: "k8s.io/kubernetes",
    linker_flags: LINKER_FLAGS,
    packages: &["go.etcd.io/etcd/server/v3", "k8s.io/kubernetes/cmd/kube-apiserver"],
    files: &[],
    variables: &[],
};

/// The programs that the Nodes of a real cluster run.
pub(super) const NODES: Part = Part {
    name: "kubernetes",
    words: "kubelet, kube-proxy, scheduler and controllers",
    time: "3 minutes",
    module: "control-plane",
    versioned: "k8s.io/kubernetes",
    linker_flags: LINKER_FLAGS,
    packages: &[
        "k8s.io/kubernetes/cmd/kubelet",
        "k8s.io/kubernetes/cmd/kube-controller-manager",
        "k8s.io/kubernetes/cmd/kube-scheduler",
        "k8s.io/kubernetes/cmd/kube-proxy",
    ],
    files: &[],
    variables: &[],
};

/// The program that Nodes run if their Pod network is flannel.
pub(super) const FLANNEL: Part = Part {
    name: "flannel",
    words: "flannel's daemon",
    time: "2 minutes",
    module: "flannel",
    versioned: "github.com/flannel-io/flannel",
    linker_flags: "-s -w -X github.com/flannel-io/flannel/pkg/version.Version=VERSION",
    packages: &["github.com/flannel-io/flannel"],
    files: &[],
    variables: &[],
};

/// The programs that Nodes run if their Pod network and policy engine is Calico.
pub(super) const CALICO: Part = Part {
    name: "calico",
    words: "Calico's daemon and CNI plug-in",
    time: "4 minutes",
    module: "calico",
    versioned: "github.com/projectcalico/calico",
    linker_flags: "-s -w",
    packages: &[
        "github.com/projectcalico/calico/node/cmd/calico-node",
        "github.com/projectcalico/calico/cni-plugin/cmd/calico",
    ],
    files: &["manifests/crds.yaml"],
    // Calico is built without a C compiler. Only the eBPF dataplane of Calico's agent Felix needs a C compiler; in a
    // build without a C compiler, stubs replace this dataplane, and all other features work.
    variables: &[("CGO_ENABLED", "0")],
};

/// The program that Nodes run if their Pod network and policy engine is kube-router.
pub(super) const KUBE_ROUTER: Part = Part {
    name: "kube-router",
    words: "kube-router",
    time: "2 minutes",
    module: "kube-router",
    versioned: "github.com/cloudnativelabs/kube-router/v2",
    linker_flags: "-s -w -X github.com/cloudnativelabs/kube-router/v2/pkg/version.Version=VERSION",
    packages: &["github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"],
    files: &[],
    variables: &[("CGO_ENABLED", "0")],
};

/// The programs that Nodes run if their Pod network, policy engine and Service proxy is Cilium. The daemon compiles its
/// kernel programs from the directory `bpf`, with the compiler of [`super::clang`].
pub(super) const CILIUM: Part = Part {
    name: "cilium",
    words: "Cilium's daemon and CNI plug-in",
    time: "4 minutes",
    module: "cilium",
    versioned: "github.com/cilium/cilium",
    linker_flags: "-s -w -X github.com/cilium/cilium/pkg/version.ciliumVersion=VERSION",
    packages: &["github.com/cilium/cilium/daemon", "github.com/cilium/cilium/plugins/cilium-cni"],
    files: &["pkg/k8s/apis/cilium.io/client/crds", "bpf"],
    variables: &[("CGO_ENABLED", "0")],
};

/// The program Helm, which renders and installs the chart. The linker flags set the version of Kubernetes for which
/// Helm renders. Without the flags, Helm would render for Kubernetes 1.20.
pub(super) const HELM: Part = Part {
    name: "helm",
    words: "Helm",
    time: "2 to 3 minutes",
    module: "helm",
    versioned: "helm.sh/helm/v3",
    linker_flags: "-s -w -X helm.sh/helm/v3/internal/version.version=VERSION \
         -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=36 \
         -X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor=36",
    packages: &["helm.sh/helm/v3/cmd/helm"],
    files: &[],
    variables: &[],
};

/// The program krew, which installs kubectl plug-ins.
pub(super) const KREW: Part = Part {
    name: "krew",
    words: "krew",
    time: "half a minute",
    module: "krew",
    versioned: "sigs.k8s.io/krew",
    linker_flags: "-s -w -X sigs.k8s.io/krew/internal/version.gitTag=VERSION",
    packages: &["sigs.k8s.io/krew/cmd/krew"],
    files: &[],
    variables: &[("CGO_ENABLED", "0")],
};

/// The program of the test of proxyless gRPC: a gRPC client and server.
pub(super) const GRPC: Part = Part {
    name: "grpc",
    words: "a gRPC client and server",
    time: "half a minute",
    module: "grpc",
    versioned: "google.golang.org/grpc",
    linker_flags: "-s -w",
    packages: &["npl/grpc"],
    files: &[],
    variables: &[("CGO_ENABLED", "0")],
};
