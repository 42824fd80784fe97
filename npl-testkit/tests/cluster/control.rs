// SPDX-License-Identifier: Apache-2.0
//! Requests that NPL does not translate: from each Node to the addresses of its own Pods. If the CNI loses such
//! requests, the CNI loses packets without NPL.

use std::net::SocketAddr;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use npl_testkit::echo::Protocol;
use npl_testkit::traffic;

use crate::load;
use crate::world::World;

/// The UDP port of the Pods under load.
const PORT: u16 = 5300;

/// The delay between a response and the next request.
const INTERVAL: Duration = Duration::from_millis(2);

/// One client for each address of the Pods of `statefulset/store`. Dropping this value stops the clients.
pub(crate) struct Control(Vec<(Sender<()>, JoinHandle<Counts>)>);

/// The numbers of requests over IPv4 and over IPv6, in this order.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) sent: [u64; 2],
    pub(crate) lost: [u64; 2],
}

impl Control {
    pub(crate) fn start(world: &World) -> Self {
        let pods = world.pods(load::NAMESPACE, "app=store");
        assert!(!pods.is_empty(), "statefulset/store must have Pods");
        let clients = pods.iter().flat_map(|pod| {
            let netns = world.cluster.node(&pod.node).unwrap().netns().clone();
            pod.ips.iter().map(move |ip| {
                let (server, name) = (SocketAddr::new(*ip, PORT), pod.name.clone());
                let (stop, stopped) = mpsc::channel();
                // The client inherits the network namespace of the thread that starts it.
                (stop, netns.run(move || thread::spawn(move || send(server, &name, &stopped))).unwrap())
            })
        });
        Self(clients.collect())
    }

    /// Waits for the requests in progress, and returns the counts of all clients.
    pub(crate) fn stop(self) -> Counts {
        let (stops, clients): (Vec<_>, Vec<_>) = self.0.into_iter().unzip();
        drop(stops);
        let mut total = Counts::default();
        for client in clients {
            let Counts { sent, lost } = client.join().unwrap();
            for family in 0..2 {
                total.sent[family] += sent[family];
                total.lost[family] += lost[family];
            }
        }
        total
    }
}

/// Sends one datagram after the other to a Pod, until the sender of `stopped` is dropped.
fn send(server: SocketAddr, pod: &str, stopped: &Receiver<()>) -> Counts {
    let family = usize::from(server.is_ipv6());
    let mut counts = Counts::default();
    while matches!(stopped.recv_timeout(INTERVAL), Err(RecvTimeoutError::Timeout)) {
        counts.sent[family] += 1;
        match traffic::ask(Protocol::Udp, server, "control") {
            Ok(answer) => assert_eq!(answer.pod, pod, "{server} is the address of another Pod"),
            Err(_lost) => counts.lost[family] += 1,
        }
    }
    counts
}
