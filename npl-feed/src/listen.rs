// SPDX-License-Identifier: Apache-2.0
//! Accepts connections to the HTTP and xDS interfaces, with or without TLS, by HTTP/1.1 and HTTP/2. Applies the allow
//! list and the connection limit to each connection.

use std::{
    collections::VecDeque,
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, Once},
    time::Duration,
};

use axum::{Extension, Router};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use ipnet::IpNet;
use npl_agent::core::pages;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::watch,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, ServerConnection},
};
use tower::Layer as _;
use tracing::{debug, info, warn};

use crate::{
    access,
    client_memory::{ClientMemory, Connection, WINDOW},
    connection_limits::ConnectionLimits,
    stall::StallLimit,
    status::{ClientRefusal, Interface, Status},
};

/// The longest duration of a connection from a client outside the allow list.
const PROBE: Duration = Duration::from_secs(5);
/// The timeout of the TLS handshake, of the reception of an HTTP/1.1 request's header, and of the answer to an HTTP/2
/// ping.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The interval of HTTP/2 keepalive pings. The feed closes the connection of a client that does not answer the pings.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// The maximum number of concurrent streams of one HTTP/2 connection to the HTTP interface. The feed resets further
/// streams. HTTP clients use one stream for each long poll.
const MOST_STREAMS: u32 = 16;
/// The maximum number of concurrent streams of one HTTP/2 connection to the xDS interface. Load balancers and gRPC
/// clients use one stream for each connection.
const MOST_XDS_STREAMS: u32 = 4;
/// The maximum number of bytes that are buffered for the client of one HTTP/2 stream.
const SEND_BUFFER: usize = 64 * 1024;
/// The maximum size of the headers of an HTTP/2 request in bytes.
const LONGEST_HEADERS: u32 = 8 * 1024;
/// The size of the buffer for the headers of an HTTP/1.1 request in bytes.
const HEADER_BUFFER: usize = 16 * 1024;
/// The maximum size of a connection's buffer for encrypted data in bytes.
const TLS_BUFFER: usize = 16 * 1024;
/// The sizes of the kernel's buffers for a connection in bytes. The kernel's memory for connections counts as memory of
/// the feed's container. The kernel doubles these values for its own data.
const KERNEL_SEND_BUFFER: u32 = 128 * 1024;
const KERNEL_RECEIVE_BUFFER: u32 = 64 * 1024;
/// The number of connections that the kernel queues until the feed accepts them.
const BACKLOG: u32 = 1024;
/// The pause after a failed `accept`. The call fails, for example, if the kernel has no memory for a socket.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The receiver of the current TLS configuration; `None` if the feed serves without TLS.
pub type Tls = Option<watch::Receiver<Arc<ServerConfig>>>;

/// Binds a socket. If the address is `[::]`, the default of the command line, and the machine has no IPv6, the socket
/// is bound to `0.0.0.0`. `logged` limits the log about this fallback to one line for all interfaces.
///
/// # Errors
///
/// Returns an error if the address cannot be bound.
pub async fn bind_with<T>(
    address: SocketAddr,
    logged: &Once,
    bind: impl AsyncFn(SocketAddr) -> io::Result<T>,
) -> io::Result<T> {
    match bind(address).await {
        Err(error) if address.ip() == Ipv6Addr::UNSPECIFIED && error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {
            logged.call_once(|| {
                info!("the kernel has no IPv6: the feed listens on 0.0.0.0 instead of [::]");
            });
            bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()))).await
        }
        bound => bound,
    }
}

/// Returns the maximum number of concurrent streams of one HTTP/2 connection.
const fn most_streams(interface: Interface) -> u32 {
    match interface {
        Interface::Http => MOST_STREAMS,
        Interface::Xds => MOST_XDS_STREAMS,
    }
}

/// Opens a listening socket whose connections have kernel buffers of a limited size.
fn open_socket(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.set_send_buffer_size(KERNEL_SEND_BUFFER)?;
    socket.set_recv_buffer_size(KERNEL_RECEIVE_BUFFER)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// The part of a listener's configuration and state that the HTTP and the xDS interface share.
#[derive(Debug, Clone)]
pub struct Shared {
    /// The allow list. If the list is empty, all clients are admitted.
    pub allowed: Arc<[IpNet]>,
    /// The TLS configuration.
    pub tls: Tls,
    /// Counts refused clients.
    pub status: Arc<Status>,
    /// Limits the memory for the clients of all listeners.
    pub memory: ClientMemory,
    /// The maximum numbers of connections.
    pub limits: ConnectionLimits,
}

/// A listening TCP socket of one of the feed's interfaces.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    interface: Interface,
    shared: Shared,
}

impl Listener {
    /// Binds the socket to an address.
    ///
    /// # Errors
    ///
    /// Returns an error if the address is in use or not configured on this machine.
    pub fn bind(address: SocketAddr, interface: Interface, shared: Shared) -> io::Result<Self> {
        Ok(Self { socket: open_socket(address)?, interface, shared })
    }

    /// Returns the address to which the socket is bound.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel does not report the address.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Serves connections until the future is dropped. Clients outside the allow list can request only the routes of
    /// `probes`, so that the allow list need not contain the kubelet's addresses. If `probes` is `None`, the
    /// connections of these clients are closed.
    #[expect(clippy::infinite_loop, reason = "the caller drops the future to end the loop")]
    pub async fn serve(self, router: Router, probes: Option<Router>) {
        let Shared { allowed, status, limits, .. } = &self.shared;
        let mut open = NewestConnections::new(match self.interface {
            Interface::Http => limits.http,
            Interface::Xds => limits.xds,
        });
        let mut open_probes = NewestConnections::new(limits.probes);
        loop {
            let (stream, peer) = match self.socket.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    warn!(see = pages::url(pages::FEED_FAILURES), interface = self.interface.as_str(), %error, "accept() failed for a connection; the feed continues to accept connections");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let refusal = if access::admits(allowed, peer.ip()) {
                self.spawn(stream, &router, &mut open).await.then_some(ClientRefusal::Connections)
            } else if let Some(probes) = &probes {
                open_probes.make_room(|()| true).await;
                open_probes.spawn((), timeout(PROBE, self.connection(stream, &self.client(), probes.clone())));
                None
            } else {
                Some(ClientRefusal::Allow)
            };
            if let Some(refusal) = refusal {
                status.count_refused(self.interface.as_str(), refusal);
                debug!(
                    interface = self.interface.as_str(), %peer,
                    "a connection was closed: too many are open, or --allow excludes the peer"
                );
            }
        }
    }

    /// Serves the connection of an admitted client. Returns whether this connection or another connection was closed
    /// because the interface has its maximum number of connections. An open xDS stream is not ended for a new
    /// connection.
    async fn spawn(&self, stream: TcpStream, router: &Router, open: &mut NewestConnections<Connection>) -> bool {
        let room = match self.interface {
            Interface::Http => open.make_room(|_any| true).await,
            Interface::Xds => open.make_room(|client| !client.has_streams()).await,
        };
        if room != Room::None {
            let client = self.client();
            open.spawn(client.clone(), self.connection(stream, &client, router.clone()));
        }
        room != Room::Free
    }

    fn client(&self) -> Connection {
        self.shared.memory.connect(self.interface, Arc::clone(&self.shared.status))
    }

    /// Serves a connection until the client closes the connection, or until the feed needs the connection's memory for
    /// other clients.
    fn connection(
        &self,
        stream: TcpStream,
        client: &Connection,
        router: Router,
    ) -> impl Future<Output = ()> + Send + use<> {
        let tls = self.shared.tls.as_ref().map(|tls| TlsAcceptor::from(Arc::clone(&tls.borrow())));
        let client = client.clone();
        async move {
            tokio::select! {
                () = client.closed() => {
                    debug!("connection closed to free memory: an answer stayed unread or a request incomplete");
                }
                () = connection(stream, tls, router, client.clone()) => {}
            }
        }
    }
}

/// The tasks of connections, the oldest first, each with a value by which the caller decides whether the task may be
/// ended.
pub(crate) struct NewestConnections<T> {
    limit: usize,
    tasks: VecDeque<(JoinHandle<()>, T)>,
}

/// The room for a further connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// The number of connections is below the limit.
    Free,
    /// A connection was closed.
    Made,
    /// No connection may be closed.
    None,
}

impl<T> NewestConnections<T> {
    pub(crate) const fn new(limit: usize) -> Self {
        Self { limit, tasks: VecDeque::new() }
    }

    /// Makes room for a further task: if the number of running tasks has reached the limit, ends the oldest task whose
    /// value meets the condition.
    pub(crate) async fn make_room(&mut self, may_close: impl Fn(&T) -> bool) -> Room {
        self.tasks.retain(|(task, _)| !task.is_finished());
        if self.tasks.len() < self.limit {
            Room::Free
        } else if self.close_oldest(may_close).await {
            Room::Made
        } else {
            Room::None
        }
    }

    /// Starts the task of a connection. The caller must have called [`Self::make_room`].
    pub(crate) fn spawn<R: Send + 'static>(&mut self, value: T, connection: impl Future<Output = R> + Send + 'static) {
        let task = tokio::spawn(async move { drop(connection.await) });
        self.tasks.push_back((task, value));
    }

    /// Ends the oldest task whose value meets the condition. Returns whether there was such a task.
    async fn close_oldest(&mut self, may_close: impl Fn(&T) -> bool) -> bool {
        let oldest = self.tasks.iter().position(|(task, value)| !task.is_finished() && may_close(value));
        let Some((task, _)) = oldest.and_then(|position| self.tasks.remove(position)) else { return false };
        task.abort();
        // The connection keeps its file descriptor until the task has ended.
        drop(task.await);
        true
    }
}

async fn connection(stream: TcpStream, tls: Option<TlsAcceptor>, router: Router, client: Connection) {
    if let Err(error) = stream.set_nodelay(true) {
        debug!(%error, "TCP_NODELAY could not be set");
    }
    let stream = StallLimit::new(stream);
    match tls {
        None => requests(stream, router, client).await,
        Some(tls) => match timeout(HANDSHAKE, tls.accept_with(stream, limit_tls_buffer)).await {
            Ok(Ok(stream)) => requests(stream, router, client).await,
            Ok(Err(error)) => debug!(%error, "a TLS handshake failed"),
            Err(_late) => debug!("a TLS handshake took too long"),
        },
    }
}

fn limit_tls_buffer(connection: &mut ServerConnection) {
    connection.set_buffer_limit(Some(TLS_BUFFER));
}

/// Serves the requests of a connection. Each request has the [`Connection`] as an extension.
async fn requests(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, router: Router, client: Connection) {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HANDSHAKE).max_buf_size(HEADER_BUFFER);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(HANDSHAKE)
        .initial_connection_window_size(WINDOW)
        .initial_stream_window_size(WINDOW)
        .max_header_list_size(LONGEST_HEADERS)
        .max_concurrent_streams(most_streams(client.interface()))
        .max_send_buf_size(SEND_BUFFER);
    let service = TowerToHyperService::new(Extension(client).layer(router));
    if let Err(error) = builder.serve_connection(TokioIo::new(stream), service).await {
        debug!(%error, "a connection ended with an error");
    }
}

#[cfg(test)]
#[path = "listen_tests.rs"]
mod tests;
