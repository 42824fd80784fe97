// SPDX-License-Identifier: Apache-2.0
//! A Node with Pods, and a cgroup for clients whose sockets the agent's programs see.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use aya::util::KernelVersion;
use npl_agent::datapath::{CgroupSelection, Datapath, ServedClients};
use npl_testkit::client_cgroup::ClientCgroup;
use npl_testkit::echo::{Answer, Protocol};
use npl_testkit::netns::Netns;
use npl_testkit::traffic::{self, REQUEST_LIMIT};

use crate::world::{NODE_PORT, World};

/// Both protocols of a mapping.
pub(super) const PROTOCOLS: [Protocol; 2] = [Protocol::Tcp, Protocol::Udp];

/// Everything is taken down in this order.
pub(super) struct Scene {
    pub(super) cgroup: ClientCgroup,
    pub(super) world: World,
}

impl Scene {
    /// Mapped Pods, as of [`World::new`], and the programs on a cgroup for clients.
    pub(super) fn new(pods: u8) -> Self {
        Self::served(World::new(pods))
    }

    /// As [`Self::new`], as of [`World::fresh`].
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

    /// As [`Self::new`], without programs on the cgroup.
    pub(super) fn unserved(pods: u8) -> Self {
        Self::of(World::new(pods))
    }

    fn of(world: World) -> Self {
        let cgroup = world.run.client_cgroup("clients").unwrap();
        Self { cgroup, world }
    }

    /// What a starting agent does for local clients.
    pub(super) fn serve(&self, datapath: &mut Datapath) -> ServedClients {
        let selection = CgroupSelection::Directory(self.cgroup.path().to_owned());
        let serve = || datapath.serve_local_clients(&selection);
        self.world.node().run(serve).unwrap().unwrap().unwrap()
    }

    /// Asks once from within the cgroup.
    pub(super) fn ask(&self, from: &Netns, protocol: Protocol, server: SocketAddr) -> anyhow::Result<Answer> {
        self.cgroup.run(|| traffic::request(from, protocol, server, "who are you?")).unwrap()
    }

    /// A UDP socket of a client in the cgroup that talks to nobody in particular.
    pub(super) fn socket(&self, from: &Netns, server: SocketAddr) -> UdpSocket {
        let any: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let open = || from.run(|| UdpSocket::bind((any, 0))).unwrap().unwrap();
        let socket = self.cgroup.run(open).unwrap();
        socket.set_read_timeout(Some(REQUEST_LIMIT)).unwrap();
        socket
    }

    /// Whoever answers at `server` is the Pod of this name.
    #[track_caller]
    pub(super) fn assert_answers(&self, from: &Netns, server: SocketAddr, pod: &str) {
        for protocol in PROTOCOLS {
            let answer = self.ask(from, protocol, server).unwrap();
            assert_eq!(answer.pod, pod, "{server} by {protocol}");
        }
    }

    /// The host itself refuses, by both protocols.
    #[track_caller]
    pub(super) fn assert_refused(&self, from: &Netns, server: SocketAddr) {
        for protocol in PROTOCOLS {
            let error = self.ask(from, protocol, server).unwrap_err();
            let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
            assert_eq!(kind, Some(ErrorKind::ConnectionRefused), "{server} by {protocol}: {error:#}");
        }
    }

    /// The first Pod's mapping by the Node's address of each family, and the IPv4 one in IPv6 form.
    pub(super) fn names(&self) -> [SocketAddr; 3] {
        let [v4, v6] = self.world.frontends();
        [v4, v6, mapped(v4)]
    }
}

/// The same by loopback, as far as the kernel tells which namespace's it is.
pub(super) fn loopback_names() -> Vec<SocketAddr> {
    if !has_loopback() {
        return Vec::new();
    }
    let [v4, v6] = loopback_frontends();
    let another = (Ipv4Addr::new(127, 9, 8, 7), NODE_PORT).into();
    vec![v4, v6, mapped(v4), another]
}

/// The first node port by `127.0.0.1` and by `::1`.
pub(super) fn loopback_frontends() -> [SocketAddr; 2] {
    [(Ipv4Addr::LOCALHOST, NODE_PORT).into(), (Ipv6Addr::LOCALHOST, NODE_PORT).into()]
}

/// `SO_NETNS_COOKIE` is there from Linux 5.14 on.
pub(super) fn has_loopback() -> bool {
    KernelVersion::current().unwrap() >= KernelVersion::new(5, 14, 0)
}

/// As a socket that serves both families names an IPv4 server.
pub(super) fn mapped(server: SocketAddr) -> SocketAddr {
    match server.ip() {
        IpAddr::V4(ip) => (ip.to_ipv6_mapped(), server.port()).into(),
        IpAddr::V6(_) => server,
    }
}
