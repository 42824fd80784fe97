// SPDX-License-Identifier: Apache-2.0
//! Limits the memory for answers that clients do not read and for requests that clients do not complete.
//!
//! A client that closes its HTTP/2 flow-control windows reads no answer, although its TCP connection makes progress, so
//! [`crate::stall`] does not end the connection. Many such clients could each make the feed keep a different
//! version of an answer in its memory.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::body::Bytes;
use tokio::{sync::Notify, time::Instant};

use crate::status::{ClientRefusal, Interface, Status};

/// The maximum number of bytes of unread answers and incomplete requests, over all clients. Bytes that several answers
/// share count once. If the newest answer or request alone is larger than this number, the limit is
/// [`ANSWERS_WITHIN_LIMIT`] times the size of that answer or request.
pub(crate) const LIMIT: usize = 24 * 1024 * 1024;
/// The factor by which the limit exceeds the size of the newest answer or request, if that size alone exceeds
/// [`LIMIT`].
const ANSWERS_WITHIN_LIMIT: usize = 4;
/// The receive window of an HTTP/2 connection in bytes, the smallest value that HTTP/2 permits. While an xDS stream
/// waits for its client to read, the client can fill the window.
pub(crate) const WINDOW: u32 = 65_535;
/// The memory in bytes that each part of an answer takes besides its content.
const PART: usize = 128;

/// Counts the memory that is occupied for clients. Clones share one count and one limit.
#[derive(Clone, Default)]
pub struct ClientMemory(Arc<Mutex<Table>>);

impl fmt::Debug for ClientMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientMemory").field("bytes", &self.table().bytes).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Table {
    /// The number that was last assigned to a reservation or connection.
    last: u64,
    /// The oldest reservation has the lowest number.
    reservations: BTreeMap<u64, Entry>,
    contents: HashMap<Content, Size>,
    /// The sum of the lengths of all contents.
    bytes: usize,
}

struct Entry {
    client: Arc<Client>,
    since: Instant,
    contents: Vec<Content>,
}

/// Bytes in memory that belong to one or more reservations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Content {
    /// The bytes at this address, which answers may share. While a reservation exists, its bytes are not freed, so the
    /// address identifies them.
    Shared(usize),
    /// The memory that belongs to the reservation with this number alone.
    Own(u64),
}

struct Size {
    length: usize,
    reservations: usize,
}

impl ClientMemory {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a new connection of a client to an interface.
    pub(crate) fn connect(&self, interface: Interface, status: Arc<Status>) -> Connection {
        let number = self.table().number();
        let client = Client { number, interface, status, closed: Notify::new(), streams: Stream::default() };
        Connection { memory: self.clone(), client: Arc::new(client) }
    }

    /// Returns the number of bytes that are currently occupied.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.table().bytes
    }
}

impl Table {
    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn insert(&mut self, reservation: u64, client: &Arc<Client>, contents: BTreeMap<Content, usize>) {
        for (content, length) in &contents {
            let size = self.contents.entry(*content).or_insert(Size { length: 0, reservations: 0 });
            size.reservations += 1;
            self.bytes = self.bytes.saturating_add(*length).saturating_sub(size.length);
            size.length = *length;
        }
        let contents = contents.into_keys().collect();
        self.reservations.insert(reservation, Entry { client: Arc::clone(client), since: Instant::now(), contents });
    }

    fn remove(&mut self, reservation: u64) {
        let Some(entry) = self.reservations.remove(&reservation) else { return };
        for content in &entry.contents {
            let Some(size) = self.contents.get_mut(content) else { continue };
            size.reservations -= 1;
            if size.reservations == 0 {
                self.bytes = self.bytes.saturating_sub(size.length);
                self.contents.remove(content);
            }
        }
    }

    /// If the limit is exceeded, closes connections until an eighth of the limit is free, so that few of the next
    /// answers and requests exceed the limit again. `newest` is the length of the answer or request that was just
    /// added.
    fn enforce(&mut self, newest: usize) {
        let limit = if newest > LIMIT { newest.saturating_mul(ANSWERS_WITHIN_LIMIT) } else { LIMIT };
        if self.bytes <= limit {
            return;
        }
        for (_, reservations) in self.ranking() {
            if self.bytes <= limit - limit / 8 || self.reservations.len() == 1 {
                return;
            }
            if let Some(entry) = reservations.first().and_then(|reservation| self.reservations.get(reservation)) {
                entry.client.close();
            }
            for reservation in reservations {
                self.remove(reservation);
            }
        }
    }

    /// Returns the cost and the reservations of each connection, in the order in which connections are closed. The cost
    /// of a reservation is the product of the bytes that no other reservation shares and the square of the time since
    /// the reservation. The cost of a connection is the sum over its reservations. The connection with the largest cost
    /// is first. Clients that do not read large answers therefore lose their connections before clients that read their
    /// answers soon or have small answers. Of connections with the same cost, the connection with the oldest
    /// reservation is first.
    fn ranking(&self) -> Vec<(u128, Vec<u64>)> {
        let now = Instant::now();
        let mut by_connection: HashMap<u64, (u128, Vec<u64>)> = HashMap::new();
        for (reservation, entry) in &self.reservations {
            let sizes = entry.contents.iter().filter_map(|content| self.contents.get(content));
            let bytes: usize = sizes.filter(|size| size.reservations == 1).map(|size| size.length).sum();
            let time = now.saturating_duration_since(entry.since).as_millis();
            let (cost, reservations) = by_connection.entry(entry.client.number).or_default();
            *cost = cost.saturating_add(time.saturating_mul(time).saturating_mul(bytes as u128));
            reservations.push(*reservation);
        }
        let mut ranking: Vec<(u128, Vec<u64>)> = by_connection.into_values().collect();
        ranking.sort_by(|(cost, reservations), (other_cost, others)| {
            other_cost.cmp(cost).then_with(|| reservations.first().cmp(&others.first()))
        });
        ranking
    }
}

/// The part of a connection that all its clones share.
struct Client {
    number: u64,
    interface: Interface,
    status: Arc<Status>,
    closed: Notify,
    /// Each open xDS stream has a clone of this value, so the number of clones shows whether a stream is open.
    streams: Stream,
}

impl Client {
    fn close(&self) {
        self.closed.notify_one();
        self.status.count_refused(self.interface.as_str(), ClientRefusal::Memory);
    }
}

/// The connection of a client. The feed closes the connection if the client keeps memory occupied that the feed needs
/// for other clients.
#[derive(Clone)]
pub(crate) struct Connection {
    memory: ClientMemory,
    client: Arc<Client>,
}

/// Marks a stream of a connection as open until this value is dropped.
pub(crate) type Stream = Arc<()>;

impl Connection {
    /// Waits until the connection must be closed, because the client keeps memory occupied that the feed needs for
    /// other clients.
    pub(crate) async fn closed(&self) {
        self.client.closed.notified().await;
    }

    /// Returns the interface to which the client is connected.
    pub(crate) fn interface(&self) -> Interface {
        self.client.interface
    }

    /// Adds an open stream.
    pub(crate) fn stream(&self) -> Stream {
        Arc::clone(&self.client.streams)
    }

    /// Returns whether the connection has an open stream.
    pub(crate) fn has_streams(&self) -> bool {
        Arc::strong_count(&self.client.streams) > 1
    }

    /// Registers an answer as unread. Returns the parts of the answer; the answer counts as read when all returned
    /// parts are dropped.
    pub(crate) fn answer(&self, parts: Vec<Part>) -> Vec<Bytes> {
        let mut contents = BTreeMap::new();
        let mut own = 0;
        for part in &parts {
            match part {
                Part::Own(bytes) => own += bytes.len() + PART,
                Part::Shared(bytes) => {
                    own += PART;
                    contents.insert(Content::Shared(bytes.as_ptr().addr()), bytes.len());
                }
            }
        }
        let reservation = Arc::new(self.reserve(contents, own));
        let read = |part| match part {
            Part::Own(bytes) | Part::Shared(bytes) => {
                Bytes::from_owner(Unread { bytes, _reservation: Arc::clone(&reservation) })
            }
        };
        parts.into_iter().map(read).collect()
    }

    /// Registers the memory of the connection's receive window, which the client can fill while an xDS stream waits for
    /// the client to read. The registration ends when the returned value is dropped.
    pub(crate) fn window(&self) -> Reservation {
        self.reserve(BTreeMap::new(), WINDOW as usize)
    }

    /// Returns the memory of the requests that arrive on a new stream.
    pub(crate) fn incomplete_request(&self) -> IncompleteRequest {
        IncompleteRequest { connection: self.clone(), reservation: None }
    }

    fn reserve(&self, mut contents: BTreeMap<Content, usize>, own: usize) -> Reservation {
        let length = contents.values().sum::<usize>() + own;
        let mut table = self.memory.table();
        let number = table.number();
        contents.insert(Content::Own(number), own);
        table.insert(number, &self.client, contents);
        table.enforce(length);
        drop(table);
        Reservation { memory: self.memory.clone(), number }
    }
}

/// A part of an answer.
#[derive(Debug, Clone)]
pub(crate) enum Part {
    /// Bytes of this answer alone.
    Own(Bytes),
    /// Bytes that other answers may share.
    Shared(Bytes),
}

/// The memory of the request that arrives on a stream, until the request is complete.
pub(crate) struct IncompleteRequest {
    connection: Connection,
    reservation: Option<Reservation>,
}

impl IncompleteRequest {
    /// Sets the number of bytes of the incomplete request; 0 between two requests.
    pub(crate) fn set(&mut self, bytes: usize) {
        match &self.reservation {
            _ if bytes == 0 => self.reservation = None,
            Some(reservation) => reservation.resize(bytes),
            None => self.reservation = Some(self.connection.reserve(BTreeMap::new(), bytes)),
        }
    }
}

/// Memory that is occupied for a client until this value is dropped.
pub(crate) struct Reservation {
    memory: ClientMemory,
    number: u64,
}

impl Reservation {
    fn resize(&self, length: usize) {
        let mut table = self.memory.table();
        // The content is absent if the feed has closed the connection to free memory.
        if let Some(before) =
            table.contents.get_mut(&Content::Own(self.number)).map(|size| mem::replace(&mut size.length, length))
        {
            table.bytes = table.bytes.saturating_add(length).saturating_sub(before);
            table.enforce(length);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.memory.table().remove(self.number);
    }
}

/// A part of an answer that the client has not read.
struct Unread {
    bytes: Bytes,
    _reservation: Arc<Reservation>,
}

impl AsRef<[u8]> for Unread {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::FutureExt as _;
    use tokio::time::advance;

    use super::*;

    const MIB: usize = 1024 * 1024;

    fn connect(memory: &ClientMemory) -> Connection {
        memory.connect(Interface::Http, Arc::default())
    }

    fn is_closed(connection: &Connection) -> bool {
        connection.closed().now_or_never().is_some()
    }

    fn own(length: usize) -> Part {
        Part::Own(vec![0; length].into())
    }

    fn shared(length: usize) -> Part {
        Part::Shared(vec![0; length].into())
    }

    #[test]
    fn shared_bytes_count_once_until_the_last_client_has_read_them() {
        let memory = ClientMemory::default();
        let [one, other] = [connect(&memory), connect(&memory)];
        let shared = shared(MIB);
        let first = one.answer(vec![own(10), shared.clone()]);
        let second = other.answer(vec![shared.clone(), shared]);
        assert_eq!(memory.bytes(), MIB + 10 + 4 * PART);
        // The answer counts as unread while a slice of one of its parts exists, such as bytes that HTTP/2 has not sent
        // yet.
        let slice = first[1].slice(5..6);
        drop(first);
        assert_eq!(memory.bytes(), MIB + 10 + 4 * PART);
        drop(slice);
        assert_eq!(memory.bytes(), MIB + 2 * PART);
        drop(second);
        assert_eq!(memory.bytes(), 0);
        assert!(!is_closed(&one) && !is_closed(&other));
    }

    #[test]
    fn above_the_limit_the_connections_with_the_oldest_answers_are_closed() {
        let memory = ClientMemory::default();
        let connections: Vec<Connection> = (0..100).map(|_| connect(&memory)).collect();
        let mut answers = Vec::new();
        for connection in &connections {
            answers.push(connection.answer(vec![own(2 * MIB)]));
            assert!(memory.bytes() <= LIMIT, "{}", memory.bytes());
        }
        let closed: Vec<bool> = connections.iter().map(is_closed).collect();
        let open = closed.iter().filter(|closed| !**closed).count();
        assert!((10..=12).contains(&open), "{open}");
        assert!(closed[..100 - open].iter().all(|closed| *closed), "the oldest connections are closed: {closed:?}");
        drop(answers);
        assert_eq!(memory.bytes(), 0);
    }

    /// A hostile client can always have the newest answers. To make room for these answers, the feed closes connections
    /// with the hostile client's own earlier answers, because these answers are larger than the answers to clients that
    /// read slowly.
    #[tokio::test(start_paused = true)]
    async fn a_client_with_large_answers_does_not_displace_clients_with_small_ones() {
        let memory = ClientMemory::default();
        let status = Arc::<Status>::default();
        let version = shared(2 * MIB);
        let balancers: Vec<Connection> = (0..1000).map(|_| connect(&memory)).collect();
        let unread: Vec<_> = balancers.iter().map(|it| it.answer(vec![own(1000), version.clone()])).collect();
        let mut hostile = Vec::new();
        for _ in 0..20 {
            advance(Duration::from_millis(100)).await;
            let client = memory.connect(Interface::Xds, Arc::clone(&status));
            hostile.push(client.answer(vec![own(10 * MIB)]));
            assert!(!is_closed(&client) && memory.bytes() <= LIMIT);
        }
        assert!(!balancers.iter().any(is_closed));
        let counted = "npl_feed_refused_connections_total{interface=\"xds\",reason=\"memory\"} 18\n";
        assert!(status.encode().unwrap().contains(counted), "{}", status.encode().unwrap());
        drop((unread, hostile));
        assert_eq!(memory.bytes(), 0);
    }

    /// Many clients that each occupy little memory must not prevent a large answer to a client that reads.
    #[tokio::test(start_paused = true)]
    async fn many_small_unread_answers_do_not_displace_a_large_new_one() {
        let memory = ClientMemory::default();
        let hostile: Vec<Connection> = (0..1000).map(|_| connect(&memory)).collect();
        let unread: Vec<_> = hostile.iter().map(|it| it.answer(vec![own(LIMIT / 1001)])).collect();
        advance(Duration::from_secs(1)).await;
        let balancer = connect(&memory);
        let answer = balancer.answer(vec![own(10 * MIB)]);
        assert!(!is_closed(&balancer) && memory.bytes() <= LIMIT);
        assert!(hostile.iter().filter(|client| is_closed(client)).count() > 400);
        drop((unread, answer));
    }

    #[test]
    fn answers_larger_than_the_limit_are_served() {
        let memory = ClientMemory::default();
        let connections: Vec<Connection> = (0..5).map(|_| connect(&memory)).collect();
        let answers: Vec<_> = connections.iter().map(|connection| connection.answer(vec![shared(2 * LIMIT)])).collect();
        let closed: Vec<bool> = connections.iter().map(is_closed).collect();
        assert_eq!(closed, [true, true, false, false, false]);
        drop(answers);
    }

    #[test]
    fn requests_that_do_not_end_are_displaced_by_newer_ones() {
        let memory = ClientMemory::default();
        let connections: Vec<Connection> = (0..20).map(|_| connect(&memory)).collect();
        let mut requests: Vec<IncompleteRequest> = connections.iter().map(Connection::incomplete_request).collect();
        for request in &mut requests {
            for length in 1..5 {
                request.set(length * MIB);
                assert!(memory.bytes() <= LIMIT);
            }
        }
        let closed: Vec<bool> = connections.iter().map(is_closed).collect();
        assert!(closed[..14].iter().all(|closed| *closed) && !closed[14..].contains(&true), "{closed:?}");
        requests[19].set(0);
        assert_eq!(memory.bytes(), 5 * 4 * MIB);
        requests[0].set(MIB);
        requests[0].set(2 * MIB);
        assert_eq!(memory.bytes(), 5 * 4 * MIB, "a closed connection occupies no memory");
        drop(requests);
        assert_eq!(memory.bytes(), 0);
    }

    #[test]
    fn a_connection_has_streams_until_the_last_one_ends() {
        let connection = connect(&ClientMemory::default());
        let streams = [connection.stream(), connection.stream()];
        assert!(connection.has_streams());
        drop(streams);
        assert!(!connection.has_streams());
    }
}
