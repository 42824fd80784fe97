// SPDX-License-Identifier: Apache-2.0
//! A Node with Pods, and a cgroup of clients. The agent's programs translate the addresses that the sockets of these
//! clients use.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use aya::util::KernelVersion;
use npl_agent::datapath::{CgroupSelection, ClientScope, Datapath, DatapathError, ServedClients};
use npl_testkit::client_cgroup::ClientCgroup;
use npl_testkit::echo::{Answer, Protocol};
use npl_testkit::netns::Netns;
use npl_testkit::traffic::{self, request_limit};

use crate::world::{NODE_PORT, World};

/// The protocols of each mapping.
pub(super) const PROTOCOLS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

/// A Node with the agent's datapath. Rust drops the fields in the order of their declaration: the cgroup before the
/// Node.
pub(super) struct Scene {
    pub(super) cgroup: ClientCgroup,
    pub(super) world: World,
}

impl Scene {
    /// Creates a Node with mapped Pods, as [`World::new`] does, and attaches the programs to a cgroup of clients.
    pub(super) fn new(pods: u8) -> Self {
        Self::served(World::new(pods))
    }

    /// Does the same as [`Self::new`], but with a Node from [`World::fresh`].
    pub(super) fn fresh(pods: u8) -> Self {
        Self::served(World::fresh(pods))
    }

    fn served(world: World) -> Self {
        let mut scene = Self::of(world);
        let mut datapath = scene.world.datapath.take().unwrap();
        scene.serve(&mut datapath);
        scene.world.datapath = Some(datapath);
        scene
    }

    /// Does the same as [`Self::new`], without programs on the cgroup.
    pub(super) fn unserved(pods: u8) -> Self {
        Self::of(World::new(pods))
    }

    fn of(world: World) -> Self {
        let cgroup = world.run.client_cgroup("clients").unwrap();
        Self { cgroup, world }
    }

    /// Attaches the cgroup programs as a starting agent does.
    pub(super) fn serve(&self, datapath: &mut Datapath) -> ServedClients {
        self.serve_scope(datapath, ClientScope::All).unwrap().unwrap()
    }

    /// Does the same as [`Self::serve`], only for the clients that `scope` includes.
    pub(super) fn serve_scope(
        &self,
        datapath: &mut Datapath,
        scope: ClientScope,
    ) -> Result<Option<ServedClients>, DatapathError> {
        let selection = CgroupSelection::Directory(self.cgroup.path().to_owned());
        let serve = || datapath.serve_local_clients(&selection, scope);
        self.world.node().run(serve).unwrap()
    }

    /// Sends one request from a client in the cgroup.
    pub(super) fn ask(&self, from: &Netns, protocol: Protocol, server: SocketAddr) -> anyhow::Result<Answer> {
        self.cgroup.run(|| traffic::request(from, protocol, server, "who are you?")).unwrap()
    }

    /// Creates an unconnected UDP socket of a client in the cgroup.
    pub(super) fn socket(&self, from: &Netns, server: SocketAddr) -> UdpSocket {
        let any: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let open = || from.run(|| UdpSocket::bind((any, 0))).unwrap().unwrap();
        let socket = self.cgroup.run(open).unwrap();
        socket.set_read_timeout(Some(request_limit())).unwrap();
        socket
    }

    /// Asserts that the Pod `pod` answers requests to `server` over TCP and over UDP.
    #[track_caller]
    pub(super) fn assert_answers(&self, from: &Netns, server: SocketAddr, pod: &str) {
        for protocol in PROTOCOLS {
            let answer = self.ask(from, protocol, server).unwrap();
            assert_eq!(answer.pod, pod, "{server} by {protocol}");
        }
    }

    /// Asserts that a TCP and a UDP request from `from` to `server` both fail with `ConnectionRefused`.
    #[track_caller]
    pub(super) fn assert_refused(&self, from: &Netns, server: SocketAddr) {
        for protocol in PROTOCOLS {
            let error = self.ask(from, protocol, server).unwrap_err();
            let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
            assert_eq!(kind, Some(ErrorKind::ConnectionRefused), "{server} by {protocol}: {error:#}");
        }
    }

    /// The first Pod's NAT addresses: IPv4, IPv6, and the IPv4 one as an IPv4-mapped IPv6 address.
    pub(super) fn server_addresses(&self) -> [SocketAddr; 3] {
        let [v4, v6] = self.world.frontends();
        [v4, v6, mapped(v4)]
    }
}

/// Returns loopback addresses with the first Pod's node port; an empty list if the kernel lacks network namespace
/// cookies.
pub(super) fn loopback_addresses() -> Vec<SocketAddr> {
    if !has_loopback() {
        return Vec::new();
    }
    let [v4, v6] = loopback_frontends();
    let other_loopback = (Ipv4Addr::new(127, 9, 8, 7), NODE_PORT).into();
    vec![v4, v6, mapped(v4), other_loopback]
}

/// The first Pod's node port at `127.0.0.1` and `::1`.
pub(super) fn loopback_frontends() -> [SocketAddr; 2] {
    [(Ipv4Addr::LOCALHOST, NODE_PORT).into(), (Ipv6Addr::LOCALHOST, NODE_PORT).into()]
}

/// Whether NPL serves node ports at loopback addresses, for which it needs `SO_NETNS_COOKIE` (Linux 5.14).
pub(super) fn has_loopback() -> bool {
    KernelVersion::current().unwrap() >= KernelVersion::new(5, 14, 0)
}

/// Returns the server's address as an IPv4-mapped IPv6 address, which a dual-stack socket uses.
pub(super) fn mapped(server: SocketAddr) -> SocketAddr {
    match server.ip() {
        IpAddr::V4(ip) => (ip.to_ipv6_mapped(), server.port()).into(),
        IpAddr::V6(_) => server,
    }
}
