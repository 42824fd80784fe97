// SPDX-License-Identifier: Apache-2.0
//! Starts all parts of the agent, and waits until one part ends.

use std::{
    convert::Infallible,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, bail};
use npl_common::names::ABI_VERSION;
use ring::rand::{SecureRandom as _, SystemRandom};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch as latest},
    task::JoinHandle,
    time::sleep,
};
use tracing::{info, warn};

use crate::{
    agent::{
        change_log::ChangeLog,
        executor::Executor,
        introspection::Introspection,
        reconciler::{HEARTBEAT, Listeners, ProgramTargets, Reconciler},
        service_meter::ServiceMeter,
        sweeper::Sweeper,
    },
    config::Config,
    core::{
        devices::redirect::Forwarding,
        model::{
            Family,
            port_range::{EphemeralPorts, port_range_warnings},
            settings::{PortRange, Settings},
        },
        pages,
        state::PlannerState,
    },
    datapath::{Datapath, Pins, Tables, cleanup, preflight},
    devices::{
        local_clients::LocalClients,
        uplinks::{Uplinks, needs_attachments},
    },
    http::{Health, Servers},
    kube::{
        self, WatchedObjects, confinement::ConfinementResult, contacts::WatchContacts, events::Recorder,
        patch::PodPatcher,
    },
    local,
    metrics::{Counts, DatapathCounters, FamilyTotals, Metrics},
    netlink,
    nft_guard::Guard,
    process::{error_chain::ErrorChain, limits, lock},
};

/// The maximum number of changes that the watches queue for the main loop. If the queue is full, the watches wait for
/// the main loop.
const QUEUE: usize = 1024;

/// Serves the Node until SIGTERM or SIGINT. The kernel programs keep translating afterwards.
///
/// # Errors
///
/// Returns the error that ended the agent, with its chain of causes.
pub async fn run(config: Config) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    tokio::select! {
        ended = serve(config) => ended,
        _ = terminate.recv() => { info!("stopped by SIGTERM: the kernel programs keep translating packets"); Ok(()) }
        _ = interrupt.recv() => { info!("stopped by SIGINT: the kernel programs keep translating packets"); Ok(()) }
    }
}

async fn serve(config: Config) -> anyhow::Result<()> {
    info!(?config, "configuration");
    let Config {
        node_name,
        kubeconfig,
        settings,
        devices,
        forwarding,
        network_policy,
        attach,
        annotation_keys,
        service_selector,
        resync,
        bpffs,
        max_flows,
        cgroup,
        local_clients: client_scope,
        guard,
        runtime_dir,
        listen,
        metrics_listen,
        service_metrics,
    } = config;
    // The agent's lock is a directory of the BPF file system, so the agent checks first that this file system is
    // mounted.
    preflight::check(&bpffs)?;
    let _lock = lock::take(&bpffs)?;
    limits::raise_open_files(&settings);
    warn_of(&settings);
    let servers = Servers::bind(listen, metrics_listen).await?;
    let health = Health::new();
    let service_meter = (service_metrics > 0).then(|| ServiceMeter::new(service_metrics));
    let counters = PinnedCounters { bpffs: bpffs.clone(), service_meter: service_meter.clone() };
    let metrics = Metrics::new(Arc::new(counters));
    let port_range = settings.port_range;
    let namespaces = settings.namespaces.clone();
    let state = PlannerState::new(settings);
    // The metrics of mappings and ports are set before the first op. If they were set later, these metrics would be
    // absent on a Node without mappings, and alerts on missing or exhausted ports would not work there.
    ChangeLog::count(&state, &metrics);
    // The watches start before the programs are loaded, so that the API server answers while the kernel verifies the
    // programs.
    let (sender, changes) = mpsc::channel(QUEUE);
    let (contacts, confinement) = (WatchContacts::new(&namespaces), ConfinementResult::default());
    let watched = WatchedObjects { node_name: node_name.clone(), namespaces, service_selector };
    let mut connecting =
        kube::connect_and_watch(kubeconfig, watched, &annotation_keys, &metrics, &contacts, &confinement, sender);
    let (introspection, local_socket) = open_local_socket(runtime_dir, contacts, confinement, &node_name);
    let mut datapath = Datapath::open_sized(&bpffs, max_flows)?;
    let seed = random_seed()?;
    datapath.configure(port_range, || seed)?;
    datapath.hooks.prepare(forwarding)?;
    #[cfg(feature = "trace")]
    datapath.hooks.print_logs()?;
    log_start(&node_name, port_range, datapath.hooks.mechanism(), forwarding);
    let (problems, seen_problems) = latest::channel(Vec::new());
    let mut change_log = ChangeLog::new(problems);
    let local_clients = LocalClients::new(cgroup, client_scope);
    change_log.log_local_clients(&local_clients.serve(&mut datapath));
    let _sweeper = Sweeper::start(&bpffs, metrics.clone())?;

    let servers = tokio::spawn(servers.serve(health.clone(), metrics.clone()));
    let network = netlink::changes(needs_attachments(&datapath, forwarding))?;
    let work = async {
        let connected = connecting.join_next().await.context("connect to the API server")?;
        let (client, refusal, mut watches) = connected.context("connect to the API server")??;
        let patcher = PodPatcher::new(client.clone(), annotation_keys.clone(), metrics.clone());
        let guard_thread = Guard::start(guard, port_range, resync, datapath.repairs.clone());
        let executor = Executor::new(datapath, patcher, guard_thread, port_range);
        let recorder = Recorder::new(client, &node_name, metrics.clone());
        let listeners = Listeners { metrics, health: health.clone(), change_log, introspection, service_meter };
        let uplinks = Uplinks::new(devices, (forwarding, network_policy), attach, guard);
        let targets = ProgramTargets { uplinks, local_clients };
        let reconciler = Reconciler::new(state, executor, targets, listeners, resync);
        tokio::select! {
            ended = reconciler.run(changes, network) => { ended?; retire(&bpffs, &health).await?; stand_by(&health).await }
            refused = refusal => Err(refused.into()),
            () = recorder.run(seen_problems) => bail!("the recorder of Events ended"),
            ended = watches.join_next() => bail!("a watch of the API server ended: {ended:?}"),
        }
    };
    tokio::select! {
        ended = work => ended,
        ended = servers => ended.context("serve probes and metrics")?.context("serve probes and metrics"),
        ended = local_socket => match ended.context("serve the local socket")? {},
    }
}

fn log_start(node: &str, port_range: PortRange, hooks: &'static str, forwarding: Forwarding) {
    info!(
        version = env!("CARGO_PKG_VERSION"),
        abi = ABI_VERSION,
        node,
        %port_range,
        hooks,
        forwarding = forwarding.as_str(),
        "npl-agent started"
    );
}

/// Logs a warning for each setting that conflicts with a setting of the Node or with the behavior of load balancers.
fn warn_of(settings: &Settings) {
    for warning in port_range_warnings(settings.port_range, ephemeral_ports().as_ref()) {
        warn!(see = pages::url(&pages::of_check("port_range")), "{warning}");
    }
    if let Some(warning) = settings.quarantine_warning() {
        warn!(see = pages::url(pages::WITHDRAWAL), "{warning}");
    }
}

/// Starts to serve the local socket. Returns the introspection, which receives the requests of commands, and the task
/// that serves the socket.
fn open_local_socket(
    runtime_dir: PathBuf,
    contacts: WatchContacts,
    confinement: ConfinementResult,
    node_name: &str,
) -> (Introspection, JoinHandle<Infallible>) {
    let (sender, requests) = mpsc::channel(1);
    let introspection = Introspection::new(requests, contacts, confinement, node_name.to_owned());
    (introspection, tokio::spawn(serve_local_socket(runtime_dir, sender)))
}

/// Serves the local socket. If the socket fails, the agent continues to serve Pods, but commands then show only what
/// they read from the kernel.
async fn serve_local_socket(runtime_dir: PathBuf, requests: mpsc::Sender<local::Request>) -> Infallible {
    let err = match local::bind(&runtime_dir) {
        Ok(listener) => match local::serve(listener, requests).await {
            Err(error) => ErrorChain(&error).to_string(),
            Ok(()) => "the listener was closed".to_owned(),
        },
        Err(error) => ErrorChain(&error).to_string(),
    };
    warn!(
        see = pages::url(pages::LOCAL_SOCKET),
        err,
        "commands such as `npl-agent mappings` cannot read the agent's state and show no names: give --runtime-dir a \
         folder that the agent can write"
    );
    std::future::pending().await
}

/// Completes the retirement of this Node by removing all kernel state of NPL. The annotations and mappings have already
/// been removed.
async fn retire(bpffs: &Path, health: &Health) -> anyhow::Result<()> {
    let (removed, errors) = cleanup::remove_everything(bpffs).await;
    if let Some(error) = errors.into_iter().next() {
        return Err(error).context("remove all kernel state of NPL");
    }
    info!(
        removed = removed.len(),
        "retired: no kernel state of NPL is left on this Node; the agent can be uninstalled"
    );
    health.set_retired();
    Ok(())
}

/// Keeps the retired agent alive and ready until its Pod is deleted.
async fn stand_by(health: &Health) -> ! {
    loop {
        health.beat();
        sleep(HEARTBEAT).await;
    }
}

/// The ephemeral port range of this network namespace.
fn ephemeral_ports() -> Option<EphemeralPorts> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    let reserved = fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports").unwrap_or_default();
    EphemeralPorts::parse(&range, &reserved)
}

/// A seed for the hashes of the kernel programs. The seed must be unpredictable, because a client that knew the seed
/// could send flows that all use the same slot of a cache.
fn random_seed() -> anyhow::Result<u64> {
    let mut bytes = [0; size_of::<u64>()];
    SystemRandom::new().fill(&mut bytes).ok().context("read random bytes from the kernel for the hash seed")?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Opens the pinned maps and reads the counters at each scrape of the metrics.
#[derive(Debug)]
struct PinnedCounters {
    bpffs: PathBuf,
    service_meter: Option<ServiceMeter>,
}

impl DatapathCounters for PinnedCounters {
    fn read(&self) -> Counts {
        let Ok(tables) = Tables::open(&Pins::new(&self.bpffs)) else { return Counts::default() };
        let reasons = tables.reasons().unwrap_or_default();
        let totals = |family| tables.totals(family).map(|stats| FamilyTotals { family, stats });
        let services = self.service_meter.as_ref().map(|meter| meter.read(&tables).unwrap_or_default());
        Counts {
            services,
            reasons: reasons.into_iter().map(|(reason, count)| (reason.name(), count)).collect(),
            totals: Family::ALL.into_iter().flat_map(totals).collect(),
        }
    }
}
