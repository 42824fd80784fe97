// SPDX-License-Identifier: Apache-2.0
//! The text about each of the doctor's checks for operators in `docs/reference/doctor.md`.

use super::State;

/// A check, as `docs/reference/doctor.md` describes it. Links in the texts are relative to this document.
#[derive(Debug)]
pub struct Check {
    /// The key of the check, which is the heading of its section.
    pub key: &'static str,
    /// The question that the check answers.
    pub question: &'static str,
    /// Each state that the check can have, and the condition of this state. The state `unknown` is absent if the check
    /// needs no fact that could be unreadable.
    pub states: &'static [(State, &'static str)],
    /// The effect on traffic if the state is neither `ok` nor `unknown`, and the remedy.
    pub advice: Advice,
}

/// The effect of a problem, and its remedy.
#[derive(Debug)]
pub struct Advice {
    /// The effect on traffic.
    pub effect: &'static str,
    /// The action that an operator can take.
    pub action: &'static str,
}

/// The condition of the state `unknown` of checks that need privileges.
const UNREADABLE: &str =
    "The check cannot read the state of the Node: run the command as root, or in the agent's container.";
/// The condition of the state `unknown` of checks of sysctls.
const UNREADABLE_SYSCTL: &str = "The sysctl cannot be read: run the command as root, where `/proc` is mounted.";

macro_rules! checks {
    ($( $key:ident: $question:literal $( $state:ident $meaning:expr ),+; effect $effect:literal, action $action:literal; )+) => {
        /// Every check, in the order of [`super::examine`].
        pub const CHECKS: &[Check] = &[ $( Check {
            key: stringify!($key),
            question: $question,
            states: &[ $( (State::$state, $meaning), )+ ],
            advice: Advice { effect: $effect, action: $action },
        }, )+ ];
    };
}

checks! {
    kernel: "Does NPL support the running kernel?"
        Ok "The kernel is Linux 5.10 or newer; on arm64, Linux 6.1 or newer.",
        Failed "The kernel is older than Linux 5.10; on arm64, older than Linux 6.1.";
        effect "The programs do not load, and no node port is served.",
        action "Run Linux 5.10 or newer; on arm64, Linux 6.1 or newer.";
    btf: "Does the kernel have BTF?"
        Ok "The file `/sys/kernel/btf/vmlinux` exists.",
        Warning "The file `/sys/kernel/btf/vmlinux` is missing.";
        effect "The verifier may reject the programs, which are not tested without BTF.",
        action "Use a kernel with `CONFIG_DEBUG_INFO_BTF`.";
    bpffs: "Is a BPF file system mounted, in which the agent can pin maps and programs?"
        Ok "A BPF file system is mounted at `--bpffs`.",
        Failed "No BPF file system is mounted at `--bpffs`.";
        effect "No agent starts, and no node port is served.",
        action "Run `mount -t bpf bpf /sys/fs/bpf`, or set `--bpffs`.";
    cap_bpf: "Does this process have the capability `CAP_BPF`?"
        Ok "The process has the capability.",
        Failed "The process lacks the capability.",
        Unknown "The capabilities of the process cannot be read.";
        effect "An agent with the capabilities of this process cannot load programs, so no node port is served.",
        action "Run the agent as uid 0 with `CAP_BPF`, as `deploy/npl.yaml` does.";
    cap_net_admin: "Does this process have the capability `CAP_NET_ADMIN`?"
        Ok "The process has the capability.",
        Failed "The process lacks the capability.",
        Unknown "The capabilities of the process cannot be read.";
        effect "An agent with the capabilities of this process cannot attach programs, so no node port is served.",
        action "Run the agent as uid 0 with `CAP_NET_ADMIN`, as `deploy/npl.yaml` does.";
    cap_perfmon: "Were the programs loaded with `CAP_PERFMON`, so that they contain no speculation barriers?"
        Ok "The programs were loaded with the capability, or no programs are loaded yet.",
        Warning "The programs were loaded without the capability.",
        Unknown "The capabilities of the process cannot be read.";
        effect "Each translated packet takes 0.2 to 0.3 µs more CPU time. Before Linux 6.6, there is also no XDP \
                program.",
        action "Run `npl-agent load` in an init container with `CAP_PERFMON`, then replace the agent's Pod.";
    agent: "Does an agent run on this Node?"
        Ok "An agent holds the lock of the BPF file system (`flock` on its directory `npl`).",
        Warning "No agent holds the lock.";
        effect "If maps and programs are pinned, the programs keep translating packets, but changes of Pods and Services are not applied. If no map is pinned, no Pod of the Node gets a node port.",
        action "Start an agent. The log of the previous agent states why it exited.";
    api_server: "Does the running agent receive changes of Pods, of Services and of its Node from the API server?"
        Ok "Every watch of the agent works, or no agent runs.",
        Warning "A watch has been failing for less than 30 s.",
        Failed "A watch has been failing for at least 30 s, or has received no data for at least 6 minutes.",
        Unknown "The agent has not received its first lists yet; or its socket does not answer: set `--runtime-dir`.";
        effect "The programs keep translating packets, but changes of Pods, Services and the Node are not applied.",
        action "The finding contains the error. Check that the API server is reachable from the Node, and that the agent's ServiceAccount has the permissions that the chart and `deploy/npl.yaml` grant. See [metrics that signal trouble](../troubleshoot.md#metrics-that-signal-trouble).";
    admission_policy: "Does an admission policy restrict the writes of the running agent?"
        Ok "A policy restricts the agent's writes, or no agent runs.",
        Warning "No policy restricts the agent's writes. The agent tests the policy by dry-run requests when it starts and every 15 minutes.",
        Unknown "The agent has no result yet, because no Pod has run on the Node since its start; or its socket does not answer: set `--runtime-dir`.";
        effect "Anybody who has the agent's token can change the labels and the status of every Pod.",
        action "Apply the ValidatingAdmissionPolicy `npl-agent` and its binding, which `deploy/npl.yaml` contains. To check at once, restart the agent.";
    datapath: "Are the programs attached to the devices that clients use?"
        Ok "At least one device has programs for both directions.",
        Warning "No map or program is pinned, and no agent runs.",
        Failed "No map or program is pinned although an agent runs; or no device has programs for both directions; or only tunnels have programs, and no node port is mapped.",
        Unknown "No BPF file system is mounted, or the command lacks the privileges to read it.";
        effect "No node port works for clients outside of the Node.",
        action "Compare `--bpffs` of the command with that of the agent. Name the uplinks with `--devices`; the agent's log states why it did not choose a device. After the agent has retired the Node, the result `failed` is expected.";
    devices: "Do the programs support every device by which clients may reach the Node?"
        Ok "The programs support all of these devices.",
        Warning "The programs do not support at least one of these devices.",
        Unknown UNREADABLE;
        effect "Clients behind an unsupported device are not served. All other clients are served.",
        action "Set `reorder_hdr on` for a VLAN, and `remote` or `external` for a GRE tunnel. Before Linux 6.6, replace an `ingress` qdisc by `clsact`. If no client uses the unsupported devices, name only the supported uplinks with `--devices`.";
    addresses: "Do node ports work on every address of the Node?"
        Ok "Node ports work on all addresses, or no map is pinned yet.",
        Warning "Node ports do not work on at least one address.",
        Unknown UNREADABLE;
        effect "Clients that connect to these addresses are not served.",
        action "If no agent runs, start an agent. If an agent runs, run the check again after a second, because the \
                agent serves new addresses with a short delay. If the check still reports addresses, the Node has more \
                than 256 addresses of an IP family, of which only 256 are served.";
    annotations: "Do the annotations of the Node's Pods match the kernel's mappings and the Node's addresses?"
        Ok "Each annotation names only published addresses of the Node, and only host ports or node ports that the kernel maps to the Pod's port. Each mapping belongs to a Pod of the Node, or drains. The check ignores differences that last for less than a second. The state is also `ok` if no agent runs.",
        Warning "The kernel maps node ports that belong to no Pod of the Node.",
        Failed "An annotation names a node port that the kernel does not map to the Pod's port, or an address that the Node does not have.",
        Unknown "The agent's socket does not answer: set `--runtime-dir`; or the command lacks the privileges to read the maps.";
        effect "Clients of these node ports reach no Pod, or a Pod to which the node port does not belong.",
        action "The agent corrects mappings at the next `--resync`, and annotations as soon as the API server accepts them. If the difference lasts, see [the annotation and the mappings differ](../troubleshoot.md#the-annotation-and-the-mappings-differ).";
    node_network: "Are Pods on the Node's own network, so that they get no node port?"
        Ok "No Pod is on the network of an uplink, or no agent runs. The finding lists macvlan and ipvlan devices of the Node that have an address on the network of an uplink.",
        Warning "At least one Pod is on the network of an uplink.",
        Unknown UNREADABLE;
        effect "These Pods get no node port, and have the Event [`PodOnNodeNetwork`](events.md#podonnodenetwork), because they would answer clients directly and with their own address. All other Pods are served.",
        action "Let the load balancer use the addresses of these Pods, or attach the Pods to a network behind the Node.";
    host_ports: "Do the published host ports of Pods lead to the Pods?"
        Ok "Each published TCP host port accepts connections from the Node if the Pod accepts connections at its own address. The check opens these connections, and sends no data. Host ports of other protocols are not tested. The state is also `ok` if no agent runs.",
        Warning "A published TCP host port accepts no connection from the Node, although the Pod accepts connections at its own address.",
        Unknown "The agent's socket does not answer: set `--runtime-dir`.";
        effect "Clients of these host ports do not reach the Pods. NPL publishes host ports, and does not translate their packets.",
        action "Configure the CNI to serve host ports, for example by its plug-in `portmap`, or remove `hostPort` from the Pods, which then get node ports.";
    program_order: "Do TC programs of other software run ahead of NPL's programs?"
        Ok "NPL's programs run first on every uplink.",
        Failed "A TC program or filter of other software runs ahead of NPL's on an uplink.",
        Unknown UNREADABLE;
        effect "If the program of the other software returns a final verdict, connections of clients are refused or get no answer.",
        action "See [A program runs ahead of NPL's](../troubleshoot.md#a-program-runs-ahead-of-npls).";
    gro_fraglist: "Is `rx-gro-list` on, and does this kernel translate only the first of the IPv6 UDP datagrams that `rx-gro-list` combines?"
        Ok "`rx-gro-list` is off for the uplinks and for the devices of mapped Pods; or the kernel translates all datagrams, as Linux 6.12.28 and newer 6.12 releases, and Linux 6.15 and newer, do.",
        Warning "`rx-gro-list` is on for an uplink or the device of a mapped Pod, and the kernel translates only the first datagram.",
        Unknown UNREADABLE;
        effect "If several IPv6 UDP datagrams arrive together, only the first is translated, unless the distribution has backported the fix of Linux 6.15.",
        action "Run `ethtool -K DEVICE rx-gro-list off`. The feature is off by default.";
    cni: "Which CNI does the Node have, and how does it affect node ports?"
        Ok "The check is `ok` for every CNI. The finding names the CNI and its effect.",
        Unknown UNREADABLE;
        effect "None: the check only reports.",
        action "See the settings for each CNI in [CNIs](../compatibility.md#cnis-policy-engines-and-service-proxies).";
    policy_engine: "Do the rules of the Node's policy engine apply to clients of node ports?"
        Ok "The policies apply, or no known policy engine is found.",
        Warning "Redirected packets bypass the policy engine, or the agent refuses `--forwarding redirect` because of the policy engine.",
        Unknown UNREADABLE;
        effect "NetworkPolicy does not apply to redirected packets; or, if the agent refuses redirect, the host's stack forwards all packets.",
        action "Use `--forwarding stack` or `offload`. Set `--ignore-network-policy` to redirect in spite of the policy engine.";
    service_proxy: "Which Service proxy does the Node have?"
        Ok "The check is `ok` for every Service proxy. The finding names the Service proxy.",
        Unknown UNREADABLE;
        effect "None: the check only reports.",
        action "None.";
    local_clients: "Can clients on the Node and in its Pods use node ports?"
        Ok "The programs are attached to the cgroup of local clients, or a cgroup v2 hierarchy is mounted and no program is pinned yet.",
        Warning "No cgroup v2 hierarchy is mounted, or the programs are not attached to the cgroup.";
        effect "Clients on the Node and in its Pods are not served. All other clients are served.",
        action "Mount cgroup v2, or name its directory with `--cgroup`. With `--cgroup none`, the warning is expected.";
    ip_forward: "Does the kernel forward IPv4 packets between the uplinks and the devices of Pods?"
        Ok "IPv4 forwarding is on for each of these devices, or the Node has no IPv4 address.",
        Warning "Forwarding is off only for uplinks without a default route, while another uplink forwards; or only IPv6 node ports are mapped.",
        Failed "IPv4 node ports are mapped, or no node port is mapped yet; and `net.ipv4.conf.DEVICE.forwarding` is 0 for all uplinks, for an uplink with a default route, or for the device of a mapped Pod. A global `ip_forward` of 1 does not change this state.",
        Unknown UNREADABLE_SYSCTL;
        effect "Requests that arrive on the uplink, or replies of the Pod, are not forwarded.",
        action "Set this sysctl to 1 for the device that the check names.";
    ipv6_forwarding: "Does the kernel forward IPv6 packets between the uplinks and the devices of Pods?"
        Ok "IPv6 forwarding is on, or the Node has no IPv6 address.",
        Warning "Forwarding is off only for uplinks without a default route, while another uplink forwards; or the Node also has IPv4 addresses, and no IPv6 node port is mapped.",
        Failed "IPv6 node ports are mapped, or no node port is mapped yet on a Node with IPv6 addresses only. In addition, `net.ipv6.conf.all.forwarding` is 0, and `force_forwarding` (Linux 6.17) is 0 or missing on every uplink, on an uplink with a default route, or on the device of a mapped Pod.",
        Unknown UNREADABLE_SYSCTL;
        effect "Requests that arrive on the uplink, or replies of the Pod, are not forwarded.",
        action "Set `net.ipv6.conf.all.forwarding` to 1.";
    forward_chains: "Do forward chains of nftables let requests to mapped Pods and their replies pass?"
        Ok "No forward chain certainly drops requests or replies. If the effect depends on a rule that the check does not understand, the finding names the chain. Rules of `iptables-legacy` are not checked.",
        Warning "A forward chain of nftables or `iptables-nft` drops packets by its policy or by a rule, and no earlier rule of the chain can accept a new connection from an uplink to a mapped Pod, or the replies of this connection.",
        Unknown UNREADABLE;
        effect "Requests or replies are dropped, except with `--forwarding redirect`.",
        action "See [Allow forwarded connections](../troubleshoot.md#a-firewall-drops-forwarded-connections).";
    rp_filter: "Does reverse path filtering accept requests to mapped Pods?"
        Ok "No uplink has strict filtering, or no policy routing rule makes strict filtering drop requests to node ports. The finding reports strict, loose or off for each uplink.",
        Warning "Reverse path filtering is strict on an uplink, and a policy routing rule of one of two kinds exists. Case 1: the rule gives a mapped Pod a routing table whose default route leads through another uplink. Case 2: the rule gives a Node address a routing table whose default route leads through this uplink, while the default route of the main table leads through another uplink.",
        Unknown UNREADABLE_SYSCTL;
        effect "The kernel drops requests that arrive on the uplink: in case 1, requests to these Pods; in case 2, requests of clients to which the main table's route leads through another uplink. The filter looks up the route from the Pod's address, because NPL has replaced the Node address with the Pod's address.",
        action "Set `rp_filter` to loose (2) on the uplink, or use `--forwarding redirect`.";
    conntrack_liberal: "Does kernel conntrack accept out-of-window packets, as `--forwarding offload` requires?"
        Ok "`nf_conntrack_tcp_be_liberal` is 1, or kernel conntrack is not loaded.",
        Warning "`nf_conntrack_tcp_be_liberal` is 0.",
        Unknown UNREADABLE_SYSCTL;
        effect "With `--forwarding offload`, no flow is offloaded. The modes `stack` and `redirect` do not need this sysctl.",
        action "See [Settings for offload](../operate.md#kernel-conntrack-settings-for-offload).";
    conntrack_timeouts: "Are the timeouts of kernel conntrack long enough for `--forwarding offload`?"
        Ok "The timeout for unacknowledged data is not shorter than the timeout for established connections, or kernel conntrack is not loaded.",
        Warning "The timeout for unacknowledged data is shorter than the timeout for established connections.",
        Unknown UNREADABLE_SYSCTL;
        effect "With `--forwarding offload`, kernel conntrack times out idle connections early.",
        action "See [Settings for offload](../operate.md#kernel-conntrack-settings-for-offload).";
    port_range: "Is the node port range free of ports that the kernel, Services or Cilium use?"
        Ok "The range does not overlap ports that the kernel, Services or Cilium use.",
        Warning "The range overlaps `ip_local_port_range` or 30000-32767; or Cilium may masquerade connections with source ports of the range.",
        Unknown "No agent has configured a port range yet, or the ephemeral ports cannot be read.";
        effect "Depending on the overlap, outgoing connections occupy node ports; or a mapping receives the packets for a Service's `nodePort` until the mapping has moved to another port; or a Pod's masqueraded connection gets no answer.",
        action "Add the range to `net.ipv4.ip_local_reserved_ports`, or set another `--port-range`. With Cilium's BPF masquerade, set a range below 30000.";
    service_ports: "Are the node ports of Services excluded from the ports of outgoing connections?"
        Ok "`ip_local_port_range` does not overlap 30000-32767, or `ip_local_reserved_ports` contains these ports.",
        Warning "`ip_local_port_range` overlaps 30000-32767, and `ip_local_reserved_ports` does not contain these ports.",
        Unknown UNREADABLE_SYSCTL;
        effect "Outgoing connections of the Node may occupy the node ports of Services of type NodePort. Mappings are not affected.",
        action "Add 30000-32767 to `net.ipv4.ip_local_reserved_ports`.";
    nft_guard: "Are replies of mapped Pods exempt from masquerading?"
        Ok "The table `inet npl` exempts mapped endpoints, or no rule masquerades packets that leave the Node, or no map is pinned yet and the kernel has nftables.",
        Warning "Rules of other software masquerade packets that leave the Node, and either the kernel has no \
                 nftables, or maps are pinned and the table `inet npl` is missing.",
        Unknown UNREADABLE;
        effect "Replies of connections that kernel conntrack no longer tracks are masqueraded, and clients reject these packets.",
        action "Set `--nft-guard` to `auto`, load the kernel module `nf_tables`, and read the agent's log.";
    reply_routes: "Do replies of Pods with their own routing table leave through the interface on which requests arrive?"
        Ok "No Pod has its own routing table, or rules mark the connections of these Pods, or the packets of all mapped Pods are redirected.",
        Warning "Pods have their own routing tables, and no rule marks their connections; or an address of the Node has its own routing table.",
        Unknown UNREADABLE;
        effect "With `--forwarding stack` and `offload`, replies leave through another interface and may be lost.",
        action "See [Replies leave through another interface](../troubleshoot.md#replies-leave-through-another-interface). For an address of the Node, set `--forwarding redirect`, or publish an address of the main table's uplink with `--node-ip`.";
    incoming_rules: "Do policy routing rules for devices of Pods send replies through another uplink than the main table?"
        Ok "No rule for the device of a mapped Pod selects a table that leads replies to another uplink than the main table. Tables without routes have no effect.",
        Warning "A policy routing rule `iif DEVICE lookup TABLE` for a mapped Pod's device leads to another uplink than the main table, or TABLE has routes, but lacks a route through one or more of the uplinks. The AWS VPC CNI creates rules of this kind for Pods with security groups in strict mode.",
        Unknown UNREADABLE;
        effect "With `--forwarding stack` and `offload`, replies follow the rule's table and may be lost.",
        action "Let the CNI route these Pods by the main table (AWS VPC CNI: `POD_SECURITY_GROUP_ENFORCING_MODE=standard`), or do not use node ports for these Pods: use a load balancer that sends to the Pods' own addresses.";
}
