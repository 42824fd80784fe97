// SPDX-License-Identifier: Apache-2.0
//! `npl-agent trace`: shows, for selected packets, what each kernel program did with the packet.

mod output;
mod pcap;
mod writer;

use std::{sync::atomic::Ordering, thread, time::Duration};

use anyhow::{Context as _, bail};
use npl_common::packet_trace::TraceRecord;
use tokio::{
    io::unix::AsyncFd,
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until},
};

use self::{
    output::{Output, Record},
    writer::Writer,
};
use super::note;
use crate::{
    config::trace_args::TraceArgs,
    core::{
        packet_trace::{PacketSelection, Step, TracedEndpoint},
        view::AgentView,
    },
    datapath::{LeftOut, PacketTrace, Pins, TRACE_LEASE, preflight},
    local,
};

/// How many times the command extends tracing within [`TRACE_LEASE`]. Without an extension within this time, the
/// programs turn tracing off.
const EXTENSIONS: u32 = 3;
/// How long an interrupted command waits for the reader of the output to read the remaining trace records.
const READER: Duration = Duration::from_millis(500);

/// Turns on tracing with the filter, and prints the trace records or writes them to a file. The command ends when
/// `--duration` is over, when `--count` records are written, on an interrupt, or when the reader closes the output.
///
/// # Errors
///
/// If the arguments select no packets, the agent does not know the Pod, another `npl-agent trace` is running, or a map
/// cannot be accessed.
pub async fn run(args: &TraceArgs) -> anyhow::Result<()> {
    let bpffs = &args.node.view.bpffs;
    preflight::check_bpffs(bpffs)?;
    let selection = selection(args).await?;
    let filter = selection.filter(args.rate)?;
    let mut trace = PacketTrace::arm(&Pins::new(bpffs), filter)?;
    let writer = Writer::start(Output::new(args)?)?;
    let mut signals = Signals::watch()?;
    note(&format!("following packets for {}; interrupt with Ctrl-C", humantime(args.duration)));
    let mut shown = Shown { selection: &selection, limit: args.count.unwrap_or(u64::MAX), records: 0 };
    let end = follow(args, &mut trace, &writer, &mut shown, &mut signals).await?;
    trace.disarm();
    let written = writer.written();
    let rest = async {
        // Reads the trace records that the programs wrote before tracing was turned off.
        while writer.has_room().await && shown.take_batch(&mut trace, &writer) == Batch::Full {}
        writer.finish().await
    };
    let limit = async { if end == End::Interrupted { sleep(READER).await } else { signals.next().await } };
    tokio::select! {
        biased;
        finished = rest => finished?,
        () = limit => {}
    }
    let written = written.load(Ordering::Relaxed);
    let unwritten = shown.records.saturating_sub(written) + shown.rest_of(&mut trace);
    report(summary(written, unwritten, trace.left_out()?, args.rate), &mut signals).await;
    Ok(())
}

/// Returns the sentences that the command prints at its end: how many trace records were written, how many were not
/// written, and why.
fn summary(written: u64, unwritten: u64, left_out: LeftOut, rate: u64) -> Vec<String> {
    let mut sentences = vec![format!("{written} records")];
    if unwritten > 0 {
        sentences.push(format!(
            "{unwritten} more records were not written, because the reader of the output paused or closed the output"
        ));
    }
    if left_out.rate_limited > 0 {
        sentences.push(format!(
            "{} more records exceeded --rate {rate} per second and CPU: select fewer packets, or raise --rate",
            left_out.rate_limited
        ));
    }
    if left_out.lost > 0 {
        sentences.push(format!(
            "{} more records were lost, because the ring buffer was full: select fewer packets, or read the output without \
             pauses",
            left_out.lost
        ));
    }
    sentences
}

/// Prints the sentences on a separate thread, so that a signal ends the command even if printing blocks: standard error
/// may be the same pipe as the output, and the pipe's reader may have paused.
async fn report(sentences: Vec<String>, signals: &mut Signals) {
    let (done, printed) = oneshot::channel::<()>();
    thread::spawn(move || {
        for sentence in sentences {
            note(&sentence);
        }
        drop(done);
    });
    tokio::select! {
        _ = printed => {}
        () = signals.next() => {}
    }
}

/// Receives the signals that end the command.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn watch() -> anyhow::Result<Self> {
        let [interrupt, terminate] = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
        Ok(Self {
            interrupt: interrupt.context("wait for signals")?,
            terminate: terminate.context("wait for signals")?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// Why the command stopped reading trace records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// `--duration` is over, `--count` records were passed to the writer, the reader has closed the output, or a write
    /// to the output has failed.
    Complete,
    /// The command has received a signal that ends it.
    Interrupted,
}

/// Passes trace records to `writer` until the command must end, and returns the reason for the end.
async fn follow(
    args: &TraceArgs,
    trace: &mut PacketTrace,
    writer: &Writer<Record>,
    shown: &mut Shown<'_>,
    signals: &mut Signals,
) -> anyhow::Result<End> {
    let descriptor = trace.readiness().context("wait for records")?;
    #[expect(unsafe_code, reason = "tokio cannot know that the descriptor stays the same")]
    // SAFETY: `descriptor` owns its file, and always returns the same file descriptor number.
    let readiness = unsafe { AsyncFd::register(descriptor) }.context("wait for records")?;
    let mut lease = interval(TRACE_LEASE / EXTENSIONS);
    lease.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let end = Instant::now() + args.duration;
    loop {
        let wait = async {
            writer.has_room().await;
            readiness.readable().await
        };
        let mut ready = tokio::select! {
            biased;
            () = signals.next() => return Ok(End::Interrupted),
            () = writer.ended() => return Ok(End::Complete),
            () = sleep_until(end) => return Ok(End::Complete),
            _ = lease.tick() => {
                trace.extend()?;
                continue;
            }
            ready = wait => ready.context("wait for records")?,
        };
        match shown.take_batch(trace, writer) {
            // The kernel reports a record only if the ring buffer was empty before. The ring buffer is empty now, so
            // the kernel reports the next record.
            Batch::Last => ready.clear_ready(),
            Batch::Full => {}
            Batch::Enough => return Ok(End::Complete),
        }
    }
}

/// The maximum number of trace records that are read before the command checks signals and time limits again.
const BATCH: usize = 256;

/// Why [`Shown::take_batch`] stopped reading trace records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Batch {
    /// The batch ended because the ring buffer is empty.
    Last,
    /// The batch is full, and the ring buffer may contain more records.
    Full,
    /// The batch ended because `--count` records were passed to the writer.
    Enough,
}

/// Selects the trace records to show, and counts the records that were passed to the writer.
struct Shown<'a> {
    selection: &'a PacketSelection,
    limit: u64,
    records: u64,
}

impl Shown<'_> {
    /// Reads at most [`BATCH`] trace records, and at most as many as the writer has room for. Passes the selected
    /// records to the writer.
    fn take_batch(&mut self, trace: &mut PacketTrace, writer: &Writer<Record>) -> Batch {
        for _ in 0..BATCH.min(writer.room()) {
            if self.records >= self.limit {
                return Batch::Enough;
            }
            let Some(record) = trace.next_record() else { return Batch::Last };
            if let Some(record) = self.admitted(&record) {
                writer.add(record);
                self.records += 1;
            }
        }
        Batch::Full
    }

    /// Reads further trace records from the ring buffer, until it is empty or `--count` is reached, and returns how
    /// many of these records would have been shown.
    fn rest_of(&self, trace: &mut PacketTrace) -> u64 {
        let mut rest = 0;
        while let Some(record) = trace.next_record().filter(|_| self.records + rest < self.limit) {
            rest += u64::from(self.admitted(&record).is_some());
        }
        rest
    }

    fn admitted(&self, record: &TraceRecord) -> Option<Record> {
        let step = Step::of(record)?;
        let (before, after) = step.packets()?;
        self.selection.admits(&before, after.as_ref()).then_some(Record { step, before, after })
    }
}

async fn selection(args: &TraceArgs) -> anyhow::Result<PacketSelection> {
    let mut endpoints: Vec<TracedEndpoint> = args.node_port.map(TracedEndpoint::NodePort).into_iter().collect();
    if args.node_port.is_some() || args.pod.is_some() {
        match local::ask(&args.node.runtime_dir).await {
            Ok(agent) => endpoints.extend(known_endpoints(args, &agent)?),
            Err(error) if args.pod.is_some() => {
                return Err(error)
                    .context("read the Pod's node ports from the running agent; if no agent runs, use --node-port");
            }
            Err(error) => {
                note(&format!("{error}; replies that are not translated are not shown, because the Pod is unknown"));
            }
        }
    }
    let endpoints = distinct(endpoints);
    let selection =
        PacketSelection { client: args.client, client_port: args.client_port, endpoints, protocol: args.protocol };
    if selection.client.is_none() && selection.client_port.is_none() && selection.endpoints.is_empty() {
        bail!("no packets are selected: give --client, --client-port, --pod or --node-port");
    }
    Ok(selection)
}

/// Returns the endpoints to trace that only the agent knows: the addresses of Pods behind the node port, and the
/// endpoints of the given Pod.
fn known_endpoints(args: &TraceArgs, agent: &AgentView) -> anyhow::Result<Vec<TracedEndpoint>> {
    let mut endpoints = args.node_port.map(|port| addresses_behind(agent, port)).unwrap_or_default();
    if let Some(pod) = &args.pod {
        let of_pod = endpoints_of(agent, args.namespace.as_deref(), pod);
        if of_pod.is_empty() {
            bail!(
                "no Pod whose name begins with `{pod}` has a node port on this Node{}: see `npl-agent mappings`",
                args.namespace.as_ref().map(|name| format!(" in namespace {name}")).unwrap_or_default()
            );
        }
        endpoints.extend(of_pod);
    }
    Ok(endpoints)
}

/// Returns the addresses of the Pods to which a node port is mapped. A reply that is not translated yet does not
/// contain the node port, so the filter selects such a reply by the Pod's address.
fn addresses_behind(agent: &AgentView, port: u16) -> Vec<TracedEndpoint> {
    let views = agent.node_ports.iter().filter(|view| view.frontend.node_port.0 == port);
    distinct(views.filter_map(|view| view.pod_ip.map(TracedEndpoint::Address)))
}

/// Returns the node ports and addresses of the Pods in `namespace` (or in all namespaces) whose names begin with the
/// prefix `pod`.
fn endpoints_of(agent: &AgentView, namespace: Option<&str>, pod: &str) -> Vec<TracedEndpoint> {
    let is_wanted = |name: Option<&str>| name.is_some_and(|name| name.starts_with(pod));
    let views = agent.node_ports.iter().filter(|view| {
        is_wanted(view.pod.as_deref()) && namespace.is_none_or(|wanted| view.namespace.as_deref() == Some(wanted))
    });
    let endpoints = views.flat_map(|view| {
        let node_port = TracedEndpoint::NodePort(view.frontend.node_port.0);
        [Some(node_port), view.pod_ip.map(TracedEndpoint::Address)].into_iter().flatten()
    });
    distinct(endpoints)
}

/// Removes duplicate endpoints, because the filter has room for only a few endpoints. Keeps the order.
fn distinct(endpoints: impl IntoIterator<Item = TracedEndpoint>) -> Vec<TracedEndpoint> {
    let mut known = Vec::new();
    for endpoint in endpoints {
        if !known.contains(&endpoint) {
            known.push(endpoint);
        }
    }
    known
}

fn humantime(duration: Duration) -> String {
    if duration.subsec_millis() == 0 {
        super::duration(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
    } else {
        format!("{duration:?}")
    }
}

#[cfg(test)]
mod tests {
    use crate::core::{
        model::{Family, Frontend, NodePort, PodPort, Protocol},
        packet_trace::TracedEndpoint,
        view::{AgentView, NodePortView, PortState},
    };

    use super::{LeftOut, addresses_behind, endpoints_of, summary};

    #[test]
    fn records_that_are_not_shown_are_counted_at_the_end() {
        assert_eq!(summary(3, 0, LeftOut::default(), 9), ["3 records"]);
        let left_out = LeftOut { rate_limited: 5, lost: 6 };
        let sentences = summary(3, 4, left_out, 9);
        for words in [
            "3 records",
            "4 more records were not written",
            "5 more records exceeded --rate 9",
            "6 more records were lost",
        ] {
            assert!(sentences.iter().any(|it| it.starts_with(words)), "{words}: {sentences:?}");
        }
    }

    fn view(pod: &str, node_port: u16, pod_ip: &str) -> NodePortView {
        NodePortView {
            frontend: Frontend { family: Family::V4, node_port: NodePort(node_port), protocol: Protocol::Tcp },
            state: PortState::Published,
            namespace: Some("shop".to_owned()),
            pod: Some(pod.to_owned()),
            pod_port: Some(PodPort(8080)),
            pod_ip: Some(pod_ip.parse().unwrap()),
            services: Vec::new(),
            age_millis: None,
            ends_in_millis: None,
        }
    }

    #[test]
    fn a_pod_is_followed_by_its_node_ports_and_its_address() {
        let node_ports = vec![
            view("web-0", 61_000, "10.244.1.5"),
            view("web-0", 61_001, "10.244.1.5"),
            view("db-0", 61_002, "10.244.1.6"),
        ];
        let agent = AgentView { node_ports, ..AgentView::default() };
        let address = TracedEndpoint::Address("10.244.1.5".parse().unwrap());
        let expected = [TracedEndpoint::NodePort(61_000), address, TracedEndpoint::NodePort(61_001)];
        assert_eq!(endpoints_of(&agent, Some("shop"), "web-0"), expected);
        assert_eq!(endpoints_of(&agent, None, "web"), expected);
        assert_eq!(endpoints_of(&agent, Some("bank"), "web-0"), []);
        assert_eq!(endpoints_of(&agent, None, "cache"), []);
        assert_eq!(addresses_behind(&agent, 61_001), [address]);
        assert_eq!(addresses_behind(&agent, 61_009), []);
    }
}
