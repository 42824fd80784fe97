// SPDX-License-Identifier: Apache-2.0
//! Maintains the nftables table `inet npl`, which exempts replies of mapped Pod endpoints from masquerading, marks
//! connections for reply routing, and drops forwarded packets that forge a node port as their source.
//!
//! NPL translates a request before kernel conntrack tracks the request, so the kernel's conntrack entry is for a
//! connection from the client to the Pod. After this entry has timed out, the Pod's next packet creates an entry for a
//! connection from the Pod to the client. A masquerade rule for packets that leave Pods matches the packet, and
//! replaces the packet's source address and port by a node address and a port that kernel conntrack chooses. The client
//! knows no connection with this port, and rejects the packet. The chain `replies` runs before masquerade rules and
//! keeps the source address and port. See design note 15 in `docs/design/`.
//!
//! Some CNIs mark connections to a Node address, so that replies of a Pod with its own policy route leave through the
//! Node's uplink. A CNI does not mark a request that NPL has translated, because the destination of the request is then
//! a Pod address. The chain `requests` sets the CNI's mark for translated requests. See design note 21 in
//! `docs/design/`.
//!
//! The egress program takes a packet from a node port for a packet of a host connection, and then passes the answers of
//! the remote host to the host. The chain `forwarded` drops packets by which a Pod or host could forge a host connection.
//! See design note 19 in `docs/design/`.

mod forward;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod legacy;
mod names;
mod rules;
mod table;
mod translated;
mod uapi;
mod wire;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tracing::{info, warn};

use self::{
    table::{Content, Dropped, PodEndpoint},
    wire::Connection,
};
use crate::core::{
    devices::{forged_sources::ForgedSources, reply_routing::Marking},
    doctor::{Masquerading, forward_chains::ForwardChains},
    model::{Backend, Family, Frontend, last::Last, settings::PortRange},
    networks::RuleNames,
    op::Op,
    pages,
    repairs::{RepairJournal, RepairedObject},
};

pub use self::translated::{ConnectionKey, connection_traffic, translated_connections};

/// The time after which the agent tries again to change the table, if the kernel has rejected a change.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// Whether the agent maintains NPL's nftables table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GuardMode {
    /// The table is maintained if the Node has source NAT rules, if reply routing needs connection marks, or if there are
    /// IPv6 mappings.
    #[default]
    Auto,
    /// The table is always maintained.
    On,
    /// The table is not maintained, and an existing table is removed.
    Off,
}

impl GuardMode {
    /// Why the agent does not maintain the table, for the log.
    const fn why_no_table(self) -> &'static str {
        match self {
            Self::Off => "--nft-guard is off",
            Self::Auto | Self::On => {
                "the Node has no source NAT rules, reply routing needs no marks, and there are no IPv6 mappings"
            }
        }
    }
}

/// The handle of the thread that maintains the table. A separate thread is necessary, because the agent's nftables
/// transaction waits while other software writes, for example, ten thousand rules in one transaction. Dropping the
/// handle ends the thread and keeps the table.
#[derive(Debug)]
pub struct Guard {
    updates: Option<Sender<Update>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Update {
    /// All mappings, which replace the mappings of earlier updates.
    All(BTreeMap<Frontend, PodEndpoint>),
    /// One mapping: with its endpoint if the mapping was written, and with `None` if it was removed.
    One(Frontend, Option<PodEndpoint>),
    /// All connection marks that the table must set, and the forged sources of packets that the table must drop.
    Network(BTreeSet<Marking>, ForgedSources),
}

impl Guard {
    /// Starts the thread. After a change of mappings, the thread updates the elements of the table's sets. After a
    /// change of connection marks or of forged sources, and once per `resync`, the thread compares the whole table with
    /// the wanted content and corrects the table. A correction of other software's change is recorded in `repairs`.
    /// `range` is the node port range.
    pub fn start(mode: GuardMode, range: PortRange, resync: Duration, repairs: RepairJournal) -> Self {
        let (updates, receiver) = mpsc::channel();
        let worker = Worker {
            mode,
            range,
            mapped: BTreeMap::new(),
            network: None,
            installed: None,
            own: None,
            repairs,
            was_needed: false,
            is_failing: Last::default(),
            keeps_sources: Last::default(),
            marked: Last::default(),
            drops_forged: Last::default(),
        };
        let thread = thread::Builder::new().name("guard".to_owned()).spawn(move || worker.run(&receiver, resync));
        if let Err(error) = &thread {
            warn!(
                see = pages::url(&pages::of_check("nft_guard")),
                err = %error,
                "cannot start the thread for the nftables table {TABLE}: replies may be masqueraded after their kernel \
                 conntrack entry has timed out; raise the limit of threads and restart the agent"
            );
        }
        Self { updates: Some(updates), thread: thread.ok() }
    }

    /// Passes all mappings of the datapath to the thread that maintains the table.
    pub fn observe(&self, mappings: &BTreeMap<Frontend, Backend>) {
        let mapped = mappings.iter().map(|(frontend, backend)| (*frontend, endpoint(*frontend, backend)));
        self.send(Update::All(mapped.collect()));
    }

    /// If the operation `op` wrote or removed a mapping, passes the mapping to the thread that maintains the table.
    pub fn record(&self, op: &Op) {
        match op {
            Op::UpsertMapping(frontend, backend) => {
                self.send(Update::One(*frontend, Some(endpoint(*frontend, backend))));
            }
            Op::RemoveMapping(frontend) => self.send(Update::One(*frontend, None)),
            Op::Reserve(..) | Op::AllowSources(..) | Op::WritePod { .. } | Op::ForgetSources(..) | Op::Release(_) => {}
        }
    }

    /// Passes the wanted connection marks and the forged sources to the thread that maintains the table. Until the first
    /// call, the thread keeps the table's present rules for both.
    pub fn follow_network(&self, markings: &BTreeSet<Marking>, forged: &ForgedSources) {
        self.send(Update::Network(markings.clone(), forged.clone()));
    }

    fn send(&self, update: Update) {
        // The error is ignored: it means that the thread could not be started, and the agent has logged that failure as
        // a warning.
        drop(self.updates.as_ref().map(|thread| thread.send(update)));
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.updates = None;
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// The family and name of NPL's table, as `nft` shows them.
pub const TABLE: &str = "inet npl";

/// Removes the table. Returns whether the table existed.
///
/// # Errors
///
/// If the kernel returns an error.
pub fn remove() -> io::Result<bool> {
    table::remove(&Connection::open()?)
}

/// Returns whether the table exists; `false` if the kernel has no nftables.
///
/// # Errors
///
/// If the kernel returns an error.
pub fn exists() -> io::Result<bool> {
    table::exists()
}

/// The effects of NPL's nftables table, as read from the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableState {
    /// Number of Pod endpoints that are exempt from masquerading; `None` if the table is absent, incomplete, or only
    /// marks connections.
    pub guarded: Option<usize>,
    /// The connection marks that the table sets.
    pub markings: BTreeSet<Marking>,
    /// Whether the table drops forwarded IPv6 packets with a node address and a node port as source.
    pub drops_forged: bool,
}

/// Reads the table from the kernel.
///
/// # Errors
///
/// If the kernel returns an error.
pub fn read_state() -> io::Result<TableState> {
    let read = Connection::open().and_then(|connection| table::read(&connection));
    let Some(Content { endpoints, keeps_sources, markings, dropped }) = table::if_known(read)?.flatten() else {
        return Ok(TableState::default());
    };
    let guarded = keeps_sources.then_some(endpoints.len());
    Ok(TableState { guarded, markings, drops_forged: dropped.is_some() })
}

/// Returns whether other software on the Node may masquerade, because it has source NAT chains or a legacy `nat` table,
/// and whether NPL's table exempts replies from masquerading.
///
/// # Errors
///
/// If the kernel returns an error.
pub fn masquerading(table: &TableState) -> io::Result<Masquerading> {
    let has_source_nat = table::has_foreign_source_nat()?;
    Ok(Masquerading {
        has_nftables: has_source_nat.is_some(),
        is_done: has_legacy_nat()? || has_source_nat.unwrap_or_default(),
        guarded: table.guarded,
    })
}

/// Reads the names of the tables and chains of nftables, and of the chains of legacy iptables.
///
/// # Errors
///
/// If the kernel returns an error.
pub fn rule_names() -> io::Result<RuleNames> {
    names::read()
}

/// Reads the nftables chains of the Node's firewall that process forwarded packets; empty if the kernel has no
/// nftables. Legacy iptables is only checked for a `filter` table, whose rules are not read.
///
/// # Errors
///
/// If the kernel returns an error.
pub fn forward_chains() -> io::Result<ForwardChains> {
    Ok(ForwardChains { has_legacy_filter: has_legacy_table("filter")?, ..forward::read()? })
}

const fn endpoint(frontend: Frontend, backend: &Backend) -> PodEndpoint {
    PodEndpoint { addr: backend.pod_ip, protocol: frontend.protocol, port: backend.pod_port.0 }
}

/// The state of the thread that maintains the table.
struct Worker {
    mode: GuardMode,
    /// The node port range.
    range: PortRange,
    mapped: BTreeMap<Frontend, PodEndpoint>,
    /// The wanted connection marks, and the forged sources of the Node; `None` until the first survey of the network.
    network: Option<(BTreeSet<Marking>, ForgedSources)>,
    /// The content that the table had after its last successful check or update; `None` if the table does not exist, or
    /// if the last check or update failed.
    installed: Option<Content>,
    /// The content that this agent has written last, even if a later check or update failed. A table with another content
    /// was changed by other software.
    own: Option<Content>,
    repairs: RepairJournal,
    /// Whether the last check found that replies must be exempted from masquerading, for example because the Node has
    /// source NAT rules.
    was_needed: bool,
    /// Whether the last check or update of the table failed. Of several failures in succession, the agent logs only the
    /// first.
    is_failing: Last<bool>,
    /// Whether the table exempts endpoints from masquerading. The agent logs only a change of this value.
    keeps_sources: Last<bool>,
    /// The connection marks that the table sets. The agent logs only a change of these marks.
    marked: Last<BTreeSet<Marking>>,
    /// Whether the table drops packets with forged sources. The agent logs only a change of this value.
    drops_forged: Last<bool>,
}

impl Worker {
    fn run(mut self, updates: &Receiver<Update>, resync: Duration) {
        // The thread changes nothing before the first update, so the table of an earlier agent stays until this agent
        // has its first mappings.
        let Ok(first) = updates.recv() else { return };
        self.apply_update(first);
        let mut due = Instant::now();
        loop {
            let result = match updates.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok(first) => {
                    let former = (self.network.clone(), self.has_v6());
                    std::iter::once(first).chain(updates.try_iter()).for_each(|update| self.apply_update(update));
                    let is_same = (self.network.as_ref(), self.has_v6()) == (former.0.as_ref(), former.1);
                    if is_same { self.update_endpoints() } else { self.verify() }
                }
                Err(RecvTimeoutError::Timeout) => {
                    due = Instant::now() + resync;
                    self.verify()
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            if let Err(err) = &result {
                self.installed = None;
                due = due.min(Instant::now() + RETRY_AFTER);
                if self.is_failing.update(true) {
                    warn!(
                        see = pages::url(&pages::of_check("nft_guard")),
                        %err,
                        "cannot update the nftables table {TABLE}; the agent tries again every {} s. Until an update \
                         succeeds, replies may be masqueraded after their kernel conntrack entry has timed out, and \
                         replies of Pods with their own policy route may leave through another device; check that the \
                         agent has CAP_NET_ADMIN and that no other software locks nftables",
                        RETRY_AFTER.as_secs()
                    );
                }
            }
            if result.is_ok() {
                self.is_failing.update(false);
            }
        }
    }

    fn apply_update(&mut self, update: Update) {
        match update {
            Update::All(mapped) => self.mapped = mapped,
            Update::One(frontend, Some(endpoint)) => drop(self.mapped.insert(frontend, endpoint)),
            Update::One(frontend, None) => drop(self.mapped.remove(&frontend)),
            Update::Network(markings, forged) => self.network = Some((markings, forged)),
        }
    }

    /// Whether a mapping is for IPv6.
    fn has_v6(&self) -> bool {
        self.mapped.keys().any(|frontend| frontend.family == Family::V6)
    }

    /// The wanted connection marks and dropped packets. `found` is the present content of the table.
    fn wanted_rules(&self, found: Option<&Content>) -> (BTreeSet<Marking>, Option<Dropped>) {
        if self.mode == GuardMode::Off {
            return Default::default();
        }
        let Some((markings, forged)) = &self.network else {
            return found.map(|it| (it.markings.clone(), it.dropped.clone())).unwrap_or_default();
        };
        let is_wanted = self.has_v6() && !forged.addresses.is_empty();
        (markings.clone(), is_wanted.then(|| Dropped { range: self.range, sources: forged.clone() }))
    }

    fn endpoints(&self) -> BTreeSet<PodEndpoint> {
        self.mapped.values().copied().collect()
    }

    /// Adds and removes endpoints in the sets of the installed table. Updating the sets is faster than
    /// [`Self::verify`], which reads the whole table.
    fn update_endpoints(&mut self) -> io::Result<()> {
        let wanted = self.endpoints();
        let Some(installed) = self.installed.as_mut().filter(|it| it.endpoints != wanted) else { return Ok(()) };
        table::update(&Connection::open()?, &(&wanted - &installed.endpoints), &(&installed.endpoints - &wanted))?;
        installed.endpoints = wanted;
        self.own.clone_from(&self.installed);
        Ok(())
    }

    /// Reads the table from the kernel and corrects differences from the wanted content, because other software may
    /// have changed the table.
    fn verify(&mut self) -> io::Result<()> {
        let is_needed = self.is_needed()?;
        let connection = match Connection::open() {
            // A kernel without nftables cannot have the table. The missing table is an error only if legacy iptables
            // has a `nat` table, or if the mode is `On`.
            Err(error) if !is_needed && table::is_unknown(&error) => {
                self.installed = None;
                return Ok(());
            }
            opened => opened?,
        };
        // While other software changes its chains, a dump may lack a chain. The exemption is therefore removed only if
        // two consecutive checks find no source NAT rules.
        let keeps_sources = std::mem::replace(&mut self.was_needed, is_needed) || is_needed;
        let read = table::if_known(table::read(&connection))?;
        let has_nftables = read.is_some();
        let found = read.flatten();
        let (markings, dropped) = self.wanted_rules(found.as_ref());
        // A kernel without nftables is no error if the agent needs the table only to drop forged packets: design note 19
        // states what forged packets can do on such a kernel.
        let dropped = dropped.filter(|_| has_nftables);
        if !keeps_sources && markings.is_empty() && dropped.is_none() {
            if table::if_known(table::remove(&connection))?.unwrap_or_default() {
                info!("removed nftables table {TABLE}: {}", self.mode.why_no_table());
            }
            self.log(&Content::default());
            (self.installed, self.own) = (None, None);
            return Ok(());
        }
        let wanted = Content { endpoints: self.endpoints(), keeps_sources, markings, dropped };
        if found.as_ref() != Some(&wanted) {
            table::replace(&connection, &wanted)?;
            self.log(&wanted);
            if self.own.is_some() && found != self.own {
                self.repairs.record(RepairedObject::NftTable, TABLE);
            }
        }
        (self.installed, self.own) = (Some(wanted.clone()), Some(wanted));
        Ok(())
    }

    /// Logs when the table begins to exempt replies from masquerading, to mark connections, or to drop packets.
    fn log(&mut self, content: &Content) {
        if self.keeps_sources.update(content.keeps_sources) && content.keeps_sources {
            let endpoints = content.endpoints.len();
            info!(endpoints, "nftables table {TABLE} exempts replies of mapped endpoints from masquerading");
        }
        if self.marked.update(content.markings.clone())
            && let Some(first) = content.markings.first()
        {
            info!(
                mark = %first.mark,
                "nftables table {TABLE} marks connections to mappings, so that replies leave through the device of \
                 their request"
            );
        }
        if self.drops_forged.update(content.dropped.is_some()) && content.dropped.is_some() {
            info!("nftables table {TABLE} drops forwarded IPv6 packets with a node address and a node port as source");
        }
    }

    fn is_needed(&self) -> io::Result<bool> {
        match self.mode {
            GuardMode::On => Ok(true),
            GuardMode::Off => Ok(false),
            GuardMode::Auto => Ok(has_legacy_nat()? || table::has_foreign_source_nat()?.unwrap_or_default()),
        }
    }
}

fn has_legacy_nat() -> io::Result<bool> {
    has_legacy_table("nat")
}

/// Returns whether legacy iptables has this table for IPv4 or for IPv6. nftables does not list tables of legacy
/// iptables.
fn has_legacy_table(table: &str) -> io::Result<bool> {
    for family in Family::ALL {
        if legacy::tables(family)?.iter().any(|name| name == table) {
            return Ok(true);
        }
    }
    Ok(false)
}
