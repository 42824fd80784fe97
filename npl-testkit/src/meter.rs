// SPDX-License-Identifier: Apache-2.0
//! Lets the Node's uplink receive packets that are made in the kernel, and counts those that arrive at the Pod.

use std::env;
use std::error::Error;
use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use aya::maps::{Array, PerCpuArray};
use aya::programs::tc::SchedClassifierLinkId;
use aya::programs::{SchedClassifier, TcAttachType, Xdp};
use aya::{Ebpf, EbpfLoader};
use npl_common::traffic::{
    FRAME_BYTES, MAP_ARRIVED, MAP_TARGET, MAP_TRAFFIC, PROG_COUNT, PROG_GENERATE, PROG_IDLE, PROG_SHORTCUT, Target,
    Traffic, fate,
};

use crate::echo::Protocol;
use crate::interrupt;
use crate::live_frames::{self, Stopwatch};
use crate::packet::{Ethernet, Packet, tcp_flags};
use crate::topology::{Client, Device, Pod};
use crate::{poll, tools};

/// Packets between two looks at whether the user wants to stop.
const CHUNK: u32 = 50_000;

/// What the last packets need to the Pod once the last one is sent.
const STRAGGLERS: Duration = Duration::from_millis(500);

/// Packets that may get lost of a thousand; more, and something else than forwarding is measured.
const TOLERATED_PER_MILLE: u64 = 1;

/// The object with generator and counter: `NPL_TRAFFIC_OBJECT`, or where `cargo xtask build-ebpf` leaves it.
pub fn object() -> Result<PathBuf> {
    let named = env::var_os("NPL_TRAFFIC_OBJECT").map(PathBuf::from);
    let path = named.unwrap_or_else(|| tools::repository_file("target/bpf/npl-traffic.bpf.o"));
    ensure!(path.is_file(), "no generator at {}: run `cargo xtask build-ebpf` first", path.display());
    Ok(path)
}

/// A generator at one end of the Node's uplink and a counter on a Pod's device; gone when dropped.
#[derive(Debug)]
pub struct Meter {
    ebpf: Ebpf,
    uplink: Device,
    /// The device that the generator runs for.
    entry: Device,
    ifindex: u32,
    frame: [u8; FRAME_BYTES],
    /// Where the program that only returns is attached, if it is.
    idle: Option<SchedClassifierLinkId>,
}

/// The flows that are sent.
#[derive(Clone, Copy, Debug)]
pub struct Flows {
    /// The first packet.
    pub frame: [u8; FRAME_BYTES],
    /// Whom they come from.
    pub clients: Clients,
    /// Where they come in.
    pub entry: Entry,
    /// Mappings that they are spread over.
    pub mappings: u16,
}

/// Where packets come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Behind the uplink's driver, past any XDP program.
    Uplink,
    /// At the client's end, which sends them to the uplink's driver. That takes them in only while its XDP program or
    /// receive offload is on.
    Wire,
    /// At the Pod, as frames from the uplink's driver, which takes them while receive offload is on at its end.
    Pod,
}

/// The clients of flows.
#[derive(Clone, Copy, Debug)]
pub enum Clients {
    /// All packets are of one flow.
    One,
    /// One address after the other, each with so many ports.
    InTurn {
        /// Ports of each address.
        ports: u32,
    },
    /// Each packet from another address and port, drawn at random from the 268 million addresses that follow that of the
    /// first packet.
    Random,
}

/// Packets did not arrive.
#[derive(Clone, Copy, Debug)]
pub struct Lost {
    arrived: u64,
    packets: u64,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { arrived, packets } = self;
        write!(f, "only {arrived} of {packets} packets arrived at the Pod and the right port of it")
    }
}

impl Error for Lost {}

impl Meter {
    /// Loads both programs; from now on the Pod itself sees nothing of what is sent to `ports`.
    pub fn new(object: &Path, client: &Client, flows: &Flows, to: &Pod, ports: RangeInclusive<u16>) -> Result<Self> {
        let mut ebpf =
            EbpfLoader::new().load_file(object).with_context(|| format!("load the generator {}", object.display()))?;
        let entry = match flows.entry {
            Entry::Uplink | Entry::Pod => client.uplink.clone(),
            Entry::Wire => client.device.clone(),
        };
        let target = target(to, &ports)?;
        Array::try_from(ebpf.map_mut(MAP_TARGET).context("the object has no counter")?)?.set(0, target, 0)?;

        let generator: &mut Xdp = ebpf.program_mut(PROG_GENERATE).context("the object has no generator")?.try_into()?;
        generator.load().context("load the generator")?;
        let counter: &mut SchedClassifier =
            ebpf.program_mut(PROG_COUNT).context("the object has no counter")?.try_into()?;
        counter.load().context("load the counter")?;
        let device = to.device.name();
        to.netns.run(|| counter.attach(device, TcAttachType::Ingress))?.context("attach the counter to the Pod")?;
        let (uplink, ifindex) = (client.uplink.clone(), entry.ifindex()?);
        let mut meter = Self { ebpf, uplink, entry, ifindex, frame: flows.frame, idle: None };
        meter.turn_to(flows)?;
        Ok(meter)
    }

    /// Sends these flows from now on, which come in where the first ones did. No client that has been sent from comes again.
    pub fn turn_to(&mut self, flows: &Flows) -> Result<()> {
        let (ports, random) = match flows.clients {
            Clients::One => (0, 0),
            Clients::InTurn { ports } => (ports, 0),
            Clients::Random => (0, 1),
        };
        let fate = match flows.entry {
            Entry::Uplink => fate::RECEIVED,
            Entry::Wire => fate::SENT,
            Entry::Pod => fate::REDIRECTED,
        };
        let mut traffic: Array<_, Traffic> =
            Array::try_from(self.ebpf.map_mut(MAP_TRAFFIC).context("the object has no generator")?)?;
        let Traffic { next, .. } = traffic.get(&0, 0)?;
        let (mappings, frame) = (flows.mappings.into(), flows.frame);
        traffic.set(0, Traffic { next, ports, mappings, frame, random, fate }, 0)?;
        self.frame = frame;
        Ok(())
    }

    /// Has a program on the uplink that only returns, behind those that are there, or has it no more.
    pub fn set_idle(&mut self, is_there: bool) -> Result<()> {
        if is_there == self.idle.is_some() {
            return Ok(());
        }
        self.idle = match self.idle.take() {
            Some(link) => self.program(PROG_IDLE)?.detach(link).map(|()| None)?,
            None => Some(self.attach(PROG_IDLE)?),
        };
        Ok(())
    }

    /// Has a program on the uplink, for good, that only redirects to the Pod.
    pub fn attach_shortcut(&mut self) -> Result<()> {
        self.attach(PROG_SHORTCUT).map(drop)
    }

    /// Has it on the uplink until it is detached, or the meter is dropped.
    fn attach(&mut self, name: &str) -> Result<SchedClassifierLinkId> {
        let uplink = self.uplink.clone();
        let program = self.program(name)?;
        if program.fd().is_err() {
            program.load().with_context(|| format!("load {name}"))?;
        }
        let device = uplink.name();
        let attached = uplink.netns().run(|| program.attach(device, TcAttachType::Ingress))?;
        attached.with_context(|| format!("attach {name} to {device}"))
    }

    fn program(&mut self, name: &str) -> Result<&mut SchedClassifier> {
        Ok(self.ebpf.program_mut(name).with_context(|| format!("the object has no {name}"))?.try_into()?)
    }

    /// The program that only returns.
    pub fn idle(&self) -> Result<&SchedClassifier> {
        Ok(self.ebpf.program(PROG_IDLE).context("the object has no idle program")?.try_into()?)
    }

    /// Sends packets, but for no longer than `limit`, and gives the rate in millions per second at which they arrived.
    ///
    /// # Errors
    ///
    /// [`Lost`], where so many did not arrive that the rate would not be that of the path.
    pub fn measure(&mut self, packets: u64, limit: Duration) -> Result<f64> {
        let before = self.arrived()?;
        let (packets, elapsed) = self.send_alone(packets, limit)?;
        let expected = packets - packets * TOLERATED_PER_MILLE / 1000;
        let arrived = self.wait_for(before + expected)? - before;
        if arrived < expected {
            bail!(Lost { arrived, packets });
        }
        #[expect(clippy::cast_precision_loss, reason = "some millions")]
        Ok(arrived as f64 / elapsed.as_secs_f64() / 1e6)
    }

    /// Sends packets from the calling thread, whose processor also does all that the Node does with them.
    pub fn send(&self, packets: u32) -> Result<()> {
        let generator: &Xdp = self.ebpf.program(PROG_GENERATE).context("the object has no generator")?.try_into()?;
        let program = generator.fd()?.as_fd();
        self.entry.netns().run(|| live_frames::run(program, &self.frame, self.ifindex, packets))?
    }

    /// Sends packets from one processor, which does nothing else; how many it were, and for how long.
    fn send_alone(&self, packets: u64, limit: Duration) -> Result<(u64, Duration)> {
        let generator: &Xdp = self.ebpf.program(PROG_GENERATE).context("the object has no generator")?.try_into()?;
        let program = generator.fd()?.as_fd();
        self.entry.netns().run(|| {
            live_frames::occupy_one_processor()?;
            let stopwatch = Stopwatch::start()?;
            let mut sent = 0;
            while sent < packets && stopwatch.elapsed()? < limit {
                ensure!(!interrupt::is_requested(), "interrupted");
                let now = u32::try_from(packets - sent).unwrap_or(CHUNK).min(CHUNK);
                live_frames::run(program, &self.frame, self.ifindex, now)?;
                sent += u64::from(now);
            }
            Ok((sent, stopwatch.elapsed()?))
        })?
    }

    /// Packets that have arrived, counted until `expected` are there or no more can come.
    pub fn wait_for(&self, expected: u64) -> Result<u64> {
        let all_there = || self.arrived().is_ok_and(|arrived| arrived >= expected).then_some(());
        // Too few are for the caller to judge.
        drop(poll::until("the arrival of all packets", STRAGGLERS, all_there));
        self.arrived()
    }

    /// Packets that have arrived up to now.
    pub fn arrived(&self) -> Result<u64> {
        let counter: PerCpuArray<_, u64> =
            PerCpuArray::try_from(self.ebpf.map(MAP_ARRIVED).context("the object has no counter")?)?;
        Ok(counter.get(&0, 0).context("read the counter")?.iter().sum())
    }
}

fn target(pod: &Pod, ports: &RangeInclusive<u16>) -> Result<Target> {
    let (port_min, port_max) = (*ports.start(), *ports.end());
    Ok(Target { pod_addr: pod.ip().octets(), port_min, port_max, ifindex: pod.host_device.ifindex()? })
}

/// The first frame, a datagram or a SYN: from `source`, by the client's uplink, to arrive at `pod_port`.
pub fn frame(
    protocol: Protocol,
    client: &Client,
    source: SocketAddr,
    server: SocketAddr,
    pod_port: u16,
) -> Result<[u8; FRAME_BYTES]> {
    let mut packet = match protocol {
        Protocol::Udp => Packet::udp(source, server, &[0; FRAME_BYTES - 14 - 20 - 8]),
        Protocol::Tcp => Packet::tcp(source, server, tcp_flags::SYN, &[]),
        Protocol::Sctp => bail!("frames of SCTP are not made"),
    };
    let (destination, source) = (client.uplink.link_address()?, client.device.link_address()?);
    packet.ethernet = Some(Ethernet { destination, source, vlans: Vec::new() });
    packet.ipv4_mut().context("an IPv4 packet")?.identification = pod_port;
    let mut bytes = packet.build();
    // Ethernet pads a frame that is too short.
    bytes.resize(FRAME_BYTES, 0);
    bytes.try_into().ok().context("a frame of the right length")
}
