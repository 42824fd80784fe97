// SPDX-License-Identifier: Apache-2.0
//! Sends generated packets into the Node from inside the kernel and counts those that arrive at a Pod or a client.

mod dispatcher;
mod frame;

use std::env;
use std::error::Error;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use aya::maps::{Array, PerCpuArray};
use aya::programs::tc::SchedClassifierLinkId;
use aya::programs::{SchedClassifier, TcAttachType, Xdp};
use aya::{Ebpf, EbpfLoader};
use nix::unistd::Pid;
use npl_common::traffic::{
    FRAME_BYTES, MAP_ARRIVED, MAP_TARGET, MAP_TRAFFIC, PROG_COUNT, PROG_GENERATE, PROG_IDLE, PROG_SHORTCUT, Target,
    Traffic, fate,
};

pub use self::dispatcher::Overhead;
pub use self::frame::{Segment, frame};

use self::dispatcher::IdleDevice;
use crate::interrupt;
use crate::live_frames::{self, Stopwatch};
use crate::topology::{Client, Device, Pod};
use crate::{poll, process, tools};

/// The number of packets that are sent between two checks for an interruption.
const CHUNK: u32 = 50_000;

/// The number of packets per call of the packet generator when the meter measures the fixed cost of a call. The number
/// is small, so that the time for sending the packets is negligible.
const SMALLEST: u32 = 2;
/// The number of calls whose median time counts as the fixed cost of a call.
const SMALL_CALLS: usize = 9;

/// The time limit for packets in flight to arrive after the last packet was sent.
const STRAGGLERS: Duration = Duration::from_millis(500);

/// The tolerated packet loss, in thousandths of the sent packets. If more packets are lost, the sample is discarded,
/// because its rate is not the forwarding rate.
const TOLERATED_PER_MILLE: u64 = 1;

/// The object with the generator and the counter: `NPL_TRAFFIC_OBJECT`, or the output of `cargo xtask build-ebpf`.
pub fn object() -> Result<PathBuf> {
    let named = env::var_os("NPL_TRAFFIC_OBJECT").map(PathBuf::from);
    let path = named.unwrap_or_else(|| tools::repository_file("target/bpf/npl-traffic.bpf.o"));
    ensure!(path.is_file(), "no packet generator at {}: run `cargo xtask build-ebpf` first", path.display());
    Ok(path)
}

/// A packet generator and a counter at the packets' destination. Dropping this value detaches both programs.
#[derive(Debug)]
pub struct Meter {
    ebpf: Ebpf,
    uplink: Device,
    /// The device on which the generator runs.
    entry: Device,
    ifindex: u32,
    /// The index of the Node's end of the Pod's veth pair.
    pod_ifindex: u32,
    frame: [u8; FRAME_BYTES],
    /// The link of the idle program, if it is attached.
    idle: Option<SchedClassifierLinkId>,
    idle_device: IdleDevice,
}

/// The generated flows.
#[derive(Clone, Copy, Debug)]
pub struct Flows {
    /// The first packet.
    pub frame: [u8; FRAME_BYTES],
    /// The source addresses and ports.
    pub clients: Clients,
    /// The place at which the packets enter the Node.
    pub entry: Entry,
    /// The number of mappings over which the packets are spread.
    pub mappings: u16,
    /// The packets that are counted.
    pub arrival: Arrival,
}

/// The addresses and ports with which packets have to arrive in order to be counted.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// The destination address.
    pub address: Ipv4Addr,
    /// The first and the last destination port.
    pub ports: [u16; 2],
    /// The source address and port; `None` if packets from every source are counted.
    pub source: Option<SocketAddrV4>,
}

/// The place at which packets enter the Node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Above the uplink's driver, so the packets bypass XDP programs in the driver.
    Uplink,
    /// At the client's end of the veth pair. The uplink's driver accepts these frames only while the uplink has an XDP
    /// program or GRO enabled.
    Wire,
    /// At the Pod's end of its veth pair, as frames that the uplink's driver has redirected to the Pod. Requires GRO at
    /// the Pod's end.
    Pod,
    /// Above the driver of the Node's end of the Pod's veth pair, as frames that the Pod has sent.
    PodUplink,
}

/// The clients of the generated flows.
#[derive(Clone, Copy, Debug)]
pub enum Clients {
    /// All packets belong to one flow.
    One,
    /// The packets come from one address after another; each address uses this number of ports.
    InTurn {
        /// The number of ports per address.
        ports: u32,
    },
    /// Each packet has a random port and a random address among the 268 million that follow the address of the first
    /// packet.
    Random,
}

/// The number of packets that were sent, and the time for sending these packets.
#[derive(Clone, Copy, Debug)]
struct Sent {
    packets: u64,
    elapsed: Duration,
    /// The number of calls of the generator; one call sends many packets.
    calls: u32,
    cost_of_a_call: Duration,
}

/// The error of a sample that lost packets.
#[derive(Clone, Copy, Debug)]
pub struct Lost {
    arrived: u64,
    packets: u64,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { arrived, packets } = self;
        write!(f, "only {arrived} of {packets} packets arrived at the expected port")
    }
}

impl Error for Lost {}

impl Meter {
    /// Loads the generator and the counter. The counter consumes the packets: neither the Pod nor the client receives
    /// any.
    pub fn new(object: &Path, client: &Client, pod: &Pod, flows: &Flows) -> Result<Self> {
        let mut ebpf =
            EbpfLoader::new().load_file(object).with_context(|| format!("load the generator {}", object.display()))?;
        let entry = match flows.entry {
            Entry::Uplink | Entry::Pod => client.uplink.clone(),
            Entry::Wire => client.device.clone(),
            Entry::PodUplink => pod.host_device.clone(),
        };
        let device = if flows.entry == Entry::PodUplink { &client.device } else { &pod.device };
        let generator: &mut Xdp = ebpf.program_mut(PROG_GENERATE).context("the object has no generator")?.try_into()?;
        generator.load().context("load the packet generator")?;
        let counter: &mut SchedClassifier =
            ebpf.program_mut(PROG_COUNT).context("the object has no counter")?.try_into()?;
        counter.load().context("load the counter")?;
        let attached = device.netns().run(|| counter.attach(device.name(), TcAttachType::Ingress))?;
        attached.with_context(|| format!("attach the counter to {}", device.name()))?;
        let (uplink, ifindex, pod_ifindex) = (client.uplink.clone(), entry.ifindex()?, pod.host_device.ifindex()?);
        let (frame, idle_device) = (flows.frame, IdleDevice::new()?);
        let mut meter = Self { ebpf, uplink, entry, ifindex, pod_ifindex, frame, idle: None, idle_device };
        meter.turn_to(flows)?;
        Ok(meter)
    }

    /// Switches to other flows with the same entry point. Clients that were used before are not used again.
    pub fn turn_to(&mut self, flows: &Flows) -> Result<()> {
        let (ports, random) = match flows.clients {
            Clients::One => (0, 0),
            Clients::InTurn { ports } => (ports, 0),
            Clients::Random => (0, 1),
        };
        let fate = match flows.entry {
            Entry::Uplink | Entry::PodUplink => fate::RECEIVED,
            Entry::Wire => fate::SENT,
            Entry::Pod => fate::REDIRECTED,
        };
        let mut traffic: Array<_, Traffic> =
            Array::try_from(self.ebpf.map_mut(MAP_TRAFFIC).context("the object has no generator")?)?;
        let Traffic { next, .. } = traffic.get(&0, 0)?;
        let (mappings, frame) = (flows.mappings.into(), flows.frame);
        traffic.set(0, Traffic { next, ports, mappings, frame, random, fate }, 0)?;
        let target = flows.arrival.target(self.pod_ifindex);
        Array::try_from(self.ebpf.map_mut(MAP_TARGET).context("the object has no counter")?)?.set(0, target, 0)?;
        self.frame = frame;
        Ok(())
    }

    /// Attaches an empty program after the programs on the uplink, or detaches the empty program.
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

    /// Attaches a program to the uplink, until the meter is dropped. The program redirects every packet to the Pod.
    pub fn attach_shortcut(&mut self) -> Result<()> {
        self.attach(PROG_SHORTCUT).map(drop)
    }

    /// Attaches a program to the uplink until it is detached or the meter is dropped.
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

    /// The empty program.
    pub fn idle(&self) -> Result<&SchedClassifier> {
        Ok(self.ebpf.program(PROG_IDLE).context("the object has no idle program")?.try_into()?)
    }

    /// Sends packets for at most `limit` and returns the rate at which they arrived, in million packets per second.
    ///
    /// # Errors
    ///
    /// Returns [`Lost`] if more packets were lost than [`TOLERATED_PER_MILLE`], or [`Overhead`] if the generator's
    /// calls themselves took more than 1 % of the time.
    pub fn measure(&mut self, packets: u64, limit: Duration) -> Result<f64> {
        let (arrived, sent) = self.send_and_count(packets, limit)?;
        dispatcher::check(sent.cost_of_a_call, sent.calls, sent.elapsed)?;
        #[expect(clippy::cast_precision_loss, reason = "some millions")]
        Ok(arrived as f64 / sent.elapsed.as_secs_f64() / 1e6)
    }

    /// Sends packets without measuring a rate.
    ///
    /// # Errors
    ///
    /// Returns [`Lost`] as [`Self::measure`] does.
    pub fn warm_up(&mut self, packets: u64) -> Result<()> {
        self.send_and_count(packets, Duration::MAX).map(drop)
    }

    /// Sends packets. Returns the number of packets that arrived; and the number of packets that were sent, with the
    /// time for sending them.
    fn send_and_count(&mut self, packets: u64, limit: Duration) -> Result<(u64, Sent)> {
        let idle_device = &self.idle_device;
        let generator: &mut Xdp =
            self.ebpf.program_mut(PROG_GENERATE).context("the object has no generator")?.try_into()?;
        let _in_dispatcher = idle_device.attach(generator)?;
        let before = self.arrived()?;
        let sent = self.send_alone(packets, limit)?;
        let packets = sent.packets;
        let expected = packets - packets * TOLERATED_PER_MILLE / 1000;
        let arrived = self.wait_for(before + expected)? - before;
        if arrived < expected {
            bail!(Lost { arrived, packets });
        }
        Ok((arrived, sent))
    }

    /// Sends packets from the calling thread. The thread's processor also does all of the Node's work on these packets.
    pub fn send(&self, packets: u32) -> Result<()> {
        let generator: &Xdp = self.ebpf.program(PROG_GENERATE).context("the object has no generator")?.try_into()?;
        let program = generator.fd()?.as_fd();
        self.entry.netns().run(|| live_frames::run(program, &self.frame, self.ifindex, packets))?
    }

    /// Sends packets from the first processor until `is_over` is true. Returns the number of packets. Another meter may
    /// measure on the last processor at the same time.
    pub fn flood(&mut self, is_over: &AtomicBool) -> Result<u64> {
        let idle_device = &self.idle_device;
        let generator: &mut Xdp =
            self.ebpf.program_mut(PROG_GENERATE).context("the object has no generator")?.try_into()?;
        let _in_dispatcher = idle_device.attach(generator)?;
        let generator: &Xdp = self.ebpf.program(PROG_GENERATE).context("the object has no generator")?.try_into()?;
        let program = generator.fd()?.as_fd();
        self.entry.netns().run(|| {
            process::keep_on(Pid::from_raw(0), 0)?;
            live_frames::go_ahead()?;
            let mut sent = 0;
            while !is_over.load(Ordering::Relaxed) {
                live_frames::run(program, &self.frame, self.ifindex, CHUNK)?;
                sent += u64::from(CHUNK);
            }
            Ok(sent)
        })?
    }

    /// Sends packets from a processor reserved for this work.
    fn send_alone(&self, packets: u64, limit: Duration) -> Result<Sent> {
        let generator: &Xdp = self.ebpf.program(PROG_GENERATE).context("the object has no generator")?.try_into()?;
        let program = generator.fd()?.as_fd();
        self.entry.netns().run(|| {
            live_frames::occupy_one_processor()?;
            let call = |packets| live_frames::run(program, &self.frame, self.ifindex, packets);
            let cost_of_a_call = cost_of_a_call(call)?;
            let stopwatch = Stopwatch::start()?;
            let (mut sent, mut calls) = (0, 0);
            while sent < packets && stopwatch.elapsed()? < limit {
                ensure!(!interrupt::is_requested(), "interrupted");
                let now = u32::try_from(packets - sent).unwrap_or(CHUNK).min(CHUNK);
                call(now)?;
                (sent, calls) = (sent + u64::from(now), calls + 1);
            }
            Ok(Sent { packets: sent, elapsed: stopwatch.elapsed()?, calls, cost_of_a_call })
        })?
    }

    /// Waits until `expected` packets have arrived, or until the time limit for packets in flight has passed. Returns
    /// the number of packets that have arrived.
    pub fn wait_for(&self, expected: u64) -> Result<u64> {
        let all_there = || self.arrived().is_ok_and(|arrived| arrived >= expected).then_some(());
        // A timeout is ignored here: the caller decides whether missing packets are an error.
        drop(poll::until("the arrival of all packets", STRAGGLERS, all_there));
        self.arrived()
    }

    /// The number of packets that have arrived so far.
    pub fn arrived(&self) -> Result<u64> {
        let counter: PerCpuArray<_, u64> =
            PerCpuArray::try_from(self.ebpf.map(MAP_ARRIVED).context("the object has no counter")?)?;
        Ok(counter.get(&0, 0).context("read the counter")?.iter().sum())
    }
}

/// Returns the median time of calls that send [`SMALLEST`] packets. These packets count as arrived but not as sent.
/// They are too few to change the measured rate.
fn cost_of_a_call(call: impl Fn(u32) -> Result<()>) -> Result<Duration> {
    let mut times = [Duration::ZERO; SMALL_CALLS];
    for time in &mut times {
        let stopwatch = Stopwatch::start()?;
        call(SMALLEST)?;
        *time = stopwatch.elapsed()?;
    }
    times.sort_unstable();
    Ok(times[SMALL_CALLS / 2])
}

impl Arrival {
    /// Returns the settings of the counter, and of the program that only redirects to the Pod.
    fn target(&self, ifindex: u32) -> Target {
        let [port_min, port_max] = self.ports;
        let (source_addr, source_port) = self.source.map_or_else(Default::default, |it| (it.ip().octets(), it.port()));
        Target { addr: self.address.octets(), port_min, port_max, ifindex, source_addr, source_port, reserved: 0 }
    }
}
