// SPDX-License-Identifier: Apache-2.0
//! Reads the requests of a stream. tonic's decoder is not used, because this decoder keeps a buffer with the size of
//! the largest request until the stream ends.

use std::mem;

use axum::body::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::Body;
use prost::{Message, Name};
use tonic::Status;

use super::request::{self, LARGEST};
use crate::client_memory::IncompleteRequest;

/// The length in bytes of the head of a gRPC message: the compression flag, and the length of the content as a 32-bit
/// number.
const HEAD: usize = 5;

/// The requests of a stream.
pub(super) struct Requests<B> {
    body: B,
    /// The bytes of the incomplete request that have arrived.
    buffer: Vec<u8>,
    memory: IncompleteRequest,
}

impl<B> Requests<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    pub(super) const fn new(body: B, memory: IncompleteRequest) -> Self {
        Self { body, buffer: Vec::new(), memory }
    }

    /// Waits for the next request; returns `None` if the client has ended its requests. No byte is lost if the caller
    /// drops the future.
    ///
    /// # Errors
    ///
    /// Returns the status that ends the stream if the request is malformed, too large or incomplete. The status has a
    /// source error if the connection was interrupted.
    pub(super) async fn next<T: Message + Name + Default>(&mut self) -> Result<Option<T>, Status> {
        loop {
            if let Some(message) = self.take_message()? {
                return request::decode(message.get(HEAD..).unwrap_or_default()).map(Some);
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.append(&data);
                    }
                }
                Some(Err(error)) => return Err(Status::from_error(error.into())),
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(Status::internal("unexpected EOF: the requests end within a message")),
            }
        }
    }

    /// Appends received bytes. The buffer grows by doubling, but not beyond the end of the incomplete request, unless
    /// bytes of the next request have arrived.
    fn append(&mut self, data: &[u8]) {
        let needed = self.buffer.len() + data.len();
        if needed > self.buffer.capacity() {
            let end = self.declared_length().map_or(HEAD, |length| HEAD + length.min(LARGEST));
            let capacity = needed.max(end.min(2 * self.buffer.capacity()));
            self.buffer.reserve_exact(capacity - self.buffer.len());
        }
        self.buffer.extend_from_slice(data);
        self.memory.set(self.buffer.capacity());
    }

    /// Returns the length of the incomplete request, if the length has arrived.
    fn declared_length(&self) -> Option<usize> {
        let [_, length @ ..] = self.buffer.first_chunk::<HEAD>()?;
        Some(usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX))
    }

    /// Takes a complete message with its head out of the buffer.
    fn take_message(&mut self) -> Result<Option<Vec<u8>>, Status> {
        let (Some(flag), Some(length)) = (self.buffer.first(), self.declared_length()) else { return Ok(None) };
        match flag {
            0 => {}
            1 => return Err(Status::internal("the message is compressed, although no grpc-encoding was given")),
            flag => return Err(Status::internal(format!("the message has the invalid compression flag {flag}"))),
        }
        if length > LARGEST {
            let text = format!("the message is too large: it has {length} bytes, and the limit is {LARGEST}");
            return Err(Status::out_of_range(text));
        }
        if self.buffer.len() < HEAD + length {
            return Ok(None);
        }
        let rest = self.buffer.split_off(HEAD + length);
        let message = mem::replace(&mut self.buffer, rest);
        self.memory.set(self.buffer.capacity());
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, sync::Arc};

    use futures::{FutureExt as _, StreamExt as _, stream};
    use http_body_util::StreamBody;
    use hyper::body::Frame;

    use super::{super::request::StateOfTheWorldRequest, *};
    use crate::{client_memory::ClientMemory, status::Interface};

    fn message(nonce: &str) -> Vec<u8> {
        let request = StateOfTheWorldRequest { response_nonce: nonce.to_owned(), ..Default::default() };
        let content = request.encode_to_vec();
        [&[0][..], &u32::try_from(content.len()).unwrap().to_be_bytes(), &content].concat()
    }

    /// Reads requests that arrive in frames of this size. Returns the nonces of the requests, and the number of bytes
    /// that are in memory after the last frame.
    fn read(bytes: &[u8], size: usize) -> (Vec<String>, usize) {
        let memory = ClientMemory::default();
        let client = memory.connect(Interface::Xds, Arc::default());
        let frame = |part| Ok::<_, Infallible>(Frame::data(Bytes::copy_from_slice(part)));
        let frames: Vec<_> = bytes.chunks(size).map(frame).collect();
        let body = StreamBody::new(stream::iter(frames).chain(stream::pending()));
        let mut requests = Requests::new(body, client.incomplete_request());
        let mut nonces = Vec::new();
        while let Some(request) = requests.next::<StateOfTheWorldRequest>().now_or_never() {
            nonces.push(request.unwrap().unwrap().response_nonce);
        }
        (nonces, memory.bytes())
    }

    #[test]
    fn requests_arrive_in_frames_of_any_size() {
        let long = "x".repeat(3000);
        let all = [message("1"), message(""), message(&long), message("4")].concat();
        for size in [1, 2, 5, 7, 100, all.len()] {
            let (nonces, bytes) = read(&all, size);
            assert_eq!(nonces, ["1", "", &long, "4"], "frames of {size} bytes");
            assert_eq!(bytes, 0, "no memory is reserved between two requests");
        }
    }

    #[test]
    fn a_large_incomplete_request_takes_at_most_its_length() {
        let whole = message(&"x".repeat(1_100_000));
        let (nonces, bytes) = read(&whole[..1_090_000], 16_384);
        assert!(nonces.is_empty());
        assert!((1_090_000..=whole.len()).contains(&bytes), "{bytes}");
    }

    #[test]
    fn only_an_incomplete_request_takes_memory() {
        let all = [message(&"x".repeat(100_000)), message("2"), message("3")[..6].to_vec()].concat();
        let (nonces, bytes) = read(&all, 16_384);
        assert_eq!(nonces.len(), 2);
        assert!((6..1000).contains(&bytes), "{bytes} bytes for 6 bytes of an incomplete request");
    }
}
