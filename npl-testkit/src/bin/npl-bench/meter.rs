// SPDX-License-Identifier: Apache-2.0
//! Lets the Node's uplink receive packets and counts those that arrive at the Pod.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use aya::maps::{Array, PerCpuArray};
use aya::programs::{SchedClassifier, TcAttachType, Xdp};
use aya::{Ebpf, EbpfLoader};
use npl_common::traffic::{
    FRAME_BYTES, MAP_ARRIVED, MAP_TARGET, MAP_TRAFFIC, PROG_COUNT, PROG_GENERATE, Target, Traffic,
};
use npl_testkit::interrupt;
use npl_testkit::netns::Netns;
use npl_testkit::poll;
use npl_testkit::topology::{Device, Pod};

use crate::live_frames::{self, Stopwatch};

/// Packets between two looks at whether the user wants to stop.
const CHUNK: u32 = 50_000;

/// What the last packets need to the Pod once the last one is sent.
const STRAGGLERS: Duration = Duration::from_millis(500);

/// Packets that may get lost of a thousand; more, and something else than forwarding is measured.
const TOLERATED_PER_MILLE: u64 = 1;

/// A generator behind the Node's uplink and a counter on a Pod's device; gone when dropped.
#[derive(Debug)]
pub(crate) struct Meter {
    ebpf: Ebpf,
    node: Netns,
    uplink: u32,
    frame: [u8; FRAME_BYTES],
}

/// The flows that are sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flows {
    /// The first packet.
    pub(crate) frame: [u8; FRAME_BYTES],
    /// Client ports per client address; 0 for one flow.
    pub(crate) ports: u32,
    /// Mappings that they are spread over.
    pub(crate) mappings: u16,
}

impl Meter {
    /// Loads both programs; from now on the Pod itself sees nothing of what is sent to `ports`.
    pub(crate) fn new(
        object: &Path,
        uplink: &Device,
        flows: &Flows,
        to: &Pod,
        ports: RangeInclusive<u16>,
    ) -> Result<Self> {
        let mut ebpf =
            EbpfLoader::new().load_file(object).with_context(|| format!("load the generator {}", object.display()))?;
        let traffic =
            Traffic { next: 0, ports: flows.ports, mappings: flows.mappings.into(), frame: flows.frame, pad: [0; 4] };
        Array::try_from(ebpf.map_mut(MAP_TRAFFIC).context("the object has no generator")?)?.set(0, traffic, 0)?;
        let target = target(to.ip(), &ports);
        Array::try_from(ebpf.map_mut(MAP_TARGET).context("the object has no counter")?)?.set(0, target, 0)?;

        let generator: &mut Xdp = ebpf.program_mut(PROG_GENERATE).context("the object has no generator")?.try_into()?;
        generator.load().context("load the generator")?;
        let counter: &mut SchedClassifier =
            ebpf.program_mut(PROG_COUNT).context("the object has no counter")?.try_into()?;
        counter.load().context("load the counter")?;
        let device = to.device.name();
        to.netns.run(|| counter.attach(device, TcAttachType::Ingress))?.context("attach the counter to the Pod")?;
        Ok(Self { ebpf, node: uplink.netns().clone(), uplink: uplink.ifindex()?, frame: flows.frame })
    }

    /// Sends packets and gives the rate in millions per second at which they arrived.
    pub(crate) fn measure(&mut self, packets: u64) -> Result<f64> {
        let before = self.arrived()?;
        let elapsed = self.send(packets)?;
        let count = || self.arrived().map(|now| now - before);
        let expected = packets - packets * TOLERATED_PER_MILLE / 1000;
        let all_there = || count().is_ok_and(|arrived| arrived >= expected).then_some(());
        let waited = poll::until("the arrival of all packets", STRAGGLERS, all_there);
        let arrived = count()?;
        if waited.is_err() {
            bail!("only {arrived} of {packets} packets arrived at the Pod and the right port of it");
        }
        #[expect(clippy::cast_precision_loss, reason = "some millions")]
        Ok(arrived as f64 / elapsed.as_secs_f64() / 1e6)
    }

    /// Sends packets from one processor, which also does all that the Node does with them.
    fn send(&self, packets: u64) -> Result<Duration> {
        let generator: &Xdp = self.ebpf.program(PROG_GENERATE).context("the object has no generator")?.try_into()?;
        let program = generator.fd()?.as_fd();
        self.node.run(|| {
            live_frames::occupy_one_processor()?;
            let stopwatch = Stopwatch::start()?;
            let mut left = packets;
            while left > 0 {
                ensure!(!interrupt::is_requested(), "interrupted");
                let now = u32::try_from(left).unwrap_or(CHUNK).min(CHUNK);
                live_frames::run(program, &self.frame, self.uplink, now)?;
                left -= u64::from(now);
            }
            stopwatch.elapsed()
        })?
    }

    fn arrived(&self) -> Result<u64> {
        let counter: PerCpuArray<_, u64> =
            PerCpuArray::try_from(self.ebpf.map(MAP_ARRIVED).context("the object has no counter")?)?;
        Ok(counter.get(&0, 0).context("read the counter")?.iter().sum())
    }
}

const fn target(addr: Ipv4Addr, ports: &RangeInclusive<u16>) -> Target {
    Target { pod_addr: addr.octets(), port_min: *ports.start(), port_max: *ports.end() }
}
