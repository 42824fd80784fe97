// SPDX-License-Identifier: Apache-2.0
//! Limits the memory that clients can keep occupied: answers that they do not read, and requests that they do not
//! complete.
//!
//! A client that closes its HTTP/2 flow-control windows reads no answer, although its TCP connection makes progress, so
//! [`crate::stall`] does not end the connection. Many such clients could each keep another version of an answer.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::body::Bytes;
use tokio::sync::Notify;

use crate::status::Status;

/// The maximum number of bytes of unread answers and incomplete requests, over all clients. Bytes that several answers
/// share count once. A single answer may be larger than the limit: then the limit is [`ANSWERS`] such answers.
pub(crate) const LIMIT: usize = 24 * 1024 * 1024;
/// The number of answers of any size that fit into the limit.
const ANSWERS: usize = 4;
/// The receive window of an HTTP/2 connection in bytes, which the client can fill while the feed waits for the client.
/// The smallest value that HTTP/2 permits.
pub(crate) const WINDOW: u32 = 65_535;

/// The memory that is occupied for clients. Clones share the same limit.
#[derive(Clone, Default)]
pub struct HeldMemory(Arc<Mutex<Table>>);

impl fmt::Debug for HeldMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldMemory").field("bytes", &self.table().bytes).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Table {
    /// The number of the next hold or connection.
    next: u64,
    /// The oldest hold has the lowest number.
    holds: BTreeMap<u64, Entry>,
    contents: HashMap<Content, Size>,
    /// The sum of the lengths of all contents.
    bytes: usize,
}

struct Entry {
    connection: u64,
    closed: Arc<Notify>,
    contents: Vec<Content>,
}

/// A piece of memory that one or more holds keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Content {
    /// The bytes at this address, which answers may share. A hold keeps the bytes, so no other bytes can have the
    /// address.
    Shared(usize),
    /// The incomplete request of the hold with this number.
    Request(u64),
    /// The receive window of the connection with this number.
    Window(u64),
}

struct Size {
    length: usize,
    holds: usize,
}

impl HeldMemory {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a new connection of a client to the interface with this name.
    pub(crate) fn connect(&self, interface: &'static str, status: Arc<Status>) -> Connection {
        let number = self.table().number();
        Connection { memory: self.clone(), number, closed: Arc::default(), interface, status }
    }

    /// Returns the number of bytes that are currently occupied.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.table().bytes
    }
}

impl Table {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn add(&mut self, hold: u64, content: Content, length: usize) {
        let Some(entry) = self.holds.get_mut(&hold) else { return };
        if entry.contents.contains(&content) {
            return;
        }
        entry.contents.push(content);
        let size = self.contents.entry(content).or_insert(Size { length: 0, holds: 0 });
        size.holds += 1;
        self.bytes = self.bytes.saturating_add(length).saturating_sub(size.length);
        size.length = length;
    }

    fn remove(&mut self, hold: u64) -> Option<Entry> {
        let entry = self.holds.remove(&hold)?;
        for content in &entry.contents {
            let Some(size) = self.contents.get_mut(content) else { continue };
            size.holds -= 1;
            if size.holds == 0 {
                self.bytes = self.bytes.saturating_sub(size.length);
                self.contents.remove(content);
            }
        }
        Some(entry)
    }

    /// Closes the connections with the oldest holds until all remaining bytes are within the limit. `newest` is the
    /// length of the answer or request that was just added. Returns the number of closed connections.
    fn enforce(&mut self, newest: usize) -> usize {
        let limit = LIMIT.max(newest.saturating_mul(ANSWERS));
        let mut closed = 0;
        while self.bytes > limit
            && self.holds.len() > 1
            && let Some(oldest) = self.holds.first_entry()
        {
            let connection = oldest.get().connection;
            oldest.get().closed.notify_one();
            closed += 1;
            let of_connection = |(hold, entry): (&u64, &Entry)| (entry.connection == connection).then_some(*hold);
            let holds: Vec<u64> = self.holds.iter().filter_map(of_connection).collect();
            for hold in holds {
                self.remove(hold);
            }
        }
        closed
    }
}

/// The connection of a client. The feed closes the connection when the client keeps too much memory occupied.
#[derive(Clone)]
pub(crate) struct Connection {
    memory: HeldMemory,
    number: u64,
    closed: Arc<Notify>,
    interface: &'static str,
    status: Arc<Status>,
}

impl Connection {
    /// Waits until the connection must be closed, because the client keeps memory occupied that others need.
    pub(crate) async fn closed(&self) {
        self.closed.notified().await;
    }

    /// Registers an answer until the client has read it. Returns the parts of the answer; the answer counts as read when
    /// all returned parts are dropped.
    pub(crate) fn answer(&self, parts: Vec<Bytes>) -> Vec<Bytes> {
        let length = parts.iter().map(Bytes::len).sum();
        let contents = parts.iter().filter(|part| !part.is_empty());
        let contents = contents.map(|part| (Content::Shared(part.as_ptr().addr()), part.len()));
        let hold = Arc::new(self.hold(contents, length));
        let read = |bytes| Bytes::from_owner(Unread { bytes, _hold: Arc::clone(&hold) });
        parts.into_iter().map(read).collect()
    }

    /// Returns the counter of a stream's incomplete request.
    pub(crate) fn requests(&self) -> Requests {
        Requests { connection: self.clone(), incomplete: Mutex::default() }
    }

    fn hold(&self, contents: impl IntoIterator<Item = (Content, usize)>, length: usize) -> Hold {
        let mut table = self.memory.table();
        let number = table.number();
        let entry = Entry { connection: self.number, closed: Arc::clone(&self.closed), contents: Vec::new() };
        table.holds.insert(number, entry);
        for (content, length) in contents {
            table.add(number, content, length);
        }
        if length > 0 {
            table.add(number, Content::Window(self.number), WINDOW as usize);
        }
        let closed = table.enforce(length);
        drop(table);
        self.count(closed);
        Hold { connection: self.clone(), number }
    }

    fn count(&self, closed: usize) {
        for _ in 0..closed {
            self.status.count_refused(self.interface);
        }
    }
}

/// The requests that arrive on one stream. The bytes of an incomplete request occupy memory until the request is
/// complete.
pub(crate) struct Requests {
    connection: Connection,
    /// The number of bytes of the incomplete request that have arrived, and their hold; `None` between two requests.
    incomplete: Mutex<Option<(usize, Hold)>>,
}

impl Requests {
    /// Records the arrival of further bytes.
    pub(crate) fn arrived(&self, bytes: usize) {
        let mut incomplete = self.incomplete.lock().unwrap_or_else(PoisonError::into_inner);
        let (length, hold) = incomplete.get_or_insert_with(|| (0, self.connection.hold([], 0)));
        *length += bytes;
        hold.resize(*length);
    }

    /// Records that the request is complete.
    pub(crate) fn complete(&self) {
        self.incomplete.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// Memory that is occupied for a client until this value is dropped.
struct Hold {
    connection: Connection,
    number: u64,
}

impl Hold {
    /// Sets the length of an incomplete request.
    fn resize(&self, length: usize) {
        let mut table = self.connection.memory.table();
        let content = Content::Request(self.number);
        match table.contents.get_mut(&content).map(|size| mem::replace(&mut size.length, length)) {
            Some(before) => table.bytes = table.bytes.saturating_add(length).saturating_sub(before),
            None => table.add(self.number, content, length),
        }
        let closed = table.enforce(length);
        drop(table);
        self.connection.count(closed);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.connection.memory.table().remove(self.number);
    }
}

/// A part of an answer that the client has not read.
struct Unread {
    bytes: Bytes,
    _hold: Arc<Hold>,
}

impl AsRef<[u8]> for Unread {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const MIB: usize = 1024 * 1024;

    fn connect(memory: &HeldMemory) -> Connection {
        memory.connect("http", Arc::default())
    }

    fn is_closed(connection: &Connection) -> bool {
        connection.closed().now_or_never().is_some()
    }

    fn content(length: usize) -> Bytes {
        vec![0; length].into()
    }

    #[test]
    fn shared_bytes_count_once_until_the_last_client_has_read_them() {
        let memory = HeldMemory::default();
        let [one, other] = [connect(&memory), connect(&memory)];
        let shared = content(MIB);
        let first = one.answer(vec![content(10), shared.clone()]);
        let second = other.answer(vec![shared.clone(), shared]);
        assert_eq!(memory.bytes(), MIB + 10 + 2 * WINDOW as usize);
        // Slices of a part, such as those that HTTP/2 has not sent yet, keep the answer.
        let slice = first[1].slice(5..6);
        drop(first);
        assert_eq!(memory.bytes(), MIB + 10 + 2 * WINDOW as usize);
        drop(slice);
        assert_eq!(memory.bytes(), MIB + WINDOW as usize);
        drop(second);
        assert_eq!(memory.bytes(), 0);
        assert!(!is_closed(&one) && !is_closed(&other));
    }

    #[test]
    fn above_the_limit_the_connections_with_the_oldest_answers_are_closed() {
        let memory = HeldMemory::default();
        let connections: Vec<Connection> = (0..100).map(|_| connect(&memory)).collect();
        let mut answers = Vec::new();
        for connection in &connections {
            answers.push(connection.answer(vec![content(MIB)]));
            answers.push(connection.answer(vec![content(MIB)]));
            assert!(memory.bytes() <= LIMIT, "{}", memory.bytes());
        }
        let closed: Vec<bool> = connections.iter().map(is_closed).collect();
        let open = closed.iter().filter(|closed| !**closed).count();
        assert!((10..=12).contains(&open), "{open}");
        assert!(closed[..100 - open].iter().all(|closed| *closed), "the oldest connections are closed: {closed:?}");
        let counted = connections[0].status.encode().unwrap();
        assert!(!counted.contains("refused_connections_total{"), "the newest connection counts what it displaces");
        let newest = connections[99].status.encode().unwrap();
        assert!(newest.contains("npl_feed_refused_connections_total{interface=\"http\"} 1\n"), "{newest}");
        drop(answers);
        assert_eq!(memory.bytes(), 0);
    }

    #[test]
    fn clients_of_the_same_version_are_not_closed() {
        let memory = HeldMemory::default();
        let shared = content(4 * MIB);
        let connections: Vec<Connection> = (0..100).map(|_| connect(&memory)).collect();
        let answers: Vec<_> = connections.iter().map(|connection| connection.answer(vec![shared.clone()])).collect();
        assert!(!connections.iter().any(is_closed));
        drop(answers);
    }

    #[test]
    fn answers_larger_than_the_limit_are_served() {
        let memory = HeldMemory::default();
        let connections: Vec<Connection> = (0..5).map(|_| connect(&memory)).collect();
        let answers: Vec<_> =
            connections.iter().map(|connection| connection.answer(vec![content(2 * LIMIT)])).collect();
        let closed: Vec<bool> = connections.iter().map(is_closed).collect();
        assert_eq!(closed, [true, true, false, false, false], "the windows of the connections count too");
        drop(answers);
    }

    #[test]
    fn requests_that_do_not_end_are_displaced_by_newer_ones() {
        let memory = HeldMemory::default();
        let connections: Vec<Connection> = (0..20).map(|_| connect(&memory)).collect();
        let requests: Vec<Requests> = connections.iter().map(Connection::requests).collect();
        for request in &requests {
            for _ in 0..4 {
                request.arrived(MIB);
                assert!(memory.bytes() <= LIMIT);
            }
        }
        let closed: Vec<bool> = connections.iter().map(is_closed).collect();
        assert!(closed[..14].iter().all(|closed| *closed) && !closed[14..].contains(&true), "{closed:?}");
        requests[19].complete();
        assert_eq!(memory.bytes(), 5 * 4 * MIB);
        let idle = connections[19].requests();
        idle.arrived(1);
        idle.complete();
        assert!(!is_closed(&connections[19]), "a stream without an incomplete request occupies no memory");
        drop(requests);
        assert_eq!(memory.bytes(), 0);
    }
}
