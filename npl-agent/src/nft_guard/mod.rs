// SPDX-License-Identifier: Apache-2.0
//! The nftables guard: a table that exempts replies of mapped endpoints from masquerading, and marks connections to
//! mappings where policy routing needs that.
//!
//! The kernel's conntrack sees a connection between client and Pod. Once it has timed the connection out, the Pod's
//! next packet begins a new one from Pod to client. A masquerade rule for packets that leave the cluster then
//! translates its source, and the client rejects it. A chain ahead of all such rules keeps the source of packets from
//! mapped endpoints. See design note 15.
//!
//! A CNI with several interfaces marks connections to the Node, so that replies leave by the interface of the request.
//! It does not recognize a translated request as one to the Node. A second chain sets the mark. See design note 21.

mod rules;
mod table;
mod uapi;
mod wire;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tracing::{info, warn};

use self::{
    table::{Content, PodEndpoint},
    wire::Connection,
};
use crate::core::{
    devices::reply_routing::Marking,
    doctor::Masquerading,
    model::{Backend, Frontend, last::Last},
    op::Op,
};

/// The delay before a retry.
const AGAIN: Duration = Duration::from_secs(5);
/// NAT tables of legacy iptables, which nftables does not list.
const LEGACY_TABLES: [&str; 2] = ["/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"];

/// `--nft-guard`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GuardMode {
    /// If a rule masquerades, or a rule of policy routing evaluates a mark.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// The guard, on a thread of its own: a transaction of nftables waits for those of other programs, which may write ten
/// thousand rules. Dropping the guard keeps the table.
#[derive(Debug)]
pub struct Guard {
    updates: Option<Sender<Update>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Update {
    /// All mappings.
    All(BTreeMap<Frontend, PodEndpoint>),
    /// One mapping that was written or removed.
    One(Frontend, Option<PodEndpoint>),
    /// The connections to mark.
    Markings(BTreeSet<Marking>),
}

impl Guard {
    /// Starts the guard. It compares the table with the desired one every `resync`.
    pub fn start(mode: GuardMode, resync: Duration) -> Self {
        let (updates, receiver) = mpsc::channel();
        let worker = Worker {
            mode,
            mapped: BTreeMap::new(),
            markings: None,
            held: None,
            was_needed: false,
            failing: Last::default(),
            keeps_sources: Last::default(),
            marked: Last::default(),
        };
        let thread = thread::Builder::new().name("guard".to_owned()).spawn(move || worker.run(&receiver, resync));
        if let Err(error) = &thread {
            warn!(err = %error, "the nftables guard's thread cannot be started: replies of timed-out connections \
                                 may be masqueraded");
        }
        Self { updates: Some(updates), thread: thread.ok() }
    }

    /// Replaces all mappings.
    pub fn observe(&self, mappings: &BTreeMap<Frontend, Backend>) {
        let mapped = mappings.iter().map(|(frontend, backend)| (*frontend, endpoint(*frontend, backend)));
        self.tell(Update::All(mapped.collect()));
    }

    /// Records an operation that was carried out.
    pub fn record(&self, op: &Op) {
        match op {
            Op::UpsertMapping(frontend, backend) => {
                self.tell(Update::One(*frontend, Some(endpoint(*frontend, backend))));
            }
            Op::RemoveMapping(frontend) => self.tell(Update::One(*frontend, None)),
            Op::Reserve(..) | Op::AllowSources(..) | Op::WritePod { .. } | Op::ForgetSources(..) | Op::Release(_) => {}
        }
    }

    /// Replaces the connections to mark. Before the first call, the existing table keeps its marks.
    pub fn mark(&self, markings: &BTreeSet<Marking>) {
        self.tell(Update::Markings(markings.clone()));
    }

    fn tell(&self, updates: Update) {
        // Without a thread, updates are dropped.
        drop(self.updates.as_ref().map(|listener| listener.send(updates)));
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

/// The table's name as `nft` prints it.
pub const TABLE: &str = "inet npl";

/// Removes the table, and returns whether it existed.
///
/// # Errors
///
/// The kernel's refusal.
pub fn remove() -> io::Result<bool> {
    table::remove(&Connection::open()?)
}

/// The state of the table in the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableState {
    /// The number of endpoints that are exempted from masquerading; `None` if there is no complete table.
    pub guarded: Option<usize>,
    /// The connections that are marked.
    pub markings: BTreeSet<Marking>,
}

/// Reads the table.
///
/// # Errors
///
/// The kernel's refusal.
pub fn read_state() -> io::Result<TableState> {
    let read = Connection::open().and_then(|connection| table::read(&connection));
    let Some(Content { endpoints, keeps_sources, markings }) = table::if_known(read)?.flatten() else {
        return Ok(TableState::default());
    };
    Ok(TableState { guarded: keeps_sources.then_some(endpoints.len()), markings })
}

/// Whether a guard is needed here, and whether nftables is available.
///
/// # Errors
///
/// The kernel's refusal.
pub fn look(held: &TableState) -> io::Result<Masquerading> {
    let others = table::others_translate()?;
    Ok(Masquerading {
        has_nftables: others.is_some(),
        is_done: has_legacy_nat() || others.unwrap_or_default(),
        guarded: held.guarded,
    })
}

const fn endpoint(frontend: Frontend, backend: &Backend) -> PodEndpoint {
    PodEndpoint { addr: backend.pod_ip, protocol: frontend.protocol, port: backend.pod_port.0 }
}

/// The state of the thread.
struct Worker {
    mode: GuardMode,
    mapped: BTreeMap<Frontend, PodEndpoint>,
    /// The connections to mark; `None` before the first survey.
    markings: Option<BTreeSet<Marking>>,
    /// The content that the table was last known to have; `None` if it is not known.
    held: Option<Content>,
    /// Whether a masquerade rule existed at the last check.
    was_needed: bool,
    /// Whether the table could not be written.
    failing: Last<bool>,
    /// Whether the table exempts endpoints from masquerading.
    keeps_sources: Last<bool>,
    /// The connections that the table marks.
    marked: Last<BTreeSet<Marking>>,
}

impl Worker {
    fn run(mut self, updates: &Receiver<Update>, resync: Duration) {
        // The table of the last agent stays until this one knows the mappings.
        let Ok(first) = updates.recv() else { return };
        self.take_in(first);
        let mut due = Instant::now();
        loop {
            let result = match updates.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok(first) => {
                    let former = self.markings.clone();
                    std::iter::once(first).chain(updates.try_iter()).for_each(|updates| self.take_in(updates));
                    if self.markings == former { self.follow() } else { self.verify() }
                }
                Err(RecvTimeoutError::Timeout) => {
                    due = Instant::now() + resync;
                    self.verify()
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            if let Err(err) = &result {
                self.held = None;
                due = due.min(Instant::now() + AGAIN);
                if self.failing.update(true) {
                    warn!(
                        %err,
                        "the nftables guard's table cannot be written: replies of timed-out connections may be \
                         masqueraded, and replies of Pods with routing tables of their own may leave by another \
                         interface. The agent tries again every 5 s"
                    );
                }
            }
            if result.is_ok() {
                self.failing.update(false);
            }
        }
    }

    fn take_in(&mut self, updates: Update) {
        match updates {
            Update::All(mapped) => self.mapped = mapped,
            Update::One(frontend, Some(endpoint)) => drop(self.mapped.insert(frontend, endpoint)),
            Update::One(frontend, None) => drop(self.mapped.remove(&frontend)),
            Update::Markings(markings) => self.markings = Some(markings),
        }
    }

    fn endpoints(&self) -> BTreeSet<PodEndpoint> {
        self.mapped.values().copied().collect()
    }

    fn follow(&mut self) -> io::Result<()> {
        let wanted = self.endpoints();
        let Some(held) = self.held.as_mut().filter(|held| held.endpoints != wanted) else { return Ok(()) };
        table::update(&Connection::open()?, &(&wanted - &held.endpoints), &(&held.endpoints - &wanted))?;
        held.endpoints = wanted;
        Ok(())
    }

    /// Compares the table with the desired one, and replaces it if they differ.
    fn verify(&mut self) -> io::Result<()> {
        let connection = Connection::open()?;
        let is_needed = self.is_needed()?;
        // A list that changes while it is read may lack a rule, so the guard stays until two checks in a row find none.
        let keeps_sources = std::mem::replace(&mut self.was_needed, is_needed) || is_needed;
        let found = table::if_known(table::read(&connection))?.flatten();
        let markings = match (&self.markings, &found) {
            (_, _) if self.mode == GuardMode::Off => BTreeSet::new(),
            (Some(wanted), _) => wanted.clone(),
            (None, found) => found.as_ref().map(|it| it.markings.clone()).unwrap_or_default(),
        };
        if !keeps_sources && markings.is_empty() {
            if table::if_known(table::remove(&connection))?.unwrap_or_default() {
                info!("the nftables guard is not needed: table {TABLE} is removed");
            }
            self.log(&Content::default());
            self.held = None;
            return Ok(());
        }
        let wanted = Content { endpoints: self.endpoints(), keeps_sources, markings };
        if found.as_ref() != Some(&wanted) {
            table::replace(&connection, &wanted)?;
            self.log(&wanted);
        }
        self.held = Some(wanted);
        Ok(())
    }

    /// Logs what the table begins to do.
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
                "nftables table {TABLE} marks connections to mappings, so that replies leave by the interface of their requests"
            );
        }
    }

    fn is_needed(&self) -> io::Result<bool> {
        match self.mode {
            GuardMode::On => Ok(true),
            GuardMode::Off => Ok(false),
            GuardMode::Auto => Ok(has_legacy_nat() || table::others_translate()?.unwrap_or_default()),
        }
    }
}

fn has_legacy_nat() -> bool {
    let has_nat = |path| fs::read_to_string(path).is_ok_and(|names| names.lines().any(|name| name == "nat"));
    LEGACY_TABLES.into_iter().any(has_nat)
}
