// SPDX-License-Identifier: Apache-2.0
//! A TCP proxy in front of the API server. The proxy can delay or discard data, and close or reject connections.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::netns::Netns;

/// A TCP proxy that listens in a network namespace. Dropping the proxy closes its connections.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// The namespace in which the proxy listens.
    netns: Netns,
    /// The namespace in which the server listens; `None` for this process's namespace.
    server_netns: Option<Netns>,
    server: SocketAddr,
    is_over: AtomicBool,
    is_closed: AtomicBool,
    delay_millis: AtomicU64,
    /// The number of connections that were forwarded so far, which is also the number of the next connection.
    accepted: AtomicU64,
    /// The proxy discards the data of connections whose number is below this number.
    swallowed: AtomicU64,
    /// The number of bytes that the server has sent, without discarded bytes.
    from_server: AtomicU64,
    connections: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    /// Starts the proxy on a free port. The proxy forwards without delay.
    pub fn start(netns: &Netns, server: SocketAddr) -> Result<Self> {
        Self::start_between((netns, (Ipv4Addr::LOCALHOST, 0).into()), (Some(netns), server))
    }

    /// Starts a proxy between two namespaces: `listen` is the proxy's own namespace and address, `server` those of the
    /// server. The namespace `None` is the namespace of this process.
    pub(crate) fn start_between(listen: (&Netns, SocketAddr), server: (Option<&Netns>, SocketAddr)) -> Result<Self> {
        let (netns, address) = listen;
        let listener = netns.run(|| TcpListener::bind(address))?.context("open the proxy's listening socket")?;
        let address = listener.local_addr().context("read the proxy's address")?;
        let shared = Arc::new(Shared {
            netns: netns.clone(),
            server_netns: server.0.cloned(),
            server: server.1,
            is_over: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            delay_millis: AtomicU64::new(0),
            accepted: AtomicU64::new(0),
            swallowed: AtomicU64::new(0),
            from_server: AtomicU64::new(0),
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

    /// The listening port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Shuts down every connection in both directions. The proxy continues to accept new connections.
    pub fn cut(&self) {
        for connection in self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // An error means that the connection is already closed.
            drop(connection.shutdown(Shutdown::Both));
        }
    }

    /// Shuts down every connection, and closes each new connection at once, until [`Self::open`].
    pub fn close(&self) {
        self.shared.is_closed.store(true, Ordering::SeqCst);
        self.cut();
    }

    /// Forwards new connections again.
    pub fn open(&self) {
        self.shared.is_closed.store(false, Ordering::SeqCst);
    }

    /// Discards the data of the present connections in both directions, as a proxy does if its server has disappeared.
    /// The connections stay open, and the kernel acknowledges all segments. New connections are forwarded.
    pub fn swallow(&self) {
        self.shared.swallowed.store(self.shared.accepted.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// The number of bytes that the server has sent on all connections, without discarded bytes.
    pub fn bytes_from_server(&self) -> u64 {
        self.shared.from_server.load(Ordering::SeqCst)
    }

    /// Delays forwarded bytes in both directions.
    pub fn delay(&self, delay: Duration) {
        let millis = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        self.shared.delay_millis.store(millis, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        self.cut();
        // This connection wakes the thread that accepts connections. If the connection fails, that thread has already
        // ended.
        drop(self.shared.netns.run(|| TcpStream::connect(self.address)));
    }
}

impl Shared {
    /// Serves a connection. If the connection cannot be forwarded, the proxy closes the connection, as if the server
    /// were down.
    fn serve(self: &Arc<Self>, client: TcpStream) {
        let Ok(server) = self.connect() else { return };
        // Small writes are forwarded at once, as without a proxy.
        let (Ok(()), Ok(())) = (client.set_nodelay(true), server.set_nodelay(true)) else { return };
        let halves = (client.try_clone(), client.try_clone(), server.try_clone(), server.try_clone());
        let (Ok(client_kept), Ok(client_read), Ok(server_kept), Ok(server_read)) = halves else { return };
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_closed.load(Ordering::SeqCst) {
            return;
        }
        connections.extend([client_kept, server_kept]);
        drop(connections);
        let number = self.accepted.fetch_add(1, Ordering::SeqCst);
        for (from, to, is_server) in [(client_read, server, false), (server_read, client, true)] {
            let shared = Arc::clone(self);
            thread::spawn(move || shared.pass_on(from, to, number, is_server));
        }
    }

    fn connect(&self) -> Result<TcpStream> {
        let connect = || TcpStream::connect(self.server);
        let connected = match &self.server_netns {
            Some(netns) => netns.run(connect)?,
            None => connect(),
        };
        connected.context("connect to the proxy's server")
    }

    fn pass_on(&self, mut from: TcpStream, mut to: TcpStream, number: u64, is_server: bool) {
        let mut buffer = [0; 16 * 1024];
        let is_swallowed = || number < self.swallowed.load(Ordering::SeqCst);
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            if is_swallowed() {
                continue;
            }
            if is_server {
                self.from_server.fetch_add(u64::try_from(length).unwrap_or(u64::MAX), Ordering::SeqCst);
            }
            thread::sleep(Duration::from_millis(self.delay_millis.load(Ordering::SeqCst)));
            if buffer.get(..length).is_none_or(|bytes| to.write_all(bytes).is_err()) {
                break;
            }
        }
        if is_swallowed() {
            return;
        }
        // Shutting down both sockets ends the thread that copies in the other direction.
        drop((from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both)));
    }
}
