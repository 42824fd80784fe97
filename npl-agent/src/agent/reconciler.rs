// SPDX-License-Identifier: Apache-2.0
//! The main loop, which owns all state. At each event, the loop applies the changes, and then executes operations until
//! the core returns no operation.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::IpAddr,
    time::{Duration, SystemTime},
};

use futures::{Stream, StreamExt as _};
use tokio::{
    sync::mpsc::Receiver,
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until},
};
use tracing::{debug, info, warn};

use crate::{
    agent::{
        change_log::ChangeLog,
        executor::{Executor, OpError, OpResult, PatchAnswer},
        introspection::{Introspection, device_views},
        service_meter::{MeterUpdates, ServiceMeter},
    },
    core::{
        devices::takeover::served_by_former_only,
        model::{Family, Moment, snapshot::Change},
        op::{Failure, Op, PodWrite, RecentTraffic},
        pages,
        publish::delays::PublishDelays,
        state::PlannerState,
    },
    datapath::{DatapathError, Takeover},
    devices::{
        local_clients::LocalClients,
        uplinks::{FollowError, Uplinks},
    },
    http::Health,
    local::Request,
    metrics::{Metrics, OpOutcome, RemovalCause, RequestProgram, WatchedResource},
    netlink::{self, Survey, SurveyTask},
    process::{error_chain::ErrorChain, memory},
    sockets::ReserveError,
};

/// Delay from the first change of a device or address until the agent surveys the network. Devices and addresses change
/// in bursts, so the delay lets one survey cover a whole burst.
const NETWORK_SETTLES: Duration = Duration::from_millis(50);
/// Minimum time between two surveys of the network. A Node that starts hundreds of Pods creates hundreds of devices;
/// without this limit, each device could cause a survey.
const NETWORK_REST: Duration = Duration::from_millis(500);
/// Time without a change of a watched object after which the agent returns freed memory to the operating system.
const QUIET: Duration = Duration::from_millis(500);
/// The interval at which an idle loop reports to the liveness probe.
pub const HEARTBEAT: Duration = Duration::from_secs(5);
/// Maximum number of passes that the loop makes in succession. If operations are left after these passes, the loop
/// handles waiting events before it continues.
const MOST_ROUNDS: usize = 64;

/// Why the main loop ended with an error.
#[derive(Debug, thiserror::Error)]
pub enum LoopError {
    /// The kernel's BPF maps cannot be read.
    #[error("read the datapath")]
    Datapath(#[from] DatapathError),
    /// The agent cannot list or watch the Node's devices, or cannot write the result to the maps.
    #[error("follow the Node's devices")]
    Devices(#[from] FollowError),
    /// The tasks that watch the API server have ended.
    #[error("the watches of the API server have ended")]
    WatchesEnded,
}

/// The main loop and its state.
#[derive(Debug)]
pub struct Reconciler {
    state: PlannerState,
    executor: Executor,
    uplinks: Uplinks,
    local_clients: LocalClients,
    metrics: Metrics,
    health: Health,
    resync: Duration,
    started: Instant,
    deadline: Option<Moment>,
    network_due: Option<Instant>,
    network_seen: Instant,
    /// The survey of the network that a separate task is making; `None` if no survey is in progress.
    survey: Option<SurveyTask>,
    /// Whether this agent has ever attached programs to a device through which clients reach the Node. While this is
    /// false, no node port is published.
    was_attached: bool,
    /// The names, by ifindex, of the uplinks to which the programs could not be attached after the last survey.
    unattached: BTreeMap<u32, String>,
    /// Whether this agent still has to look for programs and maps of earlier agents. Every resync sets the flag again,
    /// so that the agent tries a failed or postponed removal again.
    has_predecessors: bool,
    /// Whether the routes to the Pods must be looked up again, because Pods or devices may have changed since the last
    /// look-up.
    are_routes_due: bool,
    node_ips: Vec<IpAddr>,
    change_log: ChangeLog,
    /// The Pods whose annotation may not reflect all changes yet, each with the time of the first change that the
    /// annotation does not reflect.
    delays: PublishDelays<Instant>,
    /// When to return freed memory to the operating system; each change from the API server postpones this time.
    quiet_due: Option<Instant>,
    introspection: Introspection,
    services: MeterUpdates,
}

/// The targets to which programs are attached: network devices and a cgroup.
#[derive(Debug)]
pub struct ProgramTargets {
    /// The network devices to which TC and XDP programs are attached.
    pub uplinks: Uplinks,
    /// The cgroup to which the socket programs for local clients are attached.
    pub local_clients: LocalClients,
}

/// The parts of the agent that receive the main loop's state: metrics, HTTP probes, the change log and the local
/// socket.
#[derive(Debug)]
pub struct Listeners {
    /// The Prometheus metrics of the agent.
    pub metrics: Metrics,
    /// The state that the HTTP probes report.
    pub health: Health,
    /// The log, and the Events that report problems.
    pub change_log: ChangeLog,
    /// The requests that commands send to the local socket.
    pub introspection: Introspection,
    /// Measures the traffic of Services; `None` without `--service-metrics`.
    pub service_meter: Option<ServiceMeter>,
}

impl Reconciler {
    /// Creates a main loop, which [`Self::run`] starts.
    pub fn new(
        state: PlannerState,
        executor: Executor,
        targets: ProgramTargets,
        listeners: Listeners,
        resync: Duration,
    ) -> Self {
        let ProgramTargets { uplinks, local_clients } = targets;
        let Listeners { metrics, health, change_log, introspection, service_meter } = listeners;
        Self {
            state,
            executor,
            uplinks,
            local_clients,
            metrics,
            health,
            resync,
            started: Instant::now(),
            deadline: None,
            network_due: None,
            network_seen: Instant::now(),
            survey: None,
            was_attached: false,
            unattached: BTreeMap::new(),
            has_predecessors: true,
            are_routes_due: true,
            node_ips: Vec::new(),
            change_log,
            delays: PublishDelays::default(),
            quiet_due: None,
            introspection,
            services: MeterUpdates::new(service_meter),
        }
    }

    /// Runs until this Node is retired or a [`LoopError`] occurs.
    ///
    /// # Errors
    ///
    /// If the watches end, a BPF map cannot be accessed, or the Node's devices cannot be listed. Dropping the future
    /// stops the loop, but the kernel programs keep translating.
    pub async fn run(
        mut self,
        mut changes: Receiver<Change>,
        mut network: impl Stream<Item = ()> + Unpin,
    ) -> Result<(), LoopError> {
        self.look_at_mappings()?;
        self.services.start(&self.executor.datapath.tables)?;
        let ages = self.executor.datapath.unmapped_ages(self.state.port_range())?;
        let now = self.now();
        self.state.resume_quarantine(ages.into_iter().map(|(node_port, age)| (node_port, millis(age))), now);
        self.look_at_network().await?;
        let mut resync = interval(self.resync);
        resync.set_missed_tick_behavior(MissedTickBehavior::Delay);
        resync.reset();
        let mut heartbeat = interval(HEARTBEAT);
        loop {
            let deadline = self.deadline.map(|at| self.instant(at));
            let (network_due, quiet_due, services_due) = (self.network_due, self.quiet_due, self.services.due());
            tokio::select! {
                change = changes.recv() => {
                    let Some(change) = change else { return Err(LoopError::WatchesEnded) };
                    self.take_in(change, &mut changes);
                }
                answer = self.executor.next_answer() => self.handle_answer(answer),
                request = self.introspection.next_request() => self.answer(request),
                Some(()) = network.next() => self.look_at_network_soon(),
                () = until(network_due), if self.survey.is_none() => self.begin_survey(),
                found = end_of(&mut self.survey) => drop(self.take_in_survey(found)?),
                () = until(deadline) => {}
                () = until(services_due) => self.services.update(&self.state, &self.executor.datapath.tables)?,
                () = until(quiet_due) => self.give_memory_back(),
                _ = resync.tick() => self.look_again()?,
                _ = heartbeat.tick() => {}
            }
            // The Node's addresses decide which devices are uplinks. A change of the addresses is handled before
            // `settle`, so that the programs are attached to new uplinks before node ports are published.
            self.follow_node_addresses().await?;
            self.follow_pod_routes().await?;
            // A retiring agent publishes nothing, so the agent does not wait until programs are attached to a device.
            if self.was_attached || self.state.is_retiring() {
                self.settle()?;
                if self.uplinks.are_out_of_date(&self.executor.datapath) {
                    self.look_at_network_soon();
                }
            }
            let repairs = self.executor.datapath.repairs.take();
            self.change_log.log_repairs(repairs, &self.metrics, self.now());
            self.health.beat();
            if self.state.is_retired() {
                return Ok(());
            }
        }
    }

    /// Applies a change and all changes that are queued after it, so that one pass handles a burst of changes.
    fn take_in(&mut self, first: Change, changes: &mut Receiver<Change>) {
        for change in std::iter::once(first).chain(std::iter::from_fn(|| changes.try_recv().ok())) {
            self.metrics.observe_watch_change(subject(&change), wall_clock());
            self.state.apply(change);
        }
        self.are_routes_due = true;
        self.delays.begin(self.state.changed_pods(), Instant::now());
        self.services.update_soon();
        self.quiet_due = Some(Instant::now() + QUIET);
    }

    /// Reads the state of the kernel and of the sockets at every resync, so that the next pass corrects differences
    /// from the desired state.
    fn look_again(&mut self) -> Result<(), LoopError> {
        self.executor.datapath.check_pins()?;
        self.look_at_mappings()?;
        self.look_at_network_soon();
        self.has_predecessors = true;
        self.executor.forget_other_pods(|| self.state.pod_uids());
        let served = self.local_clients.serve(&mut self.executor.datapath);
        self.change_log.log_local_clients(&served);
        // On a busy Node, each change postpones the return of freed memory, so freed memory is also returned at each
        // resync.
        if self.quiet_due.is_some() {
            self.give_memory_back();
        }
        Ok(())
    }

    fn give_memory_back(&mut self) {
        self.quiet_due = None;
        memory::give_back();
    }

    /// Handles the API server's answer to a patch.
    fn handle_answer(&mut self, (op, result): PatchAnswer) {
        match result {
            Ok(patched) => {
                // The answer contains the patched Pod. The core ignores a later watch event with the same version of
                // the Pod.
                self.state.apply(Change::Pod(patched.pod));
                self.are_routes_due = true;
                self.record_success(&op);
            }
            Err(error) => self.record_failure(&op, &OpError::Patch(error)),
        }
    }

    /// Executes operations until the core returns no operation, because nothing is left to do, or because the remaining
    /// operations wait for an answer of the API server or for a timer. Makes at most [`MOST_ROUNDS`] passes; the loop
    /// continues with the remaining operations after it has handled waiting events.
    fn settle(&mut self) -> Result<(), LoopError> {
        let began = Instant::now();
        let mut done = 0_usize;
        let mut is_clean = true;
        let mut is_unsure = false;
        let mut is_settled = false;
        for _ in 0..MOST_ROUNDS {
            let pass = self.state.pass(self.now());
            self.deadline = pass.next_deadline;
            if pass.ops.is_empty() {
                is_settled = true;
                break;
            }
            done += pass.ops.len();
            for (op, outcome) in pass.ops.iter().zip(self.execute(&pass.ops)?) {
                match outcome {
                    Ok(Some(())) => self.record_success(op),
                    Ok(None) => {}
                    Err(error) => {
                        is_clean = false;
                        is_unsure |= matches!(op, Op::AllowSources(..) | Op::ForgetSources(..));
                        self.record_failure(op, &error);
                    }
                }
            }
            if mem::take(&mut is_unsure) {
                // An op with several source ranges may fail after it has written some of the ranges, so the kernel's
                // state is read again.
                self.state.observe(self.executor.observe()?);
            }
        }
        if !is_settled {
            self.deadline = Some(self.now());
        }
        let purged = self.executor.purge_flows()?;
        Family::ALL.into_iter().zip(purged).for_each(|(family, count)| {
            self.metrics.count_removed_flows(family, RemovalCause::MappingRemoved, count as u64);
        });
        if done > 0 {
            debug!(ops = done, elapsed_ms = began.elapsed().as_millis(), "pass completed");
            ChangeLog::count(&self.state, &self.metrics);
            self.services.update_soon();
        }
        self.delays.retain(|pod| self.state.awaits_publication(pod));
        self.metrics.set_pending_patches(self.executor.pending_writes());
        let finished = is_clean.then(wall_clock);
        self.metrics.observe_pass(began.elapsed(), finished);
        self.change_log.log_readiness(&self.state);
        self.change_log.log_retirement(&self.state);
        self.change_log.log_problems(&self.state, &self.metrics, self.now());
        if self.state.is_ready() && !self.state.is_retiring() {
            self.health.set_synced();
            if is_settled && is_clean {
                self.remove_predecessors();
            }
        }
        Ok(())
    }

    fn execute(&mut self, ops: &[Op]) -> Result<Vec<OpResult>, LoopError> {
        let _meter_lock = self.services.lock_before(ops, &self.executor.datapath.tables)?;
        Ok(self.executor.execute(ops))
    }

    /// Removes the programs and maps of earlier agents, once this agent's programs are attached to every device that
    /// the earlier programs serve. If only an earlier agent's programs serve a device, the agent tries again at the
    /// next resync. The heartbeat ensures that this function is called again when the removal is due.
    fn remove_predecessors(&mut self) {
        let now = Instant::now().into_std();
        if self.executor.datapath.awaits_replies(now) || !mem::take(&mut self.has_predecessors) {
            return;
        }
        let datapath = &mut self.executor.datapath;
        let removed = datapath.predecessor_devices().and_then(|former| {
            let kept_on = served_by_former_only(&self.unattached, &former);
            self.change_log.log_kept_predecessors(&kept_on);
            self.introspection.former_programs_on = kept_on.into_iter().collect();
            if self.introspection.former_programs_on.is_empty() {
                datapath.remove_predecessors(now)
            } else {
                Ok(Takeover::Complete(Vec::new()))
            }
        });
        match removed {
            Ok(Takeover::Complete(versions)) if versions.is_empty() => {}
            Ok(Takeover::Complete(versions)) => {
                info!(?versions, "removed the programs and maps of other ABI versions");
            }
            Ok(Takeover::AwaitsReplies { until: _ }) => {
                self.has_predecessors = true;
                info!("detached the programs of other ABI versions that translate requests");
                // The XDP programs of other versions may have prevented this agent's XDP program from being attached.
                // The next survey of the network tries to attach this agent's XDP program again.
                self.look_at_network_soon();
            }
            Err(error) => warn!(
                see = pages::url(pages::ABI_UPGRADE),
                err = %ErrorChain(&error),
                "cannot remove the programs and maps of other ABI versions, which may translate withdrawn mappings; the \
                 agent tries again at the next resync"
            ),
        }
    }

    fn record_success(&mut self, op: &Op) {
        self.executor.record_success(op, &self.state);
        self.state.record_done(op, self.now());
        if let Op::WritePod { pod, value: PodWrite::Set(_) | PodWrite::Withdraw, .. } = op
            && let Some(since) = self.delays.confirm(pod)
        {
            self.metrics.observe_publication(since.elapsed());
        }
        self.metrics.count_op(op, OpOutcome::Done);
    }

    fn record_failure(&mut self, op: &Op, error: &OpError) {
        let wait = self.executor.back_off(op, error);
        let (failure, outcome) = match error {
            OpError::Reserve(ReserveError::Taken(_)) => (Failure::PortTaken, OpOutcome::PortTaken),
            OpError::RecentTraffic { wait, .. } => {
                let until = self.now().plus(millis(*wait));
                (Failure::RecentTraffic { until }, OpOutcome::RecentTraffic)
            }
            OpError::Patch(patch) if patch.class() == crate::kube::patch::Class::Gone => {
                (Failure::Gone, OpOutcome::Gone)
            }
            OpError::Reserve(_) | OpError::Patch(_) | OpError::Datapath(_) => {
                let at = self.now().plus(millis(wait));
                let is_full = matches!(error, OpError::Datapath(error) if error.is_full());
                (if is_full { Failure::NoRoom { at } } else { Failure::Retry { at } }, OpOutcome::Retry)
            }
        };
        match outcome {
            OpOutcome::Retry => self.change_log.log_retry(op, error, wait, self.now()),
            // A node port that is reserved in spite of recent traffic usually is in the Pod's annotation already,
            // because an earlier agent of NPL, or Antrea's agent, has published it.
            OpOutcome::PortTaken if matches!(op, Op::Reserve(_, RecentTraffic::Tolerated)) => {
                self.change_log.log_taken(op, error, self.now());
            }
            OpOutcome::PortTaken | OpOutcome::RecentTraffic | OpOutcome::Gone | OpOutcome::Done => {
                debug!(err = %ErrorChain(error), "operation abandoned; the agent plans another operation");
            }
        }
        self.metrics.count_op(op, outcome);
        self.state.record_failed(op, failure, self.now());
    }

    /// Reads the mappings in the kernel's maps and the node ports that sockets reserve, and passes both to the core.
    fn look_at_mappings(&mut self) -> Result<(), LoopError> {
        let observed = self.executor.observe()?;
        self.state.observe(observed);
        Ok(())
    }

    fn look_at_network_soon(&mut self) {
        let due = (Instant::now() + NETWORK_SETTLES).max(self.network_seen + NETWORK_REST);
        self.look_at_network_by(due);
    }

    fn look_at_network_by(&mut self, due: Instant) {
        self.network_due = Some(self.network_due.map_or(due, |planned| planned.min(due)));
    }

    fn begin_survey(&mut self) {
        self.network_due = None;
        self.survey = Some(self.uplinks.survey(&self.executor.datapath, self.state.pod_addresses()));
    }

    /// Surveys the network before the loop continues. A survey that is already in progress may miss recent changes, so
    /// its result is discarded and another survey follows.
    async fn look_at_network(&mut self) -> Result<(), LoopError> {
        if self.survey.is_some() {
            drop(end_of(&mut self.survey).await);
        }
        loop {
            self.begin_survey();
            let found = end_of(&mut self.survey).await;
            if self.take_in_survey(found)? {
                return Ok(());
            }
            self.health.beat();
            sleep(NETWORK_REST).await;
        }
    }

    /// Applies a survey and returns true. If the network changed during the survey, applies nothing, schedules another
    /// survey and returns false.
    fn take_in_survey(&mut self, found: Result<Survey, FollowError>) -> Result<bool, LoopError> {
        self.network_seen = Instant::now();
        self.network_due = self.network_due.map(|due| due.max(self.network_seen + NETWORK_REST));
        let survey = match found {
            Err(error) if error.is_change() => {
                debug!(
                    err = %ErrorChain(&error),
                    "devices, addresses or routes changed while the agent listed them; the agent lists them again"
                );
                self.look_at_network_soon();
                return Ok(false);
            }
            found => found?,
        };
        let now = self.now();
        let report = self.uplinks.apply(&mut self.executor.datapath, survey, &self.node_ips, now)?;
        let (coverage, reaches_clients) = (report.coverage, report.reaches_clients);
        self.unattached.clone_from(&report.unattached);
        self.are_routes_due = true;
        self.introspection.devices = device_views(&report);
        self.introspection.reaches_clients = reaches_clients;
        let are_filters = self.executor.datapath.hooks.are_filters();
        let programs = report.xdp.iter().map(|(device, xdp)| (device.clone(), xdp.is_ok()));
        self.metrics
            .set_request_programs(programs.map(|(device, has_xdp)| (device, RequestProgram::of(has_xdp, are_filters))));
        self.metrics.set_redirect_refused(report.decisions.redirect_refused_by.is_some());
        self.metrics.set_programs_ahead(report.decisions.programs_ahead.values().map(BTreeSet::len).sum());
        self.change_log.log_devices(report);
        self.executor.guard.follow_network(self.uplinks.markings(), self.uplinks.forged_sources());
        if let Some(at) = self.uplinks.next_deadline() {
            self.look_at_network_by(self.instant(at));
        }
        self.metrics.set_devices(coverage);
        // One device with programs is sufficient for publication, so that a device on which attaching always fails does
        // not prevent publication. Tunnels to other Nodes do not count, because no client uses them.
        self.was_attached |= reaches_clients;
        self.health.set_attached(reaches_clients);
        Ok(true)
    }

    /// Surveys the network if the Node's published addresses have changed.
    async fn follow_node_addresses(&mut self) -> Result<(), LoopError> {
        let now: Vec<IpAddr> = self.state.node_ips().collect();
        if now == self.node_ips {
            return Ok(());
        }
        info!(addresses = ?now, "the Node's published addresses have changed");
        self.node_ips = now;
        self.look_at_network().await
    }

    /// Looks up the routes to new Pods, and reports to the core the Pods that are on the Node's own network, because
    /// the ports of these Pods are not published.
    async fn follow_pod_routes(&mut self) -> Result<(), LoopError> {
        if !mem::take(&mut self.are_routes_due) {
            return Ok(());
        }
        let found = self.uplinks.pods_on_node_network(&self.state.pod_addresses()).await?;
        self.state.set_pods_on_node_network(found);
        Ok(())
    }

    /// Answers a request that a command has sent to the local socket.
    fn answer(&self, request: Request) {
        let now = self.now();
        self.introspection.answer(request, &self.state, &self.health, now, self.executor.pending_writes());
    }

    fn instant(&self, moment: Moment) -> Instant {
        self.started + Duration::from_millis(moment.0)
    }

    fn now(&self) -> Moment {
        Moment(millis(self.started.elapsed()))
    }
}

/// Waits for the survey that is in progress. If no survey is in progress, the future stays pending. Dropping the future
/// does not lose the survey's result.
async fn end_of(survey: &mut Option<SurveyTask>) -> Result<Survey, FollowError> {
    let Some(in_flight) = survey else { return std::future::pending().await };
    let found = netlink::join_survey(in_flight).await;
    *survey = None;
    Ok(found?)
}

/// Waits until the time `at`. If `at` is `None`, the future stays pending.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[expect(clippy::disallowed_methods, reason = "metrics show the wall-clock time, and no decision depends on that time")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

const fn subject(change: &Change) -> WatchedResource {
    match change {
        Change::StoreRestored | Change::Pods(_) | Change::Pod(_) | Change::PodGone(..) => WatchedResource::Pods,
        Change::Services(..) | Change::Service(_) | Change::ServiceGone(_) => WatchedResource::Services,
        Change::Node(_) | Change::NodeGone => WatchedResource::Node,
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
