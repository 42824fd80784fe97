// SPDX-License-Identifier: Apache-2.0
//! `npl-agent trace`: follows packets through the kernel programs.

mod output;
mod pcap;

use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::{
    io::unix::AsyncFd,
    signal::unix::{SignalKind, signal},
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};

use self::output::Output;
use super::note;
use crate::{
    config::args::TraceArgs,
    core::{
        packet_trace::{PacketSelection, Step, TracedEndpoint},
        view::AgentView,
    },
    datapath::{PacketTrace, Pins, TRACE_LEASE, preflight},
    local,
};

/// How often the filter's lease is extended within its length.
const EXTENSIONS: u32 = 3;

/// Arms the filter, and prints or writes the records until the time or the number of records is reached, the operator
/// interrupts the command, or the reader of the output goes away.
///
/// # Errors
///
/// If no packets are selected, the Pod is not known, another command traces packets, or a map cannot be accessed.
pub async fn run(args: &TraceArgs) -> anyhow::Result<()> {
    let bpffs = &args.node.view.bpffs;
    preflight::check_bpffs(bpffs)?;
    let selection = selection(args).await?;
    let filter = selection.filter(args.rate)?;
    let mut trace = PacketTrace::arm(&Pins::new(bpffs), filter)?;
    let mut output = Output::new(args)?;
    note(&format!("following packets for {}; interrupt with Ctrl-C", humantime(args.duration)));
    let mut shown = Shown { selection: &selection, limit: args.count.unwrap_or(u64::MAX), records: 0 };
    follow(args, &mut trace, &mut output, &mut shown).await?;
    trace.disarm();
    // What the programs wrote before the filter was off.
    while shown.take_batch(&mut trace, &mut output)? == Batch::Full {}
    output.flush()?;
    let (shown, left_out) = (shown.records, trace.left_out()?);
    note(&format!("{shown} records"));
    if left_out.rate_limited > 0 {
        note(&format!(
            "{} more records exceeded --rate {} per second and CPU: select fewer packets, or raise it",
            left_out.rate_limited, args.rate
        ));
    }
    if left_out.lost > 0 {
        note(&format!(
            "{} more records were lost, because the ring buffer was full: select fewer packets",
            left_out.lost
        ));
    }
    Ok(())
}

/// Hands the records to `output` until the command ends.
async fn follow(
    args: &TraceArgs,
    trace: &mut PacketTrace,
    output: &mut Output,
    shown: &mut Shown<'_>,
) -> anyhow::Result<()> {
    let descriptor = trace.readiness().context("wait for records")?;
    #[expect(unsafe_code, reason = "tokio cannot know that the descriptor stays the same")]
    // SAFETY: the descriptor is owned, and always returns itself.
    let readiness = unsafe { AsyncFd::register(descriptor) }.context("wait for records")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("wait for signals")?;
    let mut terminate = signal(SignalKind::terminate()).context("wait for signals")?;
    let mut lease = interval(TRACE_LEASE / EXTENSIONS);
    lease.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let end = Instant::now() + args.duration;
    loop {
        let mut ready = tokio::select! {
            biased;
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            () = sleep_until(end) => return Ok(()),
            _ = lease.tick() => {
                trace.extend()?;
                continue;
            }
            ready = readiness.readable() => ready.context("wait for records")?,
        };
        match shown.take_batch(trace, output)? {
            // The kernel reports the next record only if the ring buffer was empty before it.
            Batch::Last => ready.clear_ready(),
            Batch::Full => {}
            Batch::Enough => return Ok(()),
        }
        if !output.flush()? {
            return Ok(());
        }
    }
}

/// Records that are read between two looks at signals and clocks.
const BATCH: usize = 256;

/// The end of a batch of records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Batch {
    /// The ring buffer is empty.
    Last,
    /// The ring buffer may have more records.
    Full,
    /// The wanted number of records is reached, or the reader of the output has gone away.
    Enough,
}

/// The records that are handed to the output.
struct Shown<'a> {
    selection: &'a PacketSelection,
    limit: u64,
    records: u64,
}

impl Shown<'_> {
    fn take_batch(&mut self, trace: &mut PacketTrace, output: &mut Output) -> anyhow::Result<Batch> {
        for _ in 0..BATCH {
            if self.records >= self.limit {
                return Ok(Batch::Enough);
            }
            let Some(record) = trace.next_record() else { return Ok(Batch::Last) };
            let Some(step) = Step::of(&record) else { continue };
            let Some((before, after)) = step.packets() else { continue };
            if !self.selection.admits(&before, after.as_ref()) {
                continue;
            }
            if !output.add(&step, &before, after.as_ref())? {
                return Ok(Batch::Enough);
            }
            self.records += 1;
        }
        Ok(Batch::Full)
    }
}

async fn selection(args: &TraceArgs) -> anyhow::Result<PacketSelection> {
    let mut endpoints: Vec<TracedEndpoint> = args.node_port.map(TracedEndpoint::NodePort).into_iter().collect();
    if args.node_port.is_some() || args.pod.is_some() {
        match local::ask(&args.node.runtime_dir).await {
            Ok(agent) => endpoints.extend(known_endpoints(args, &agent)?),
            Err(error) if args.pod.is_some() => {
                return Err(error)
                    .context("read the Pod's node ports from the running agent; without one, use --node-port");
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

/// The endpoints that the agent knows: the addresses behind the node port, and those of the Pod.
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

/// The addresses of the Pods behind a node port: a reply that is not translated has no other end that shows the port.
fn addresses_behind(agent: &AgentView, port: u16) -> Vec<TracedEndpoint> {
    let views = agent.node_ports.iter().filter(|view| view.frontend.node_port.0 == port);
    distinct(views.filter_map(|view| view.pod_ip.map(TracedEndpoint::Address)))
}

/// The node ports and addresses of the Pods whose names begin with `pod`.
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

/// The endpoints in their order, each once: a filter has room for few.
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

    use super::{addresses_behind, endpoints_of};

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
