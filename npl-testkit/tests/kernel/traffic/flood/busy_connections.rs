// SPDX-License-Identifier: Apache-2.0
//! Connections with continuous traffic in both directions.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use npl_testkit::echo::Answer;
use npl_testkit::echo::pattern::{Digest, Pattern};
use npl_testkit::poll;

/// Bytes in each direction and round: more than one packet.
const BYTES: usize = 2048;

/// Shortest time between the starts of two rounds, to limit the load: the test checks that no connection is lost, and
/// measures no throughput.
const INTERVAL: Duration = Duration::from_millis(200);

/// Time limit that covers several retransmissions.
const STALL_LIMIT: Duration = Duration::from_secs(30);

/// Connections on which client and Pod exchange data at the same time.
pub(super) struct BusyConnections<'s> {
    connections: Vec<Connection<'s>>,
    pod: &'s str,
    rounds: u64,
}

struct Connection<'s> {
    stream: &'s TcpStream,
    replies: BufReader<&'s TcpStream>,
    client: SocketAddr,
}

impl<'s> BusyConnections<'s> {
    pub(super) fn new(streams: &'s [TcpStream], pod: &'s str) -> Self {
        let connection = |stream: &'s TcpStream| {
            stream.set_read_timeout(Some(poll::extended(STALL_LIMIT))).unwrap();
            stream.set_write_timeout(Some(poll::extended(STALL_LIMIT))).unwrap();
            Connection { stream, replies: BufReader::new(stream), client: stream.local_addr().unwrap() }
        };
        Self { connections: streams.iter().map(connection).collect(), pod, rounds: 0 }
    }

    /// Sends a request on every connection, and then receives every reply.
    pub(super) fn run_round(&mut self) {
        self.rounds += 1;
        for connection in &mut self.connections {
            let text = question(self.rounds);
            connection.stream.write_all(text.as_bytes()).unwrap_or_else(|error| connection.fail(self.rounds, &error));
        }
        for connection in &mut self.connections {
            let (line, data) = connection.replies().unwrap_or_else(|error| connection.fail(self.rounds, &error));
            let answer: Answer = serde_json::from_str(&line).unwrap();
            let sent = question(self.rounds);
            let line = sent.split_inclusive('\n').next().unwrap();
            assert_eq!((answer.pod.as_str(), answer.client), (self.pod, connection.client));
            assert_eq!(answer.digest, Digest::of(line.as_bytes()).to_string(), "the question arrived changed");
            assert_eq!(
                Digest::of(&data).to_string(),
                Pattern::new(self.rounds, BYTES as u64).digest(),
                "the data arrived changed"
            );
        }
    }

    /// Runs rounds until `is_over` is set, and then one more round. Returns the number of rounds.
    pub(super) fn run_until(mut self, is_over: &AtomicBool) -> u64 {
        while !is_over.load(Ordering::Relaxed) {
            let start = Instant::now();
            self.run_round();
            // This sleep limits the sender's rate, and is no wait for a condition.
            thread::sleep(INTERVAL.saturating_sub(start.elapsed()));
        }
        self.run_round();
        self.rounds
    }
}

impl Connection<'_> {
    fn replies(&mut self) -> std::io::Result<(String, Vec<u8>)> {
        let mut line = String::new();
        self.replies.read_line(&mut line)?;
        let mut data = vec![0; BYTES];
        self.replies.read_exact(&mut data)?;
        Ok((line, data))
    }

    fn fail<T>(&self, round: u64, error: &std::io::Error) -> T {
        panic!("the connection from {} was lost in round {round}: {error}", self.client)
    }
}

/// Returns a line that the server answers, and a line that requests data.
fn question(round: u64) -> String {
    format!("{round:0>BYTES$}\nDOWNLOAD {BYTES} {round}\n")
}
