// SPDX-License-Identifier: Apache-2.0
//! A Node with Pods and clients in network namespaces, and the agent's datapath attached to its uplinks.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use npl_agent::core::devices::plan::DevicePlan;
use npl_agent::core::devices::redirect::{Forwarding, NetworkPolicy, ProgramSet};
use npl_agent::core::devices::xdp::Attach;
use npl_agent::core::devices::{Coverage, Device, DeviceKind, DeviceSelection};
use npl_agent::core::model::settings::PortRange;
use npl_agent::core::model::{Backend, Protocol};
use npl_agent::datapath::{Datapath, DatapathError};
use npl_agent::devices::apply::{Applied, apply};
use npl_agent::devices::uplinks::Uplinks;
use npl_agent::netlink;
use npl_agent::nft_guard::{Guard, GuardMode};
use npl_testkit::echo::{self, EchoServer};
use npl_testkit::kernel;
use npl_testkit::mounts::BpfFs;
use npl_testkit::netns::Netns;
use npl_testkit::poll;
use npl_testkit::run::Run;
use npl_testkit::topology::{self, Options, Pod, Topology};
use npl_testkit::traffic::{self, Request};

use crate::bpffs_pool::{BpffsPool, PooledBpffs};
use crate::lab::{SEED, mapping, parsed};

/// The port that every Pod serves over TCP and UDP.
pub(crate) const POD_PORT: u16 = 8080;
/// The node port of the first Pod; each further Pod has the next port.
pub(crate) const NODE_PORT: u16 = 61_000;

/// Time limit for the kernel to detach a program, far above the usual duration.
const DETACH_LIMIT: Duration = Duration::from_secs(10);

/// Time limit for the sockets of earlier requests to close, above the time of several retransmissions of a FIN.
const CLOSE_LIMIT: Duration = Duration::from_secs(30);

/// A Node with NPL's datapath. Rust drops the fields in the order of their declaration: the datapath before the
/// namespaces and the bpffs that it uses.
pub(crate) struct World {
    /// The nftables guard, in tests that run one.
    pub(crate) guard: Option<Guard>,
    pub(crate) datapath: Option<Datapath>,
    pub(crate) pods: Vec<(Pod, EchoServer)>,
    pub(crate) topology: Topology,
    pub(crate) bpffs: BpfFs,
    /// The reused bpffs that is mounted at `bpffs`; `None` if `bpffs` is new.
    #[expect(dead_code, reason = "the bpffs returns to its pool when the world is dropped")]
    pooled_bpffs: Option<PooledBpffs>,
    pub(crate) run: Run,
}

/// The BPF file systems of earlier tests, for reuse.
static POOL: BpffsPool = BpffsPool::new();

impl World {
    /// Creates a Node with one client and `pods` Pods, each mapped for TCP and UDP; the programs are attached to the
    /// uplink.
    pub(crate) fn new(pods: u8) -> Self {
        Self::with_options(pods, Options::default())
    }

    pub(crate) fn with_options(pods: u8, options: Options) -> Self {
        let mut world = Self::bare(pods, options);
        world.install();
        world
    }

    /// Performs the steps of an agent that starts for the first time: writes the mappings, then attaches the programs
    /// to the uplinks.
    pub(crate) fn install(&mut self) {
        let uplinks = self.uplinks();
        self.install_on(&uplinks);
    }

    /// Does the same as [`Self::install`], with the programs on `devices`.
    pub(crate) fn install_on(&mut self, devices: &[Device]) {
        let mut datapath = self.open_configured();
        for (index, (pod, _)) in self.pods.iter().enumerate() {
            let node_port = NODE_PORT + u16::try_from(index).unwrap();
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                for pod_ip in pod.ips() {
                    let (frontend, backend) = mapping(protocol, node_port, (pod_ip, POD_PORT).into(), 1);
                    datapath.upsert_mapping(frontend, backend).unwrap();
                }
            }
        }
        let errors = self.attach_to(&mut datapath, devices);
        assert!(errors.is_empty(), "{errors:?}");
        self.datapath = Some(datapath);
    }

    /// Does the same as [`Self::new`], on a new bpffs.
    pub(crate) fn fresh(pods: u8) -> Self {
        let mut world = Self::without_state(pods);
        world.install();
        world
    }

    /// Creates a Node without a datapath, on a new bpffs.
    pub(crate) fn without_state(pods: u8) -> Self {
        let run = Run::start().unwrap();
        let bpffs = run.bpffs("bpf").unwrap();
        Self::with_bpffs(pods, Options::default(), run, bpffs, None)
    }

    /// Attaches the programs to every uplink as filters, as the agent does before Linux 6.6, even if the kernel has
    /// TCX.
    pub(crate) fn use_filters(&mut self) {
        let mut datapath = self.datapath.take().unwrap();
        self.attach_to(&mut datapath, &[]);
        datapath.hooks.use_filters();
        self.attach(&mut datapath);
        self.datapath = Some(datapath);
    }

    /// Creates a Node without a datapath.
    pub(crate) fn bare(pods: u8, options: Options) -> Self {
        let run = Run::start().unwrap();
        let pooled = POOL.take();
        let bpffs = pooled.bpffs().show_at(&run.file("bpf")).unwrap();
        Self::with_bpffs(pods, options, run, bpffs, Some(pooled))
    }

    fn with_bpffs(pods: u8, options: Options, run: Run, bpffs: BpfFs, pooled_bpffs: Option<PooledBpffs>) -> Self {
        let mut topology = Topology::new(&run, "", options).unwrap();
        let mut served = Vec::new();
        for index in 0..pods {
            let pod = topology.add_pod(&run, &format!("web-{index}")).unwrap();
            let server = EchoServer::start_in(&pod.netns, &pod.name, &[POD_PORT]).unwrap();
            served.push((pod, server));
        }
        Self { guard: None, datapath: None, pods: served, topology, bpffs, pooled_bpffs, run }
    }

    /// Opens the datapath as a starting agent does: adopts pinned maps and programs, or creates them.
    pub(crate) fn open(&self) -> Datapath {
        let path: &Path = self.bpffs.path();
        self.node().run(|| Datapath::open(path)).unwrap().unwrap()
    }

    /// Does the same as [`Self::open`], and writes the port range and the node addresses, as a starting agent does.
    pub(crate) fn open_configured(&self) -> Datapath {
        let mut datapath = self.open();
        datapath.configure(port_range(), || SEED).unwrap();
        set_addresses(&mut datapath, &self.node_ips());
        datapath
    }

    /// Attaches the programs to every uplink.
    pub(crate) fn attach(&self, datapath: &mut Datapath) {
        let errors = self.attach_to(datapath, &self.uplinks());
        assert!(errors.is_empty(), "{errors:?}");
    }

    /// Attaches the programs to `devices` and detaches them from all other devices.
    pub(crate) fn attach_to(&self, datapath: &mut Datapath, devices: &[Device]) -> Vec<DatapathError> {
        let programs: BTreeMap<_, _> = devices.iter().map(|device| (device.ifindex, ProgramSet::Uplink)).collect();
        // The XDP programs of `devices` stay as they are: only the tests of XDP attach and detach them.
        let mut xdp = datapath.hooks.xdp_devices().unwrap();
        xdp.retain(|ifindex| programs.contains_key(ifindex));
        let plan = DevicePlan { programs, xdp, ..DevicePlan::default() };
        let attached = datapath.hooks.attached_hooks().unwrap();
        let Applied { errors, xdp_errors, .. } =
            self.node().run(|| apply(datapath, devices, &attached, &plan)).unwrap();
        errors.into_iter().chain(xdp_errors.into_values()).collect()
    }

    /// The Node's uplinks, in the form in which the agent lists devices.
    pub(crate) fn uplinks(&self) -> Vec<Device> {
        let devices = self.topology.clients().iter().map(|client| device(&client.uplink));
        devices.collect()
    }

    /// Returns all devices of the Node, listed by the agent's own code.
    pub(crate) fn devices(&self) -> Vec<Device> {
        self.node().block_on(netlink::interfaces()).unwrap().unwrap()
    }

    /// Attaches programs to the uplinks and, in redirect and offload mode, to the Pods' devices, as the agent does at
    /// every survey of the devices.
    #[track_caller]
    pub(crate) fn follow(&mut self, forwarding: Forwarding) {
        self.follow_by(forwarding, Attach::Tc);
    }

    /// Does the same as [`Self::follow`], with requests translated at the hook that `attach` selects.
    #[track_caller]
    pub(crate) fn follow_by(&mut self, forwarding: Forwarding, attach: Attach) {
        self.follow_beside(forwarding, attach, NetworkPolicy::Ignored);
    }

    /// Does the same as [`Self::follow_by`], with this reaction to policy engines.
    #[track_caller]
    pub(crate) fn follow_beside(&mut self, forwarding: Forwarding, attach: Attach, policy: NetworkPolicy) {
        let names = self.uplinks().into_iter().map(|device| device.name).collect();
        let mode = if self.guard.is_some() { GuardMode::Auto } else { GuardMode::Off };
        let mut uplinks = Uplinks::new(DeviceSelection::Named(names), (forwarding, policy), attach, mode);
        let (node, node_ips) = (self.node().clone(), self.node_ips());
        let coverage = node.block_on(uplinks.follow(self.datapath(), &node_ips)).unwrap().unwrap();
        assert_eq!(coverage, Coverage { attached: self.topology.clients().len(), failed: 0 });
        if let Some(guard) = self.guard.take() {
            guard.observe(&self.datapath().mappings().unwrap());
            guard.follow_network(uplinks.markings(), uplinks.forged_sources());
            self.guard = Some(guard);
        }
    }

    /// Restricts every mapping to `ranges`, in the agent's order of writes: packets from a source that is in both the
    /// old and the new allow-list are never dropped.
    pub(crate) fn restrict(&mut self, ranges: &str) {
        let datapath = self.datapath();
        let (mappings, former) = (datapath.mappings().unwrap(), datapath.sources().unwrap());
        for (frontend, backend) in mappings {
            let ranges = parsed(ranges).into_iter().filter(|range| range.family() == frontend.family).collect();
            datapath.allow_sources(frontend, &ranges).unwrap();
            datapath.upsert_mapping(frontend, Backend { is_restricted: true, ..backend }).unwrap();
            let gone = former.get(&frontend).into_iter().flatten().filter(|range| !ranges.contains(range));
            datapath.forget_sources(frontend, &gone.copied().collect()).unwrap();
        }
    }

    pub(crate) fn datapath(&mut self) -> &mut Datapath {
        self.datapath.as_mut().unwrap()
    }

    pub(crate) fn node(&self) -> &Netns {
        self.topology.node()
    }

    pub(crate) fn client(&self) -> &Netns {
        &self.topology.client().netns
    }

    pub(crate) fn client_ip(&self) -> IpAddr {
        self.topology.client().addresses.v4.into()
    }

    pub(crate) fn node_ip(&self) -> Ipv4Addr {
        self.topology.node_addresses().v4
    }

    /// The Node's addresses, one of each family.
    pub(crate) fn node_ips(&self) -> [IpAddr; 2] {
        let addresses = self.topology.node_addresses();
        [addresses.v4.into(), addresses.v6.into()]
    }

    /// The client's addresses, one of each family.
    pub(crate) fn client_ips(&self) -> [IpAddr; 2] {
        self.topology.client().addresses.ips()
    }

    /// The first Pod's NAT addresses, one of each family.
    pub(crate) fn frontends(&self) -> [SocketAddr; 2] {
        self.node_ips().map(|ip| (ip, NODE_PORT).into())
    }

    /// The first Pod's IPv4 NAT address.
    pub(crate) fn frontend(&self) -> SocketAddr {
        (self.node_ip(), NODE_PORT).into()
    }

    /// Returns a TCP and a UDP request of the client to the first Pod.
    pub(crate) fn load_requests(&self) -> Vec<Request> {
        let (server, pod, client) = (self.frontend(), &self.pod().name, self.client_ip());
        [echo::Protocol::Tcp, echo::Protocol::Udp]
            .map(|protocol| Request { protocol, server, pod: pod.clone(), client })
            .to_vec()
    }

    pub(crate) fn pod(&self) -> &Pod {
        &self.pods[0].0
    }

    /// Returns every device between the client and the first Pod, at both ends of each link.
    pub(crate) fn path_devices(&self) -> [topology::Device; 4] {
        let (client, pod) = (self.topology.client(), self.pod());
        [client.device.clone(), client.uplink.clone(), pod.device.clone(), pod.host_device.clone()]
    }

    /// Waits until the host rejects connections to the first Pod's node port, because the kernel detaches unpinned
    /// programs with a delay.
    #[track_caller]
    pub(crate) fn wait_until_refused(&self) {
        let is_refused = || traffic::tcp_connect(self.client(), self.frontend()).is_err().then_some(());
        poll::until("the kernel to detach the programs", DETACH_LIMIT, is_refused).unwrap();
    }

    /// Waits until no client and no Pod has a TCP connection. The end of a connection takes longer than the request: a
    /// late or retransmitted FIN would reach the next phase of a test, where kernel conntrack may have no entry of the
    /// connection.
    #[track_caller]
    pub(crate) fn wait_for_closed_connections(&self) {
        let clients = self.topology.clients().iter().map(|client| &client.netns);
        let namespaces: Vec<_> = clients.chain(self.pods.iter().map(|(pod, _)| &pod.netns)).collect();
        let mut live = Vec::new();
        let waited = poll::until("the end of all TCP connections", CLOSE_LIMIT, || {
            live = namespaces.iter().flat_map(|netns| netns.live_connections().unwrap()).collect();
            live.is_empty().then_some(())
        });
        assert!(waited.is_ok(), "{waited:?}: {live:#?}");
    }

    /// Asserts that the first Pod answers over TCP and UDP in both families, and sees the client's address.
    #[track_caller]
    pub(crate) fn assert_answers(&self) {
        for (frontend, client_ip) in self.frontends().into_iter().zip(self.client_ips()) {
            let expected = (self.pod().name.as_str(), client_ip);
            let tcp = traffic::tcp_request(self.client(), frontend, "who are you?").unwrap();
            assert_eq!((tcp.pod.as_str(), tcp.client.ip()), expected);
            let options = traffic::UdpOptions::default();
            let udp = traffic::udp_request(self.client(), frontend, b"and you?", options).unwrap().answer;
            assert_eq!((udp.pod.as_str(), udp.client.ip()), expected);
        }
    }
}

/// The node port range.
pub(crate) fn port_range() -> PortRange {
    "61000-61100".parse().unwrap()
}

pub(crate) fn set_addresses(datapath: &mut Datapath, addresses: &[IpAddr]) {
    let left_out = datapath.tables.set_local_addresses(addresses).unwrap();
    assert!(left_out.is_empty(), "{left_out:?} are too many for the map");
}

fn device(device: &topology::Device) -> Device {
    Device { has_default_route: true, ..Device::new(device.ifindex().unwrap(), device.name(), DeviceKind::Veth) }
}

/// Number of program replacements under load; few on an emulated processor, which takes half a minute to verify the
/// programs.
pub(crate) fn replacements() -> u64 {
    if is_emulated() { 3 } else { 10 }
}

/// Requests per second of a load. The rate is low on an emulated processor, where a higher rate would take so much
/// processor time that the verification of the programs would take several times as long.
pub(crate) fn load_rate() -> u32 {
    if is_emulated() { 20 } else { 100 }
}

/// Whether the test runs on an emulated processor, which is slow.
pub(crate) fn is_emulated() -> bool {
    kernel::is_emulated().unwrap()
}
