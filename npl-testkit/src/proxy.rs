// SPDX-License-Identifier: Apache-2.0
//! A way to the API server that can be slow, break, or be closed. It passes bytes on and knows nothing of what they say.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::netns::Netns;

/// A proxy on the loopback address of a namespace; what goes by it breaks when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    netns: Netns,
    server: SocketAddr,
    is_over: AtomicBool,
    is_closed: AtomicBool,
    delay_millis: AtomicU64,
    connections: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    /// Starts to pass on whatever comes, at once.
    pub fn start(netns: &Netns, server: SocketAddr) -> Result<Self> {
        let listener = netns.run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?.context("listen as a proxy")?;
        let address = listener.local_addr().context("ask for the proxy's address")?;
        let shared = Arc::new(Shared {
            netns: netns.clone(),
            server,
            is_over: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            delay_millis: AtomicU64::new(0),
            connections: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming() {
                if accepting.is_over.load(Ordering::SeqCst) {
                    return;
                }
                if let Ok(client) = client {
                    accepting.serve(client);
                }
            }
        });
        Ok(Self { address, shared })
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Breaks every connection; new ones are served.
    pub fn cut(&self) {
        for connection in self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // It may have ended by itself.
            drop(connection.shutdown(Shutdown::Both));
        }
    }

    /// Breaks every connection and lets none be made until [`Self::open`].
    pub fn close(&self) {
        self.shared.is_closed.store(true, Ordering::SeqCst);
        self.cut();
    }

    /// Serves again.
    pub fn open(&self) {
        self.shared.is_closed.store(false, Ordering::SeqCst);
    }

    /// Holds whatever passes back for this long, in either direction.
    pub fn delay(&self, delay: Duration) {
        let millis = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        self.shared.delay_millis.store(millis, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        self.cut();
        // Wakes the thread that accepts; should nobody listen any more, it has ended.
        drop(self.shared.netns.run(|| TcpStream::connect(self.address)));
    }
}

impl Shared {
    /// A connection that cannot be served is broken, which the client takes for a server that is away.
    fn serve(self: &Arc<Self>, client: TcpStream) {
        let Ok(Ok(server)) = self.netns.run(|| TcpStream::connect(self.server)) else { return };
        let halves = (client.try_clone(), client.try_clone(), server.try_clone(), server.try_clone());
        let (Ok(client_kept), Ok(client_read), Ok(server_kept), Ok(server_read)) = halves else { return };
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_closed.load(Ordering::SeqCst) {
            return;
        }
        connections.extend([client_kept, server_kept]);
        drop(connections);
        for (from, to) in [(client_read, server), (server_read, client)] {
            let shared = Arc::clone(self);
            thread::spawn(move || shared.pass_on(from, to));
        }
    }

    fn pass_on(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = [0; 16 * 1024];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            thread::sleep(Duration::from_millis(self.delay_millis.load(Ordering::SeqCst)));
            if buffer.get(..length).is_none_or(|bytes| to.write_all(bytes).is_err()) {
                break;
            }
        }
        // Whoever still reads or writes the other way learns that it is over.
        drop((from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both)));
    }
}
