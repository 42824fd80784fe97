// SPDX-License-Identifier: Apache-2.0
//! Sends a constant rate of requests to the load balancer, and records the answers.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use npl_testkit::poll;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    runtime::Handle,
    task::JoinHandle,
    time::{MissedTickBehavior, interval, timeout},
};

/// The timeout of a request to the load balancer.
const PATIENCE: Duration = Duration::from_secs(20);
/// The time between two requests of one client.
const PACE: Duration = Duration::from_millis(10);
const CLIENTS: usize = 3;

/// The answers so far.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen {
    /// The number of requests.
    pub(crate) requests: usize,
    /// For each Pod: the number of requests that the Pod has answered, and the sequence number of the last of these
    /// requests.
    pub(crate) answers: BTreeMap<String, (usize, usize)>,
    /// The failed requests: those without a complete answer with the status code 200. Each element has the request's
    /// number, its duration and the cause.
    pub(crate) lost: Vec<String>,
}

/// Clients that send requests until the load is dropped.
pub(crate) struct Load {
    pub(crate) seen: Arc<Mutex<Seen>>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    pub(crate) fn start(runtime: &Handle, balancer: SocketAddr) -> Self {
        let seen = Arc::<Mutex<Seen>>::default();
        let clients = (0..CLIENTS).map(|_| runtime.spawn(client(balancer, Arc::clone(&seen)))).collect();
        Self { seen, clients }
    }

    pub(crate) fn seen(&self) -> Seen {
        self.seen.lock().unwrap().clone()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.clients.iter().for_each(JoinHandle::abort);
    }
}

#[expect(clippy::infinite_loop, reason = "the task is aborted")]
async fn client(balancer: SocketAddr, seen: Arc<Mutex<Seen>>) {
    let mut pace = interval(PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        pace.tick().await;
        let sent = Instant::now();
        let answer = request(balancer).await;
        let mut seen = seen.lock().unwrap();
        seen.requests += 1;
        let number = seen.requests;
        match answer {
            Ok(pod) => {
                let (count, last) = seen.answers.entry(pod).or_default();
                (*count, *last) = (*count + 1, number);
            }
            Err(reason) => seen.lost.push(format!("request {number} after {:?}: {reason}", sent.elapsed())),
        }
    }
}

/// Sends one request on a new connection. Returns the name of the Pod that answered.
pub(crate) async fn request(balancer: SocketAddr) -> Result<String, String> {
    let exchange = async {
        let mut stream = TcpStream::connect(balancer).await?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: web.example\r\nConnection: close\r\n\r\n").await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        std::io::Result::Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    let answer = timeout(poll::extended(PATIENCE), exchange).await.map_err(|_late| "no answer".to_owned())?;
    let answer = answer.map_err(|error| error.to_string())?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| format!("no complete answer: {answer:?}"))?;
    if !head.starts_with("HTTP/1.1 200") {
        return Err(format!("{} {body:?}", head.lines().next().unwrap_or_default()));
    }
    // A chunked body has the name on the line after the chunk's length.
    let is_chunked = head.to_lowercase().contains("transfer-encoding: chunked");
    Ok(body.lines().nth(usize::from(is_chunked)).unwrap_or_default().to_owned())
}
