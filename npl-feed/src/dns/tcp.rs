// SPDX-License-Identifier: Apache-2.0
//! Serves DNS by TCP, in place of hickory's own TCP server, which limits neither the number of connections, nor the
//! memory that a client reserves by announcing a long query.

use std::{io, net::SocketAddr, time::Duration};

use hickory_server::net::xfer::Protocol;
use npl_agent::core::pages;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tracing::{debug, warn};

use super::{Handler, INTERFACE};
use crate::{
    access,
    listen::{ACCEPT_PAUSE, NewestConnections, Room},
    status::ClientRefusal,
};

/// The maximum size of a query in bytes. A query with one question and EDNS0 options is much shorter.
const LONGEST_QUERY: u16 = 4096;
/// The time limit from one answer, or from the start of the connection, until the client has sent its next query and
/// the answer to this query is in the send buffer. A connection that exceeds the limit is closed.
const IDLE_CONNECTION: Duration = Duration::from_secs(10);

/// Accepts connections until the future is dropped. If a new connection exceeds `limit`, the feed closes the oldest
/// connection, so that idle connections do not exclude other clients. The client of the closed connection connects
/// again if it has further queries.
pub(super) async fn serve(listener: TcpListener, handler: Handler, limit: usize) -> ! {
    let mut open = NewestConnections::new(limit);
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(see = pages::url(pages::FEED_FAILURES), interface = INTERFACE, %error, "accept() failed for a connection; the feed continues to accept connections");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let refusal = if access::admits(&handler.allowed, peer.ip()) {
            let room = open.make_room(|()| true).await;
            open.spawn((), connection(stream, peer, handler.clone()));
            (room == Room::Made).then_some(ClientRefusal::Connections)
        } else {
            Some(ClientRefusal::Allow)
        };
        if let Some(refusal) = refusal {
            handler.status.count_refused(INTERFACE, refusal);
            debug!(interface = INTERFACE, %peer, "a new connection was refused, or has replaced the oldest one");
        }
    }
}

/// Answers one query after the other: the server reads a query only after the previous answer is in the send buffer.
async fn connection(mut stream: TcpStream, peer: SocketAddr, handler: Handler) {
    // The length of an answer is written before the answer, and must not wait for the client's acknowledgement.
    if let Err(error) = stream.set_nodelay(true) {
        debug!(%error, "TCP_NODELAY could not be set");
    }
    loop {
        match timeout(IDLE_CONNECTION, exchange(&mut stream, peer, &handler)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return debug!(%peer, %error, "a DNS connection ended"),
            Err(_late) => return debug!(%peer, "a DNS connection exceeded its time limit"),
        }
    }
}

async fn exchange(stream: &mut TcpStream, peer: SocketAddr, handler: &Handler) -> io::Result<()> {
    let length = stream.read_u16().await?;
    if length > LONGEST_QUERY {
        return Err(io::Error::other("the query is too long"));
    }
    let mut query = vec![0; usize::from(length)];
    stream.read_exact(&mut query).await?;
    let answer = handler.respond(&query, peer, Protocol::Tcp);
    let answer = answer.ok_or_else(|| io::Error::other("the message is not a query"))?;
    let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_be_bytes()).await?;
    stream.write_all(&answer).await
}
