// SPDX-License-Identifier: Apache-2.0
//! Measures the round-trip time and the throughput of TCP connections that a client opens through a Node, with real
//! sockets. Connections to a mapping are compared with connections to the Pod's own address, in alternating turns on
//! one Node.

mod conversation;
mod figures;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use anyhow::{Context as _, Result, ensure};
use npl_testkit::echo::Protocol;
use npl_testkit::interrupt;
use npl_testkit::run::Run;
use npl_testkit::topology::{Options, Topology};

use self::conversation::{Conversation, stream};
pub(crate) use self::figures::FIGURES;
use self::figures::{ModeFigures, OFFLOAD, REDIRECT, STACK, STREAMS};
use crate::Effort;
use crate::cases::MAPPINGS;
use crate::figures::{Figure, Samples, percentile, say};
use crate::ours::{Manner, Ours};
use crate::testbed::{FIRST_NODE_PORT, FIRST_POD_PORT, Mappings};

/// Measures the elements of `figures` that belong to this stage.
pub(crate) fn measure(figures: &[&Figure], effort: Effort, samples: &mut Samples) -> Result<()> {
    let is_meant = |figure: &Figure| figures.iter().any(|meant| meant.name == figure.name);
    let is_needed = |mode: &&ModeFigures| mode.figures().any(is_meant);
    let modes: Vec<&ModeFigures> = [&STACK, &REDIRECT, &OFFLOAD].into_iter().filter(is_needed).collect();
    if modes.is_empty() {
        return Ok(());
    }
    let run = Run::start()?;
    let beds: Vec<Bed> =
        modes.into_iter().enumerate().map(|(number, mode)| Bed::new(&run, number, mode)).collect::<Result<_>>()?;
    for round in 0..effort.rounds {
        say(&format!("measuring TCP connections, round {} of {}", round + 1, effort.rounds));
        for bed in &beds {
            ensure!(!interrupt::is_requested(), "interrupted");
            bed.measure(is_meant, effort, samples)?;
        }
    }
    Ok(())
}

impl ModeFigures {
    fn figures(&self) -> impl Iterator<Item = &Figure> {
        [&self.latency, &self.latency_p99, &self.stream, &self.streams].into_iter().chain(self.itself)
    }
}

/// A client, a Node with NPL, and a Pod. Fields are dropped in declaration order, so NPL is removed before the network.
struct Bed {
    mode: &'static ModeFigures,
    listener: TcpListener,
    pod_ip: Ipv4Addr,
    _ours: Ours,
    topology: Topology,
}

impl Bed {
    fn new(run: &Run, number: usize, mode: &'static ModeFigures) -> Result<Self> {
        let mut topology = Topology::new(run, &format!("tcp{number}"), Options::default())?;
        // Connections are idle between turns. Without this setting, an idle connection would continue with a small
        // congestion window.
        topology.client().netns.sysctl("net/ipv4/tcp_slow_start_after_idle", "0")?;
        let pod = topology.add_pod(run, "pod")?;
        pod.fix_neighbour()?;
        let mappings = Mappings { protocol: Protocol::Tcp, pod_ip: pod.ip(), count: MAPPINGS, offset: 0 };
        let ours = Ours::load(run, &format!("tcp{number}"), &topology, mappings, Manner::by(mode.forwarding))?;
        let listen = || TcpListener::bind((Ipv4Addr::UNSPECIFIED, FIRST_POD_PORT));
        let listener = pod.netns.run(listen)?.context("listen in the Pod")?;
        Ok(Self { mode, listener, pod_ip: pod.ip(), _ours: ours, topology })
    }

    /// Opens connections to `server`, and sends data over them, so that their congestion windows are open afterwards.
    fn open(&self, server: SocketAddr, effort: Effort) -> Result<Vec<Conversation>> {
        let client = &self.topology.client().netns;
        let open = |_| Conversation::open(client, server, &self.listener);
        let conversations = (0..STREAMS).map(open).collect::<Result<Vec<_>>>()?;
        stream(&conversations, effort.stream)?;
        Ok(conversations)
    }

    /// Measures one round. Each round opens new connections, because some connections are faster than others for their
    /// whole lifetime.
    fn measure(&self, is_meant: impl Fn(&Figure) -> bool, effort: Effort, samples: &mut Samples) -> Result<()> {
        let to_pod = || self.open((self.pod_ip, FIRST_POD_PORT).into(), effort);
        let mapping = self.open((self.topology.node_addresses().v4, FIRST_NODE_PORT).into(), effort)?;
        let direct = to_pod()?;
        let ModeFigures { latency, latency_p99, stream: one, streams: many, itself, forwarding: _ } = self.mode;
        if is_meant(latency) || is_meant(latency_p99) {
            let ask = |conversations: &[Conversation], _turn| conversations[0].ask(effort.questions);
            by_turns([&mapping, &direct], effort.turns, ask, |[mapping, direct]| {
                let p99 = |values: &[f64]| percentile(values, 99).context("too few requests");
                samples.add(latency_p99, &[p99(&mapping)?], &[p99(&direct)?]);
                samples.add(latency, &mapping, &direct);
                Ok(())
            })?;
        }
        // The memory layout of a connection affects its speed, so each turn uses a different connection.
        let one_goes = |all: &[Conversation], turn| stream(&all[turn % STREAMS..][..1], effort.stream);
        let all_go = |all: &[Conversation], _turn| stream(all, effort.stream);
        let mut add = |figure, [mapping, direct]: [f64; 2]| {
            samples.add(figure, &[mapping], &[direct]);
            Ok(())
        };
        if is_meant(one) {
            by_turns([&mapping, &direct], effort.streams, one_goes, |shown| add(one, shown))?;
        }
        if is_meant(many) {
            by_turns([&mapping, &direct], effort.streams, all_go, |shown| add(many, shown))?;
        }
        if let Some(itself) = itself
            && is_meant(itself)
        {
            by_turns([&to_pod()?, &to_pod()?], effort.streams, one_goes, |shown| add(itself, shown))?;
        }
        Ok(())
    }
}

/// Alternates between connections to the mapping and to the Pod's own address, because other processes of the machine
/// change all rates within a second. Passes the results of each turn to `take_in`.
fn by_turns<T>(
    [conversations, direct]: [&[Conversation]; 2],
    turns: usize,
    measure: impl Fn(&[Conversation], usize) -> Result<T>,
    mut take_in: impl FnMut([T; 2]) -> Result<()>,
) -> Result<()> {
    for turn in 0..turns {
        // Each turn reverses the order of the two addresses, so that neither address is always measured first.
        let shown = if turn % 2 == 0 {
            let shown = measure(conversations, turn)?;
            [shown, measure(direct, turn)?]
        } else {
            let direct = measure(direct, turn)?;
            [measure(conversations, turn)?, direct]
        };
        take_in(shown)?;
    }
    Ok(())
}
