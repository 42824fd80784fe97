// SPDX-License-Identifier: Apache-2.0
//! Ends connections that accept no data for [`LIMIT`], because the client has stopped reading. Without this time limit,
//! many such clients could each make the feed keep a different version of an answer in its memory.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

/// The longest time for which a TCP connection may accept no data while the feed has data for the client.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// A TCP connection on which a write fails if the connection accepts no data for [`LIMIT`]. With TLS, this stream must
/// be below the TLS stream, because a TLS stream may report that a write waits although the TCP connection has made
/// progress.
#[derive(Debug)]
pub(crate) struct StallLimit<S> {
    stream: S,
    /// The end of the time limit; `None` while no write waits for the client.
    end: Option<Pin<Box<Sleep>>>,
}

impl<S> StallLimit<S> {
    pub(crate) const fn new(stream: S) -> Self {
        Self { stream, end: None }
    }

    /// Starts the time limit when a write, a flush or the shutdown has to wait, and ends the time limit when one of
    /// them makes progress.
    fn limit<T>(&mut self, written: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.end = None;
            return written;
        }
        let end = self.end.get_or_insert_with(|| Box::pin(sleep(LIMIT)));
        end.as_mut()
            .poll(context)
            .map(|()| Err(io::Error::new(io::ErrorKind::TimedOut, "the connection accepts no data")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallLimit<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallLimit<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limit(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.limit(written, context)
    }

    /// Without vectored writes, hyper would copy the answers that many clients share.
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.limit(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut_down = Pin::new(&mut self.stream).poll_shutdown(context);
        self.limit(shut_down, context)
    }
}
