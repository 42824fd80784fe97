// SPDX-License-Identifier: Apache-2.0
//! The xDS v3 server: aggregated discovery (ADS), state of the world and delta.
//!
//! Each stream is one task with a session, which is a state machine without I/O. While a client has not read a
//! response, the feed computes no response from new snapshots, so the feed keeps only a few responses in memory for a
//! slow client. Responses with the same version of a Service port share its
//! encoded endpoints.

mod delta;
mod encode;
mod names;
mod resources;
mod session;
mod sotw;

#[cfg(test)]
mod served_tests;
#[cfg(test)]
mod tests;

use std::{convert::Infallible, error::Error as _, marker::PhantomData, sync::Arc};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse as _, Response},
    routing::post,
};
use futures::{StreamExt as _, stream};
use http_body_util::StreamBody;
use hyper::body::Frame;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Streaming,
    codec::{DecodeBuf, Decoder},
};

pub use self::names::of as cluster_name;
use self::{delta::Delta, session::Session, sotw::StateOfTheWorld};
use crate::{follow::Published, status::Status};

/// The maximum size of a request in bytes, enough for a list of some ten thousand names.
const LARGEST_REQUEST: usize = 1024 * 1024;
/// The paths of the two methods of the gRPC service.
const STATE_OF_THE_WORLD: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
const DELTA: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// The state that all streams share.
#[derive(Debug, Clone)]
struct Discovery {
    published: Published,
    status: Arc<Status>,
}

/// Returns the routes of the aggregated discovery service (ADS), for both variants of xDS.
///
/// The feed does not use tonic's server: it would copy each response into a buffer of its own, so clients that do not
/// read their responses would take much memory.
pub fn router(published: Published, status: Arc<Status>) -> Router {
    Router::new()
        .route(STATE_OF_THE_WORLD, post(open::<StateOfTheWorld>))
        .route(DELTA, post(open::<Delta>))
        .fallback(|| async { unimplemented("the feed serves only aggregated discovery") })
        .with_state(Discovery { published, status })
}

fn unimplemented(reason: &str) -> Response {
    tonic::Status::unimplemented(reason).into_http()
}

/// Opens a stream.
async fn open<S: Session>(State(discovery): State<Discovery>, request: Request) -> Response {
    if request.headers().get("grpc-encoding").is_some_and(|encoding| encoding != "identity") {
        return unimplemented("the feed reads no compressed requests");
    }
    let decoder = RequestDecoder::<S::Request>(PhantomData);
    let requests = Streaming::new_request(decoder, request.into_body(), None, Some(LARGEST_REQUEST));
    let (sender, receiver) = mpsc::channel(1);
    let serving = tokio::spawn(serve::<S>(requests, discovery.published, discovery.status, sender));
    let parts = ReceiverStream::new(receiver).flat_map(stream::iter).map(Frame::data);
    let end = stream::once(async move {
        let end = serving.await.unwrap_or_else(|error| tonic::Status::internal(error.to_string()));
        Frame::trailers(trailers(&end))
    });
    let frames = parts.chain(end).map(Ok::<_, Infallible>);
    ([(header::CONTENT_TYPE, GRPC)], Body::new(StreamBody::new(frames))).into_response()
}

/// Returns the trailers that end a stream with this status.
fn trailers(end: &tonic::Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    if let Err(error) = end.add_header(&mut trailers) {
        tracing::debug!(%error, "the status of an xDS stream has a text that cannot be sent");
    }
    trailers
}

/// Decodes the requests of a stream.
struct RequestDecoder<T>(PhantomData<T>);

impl<T: prost::Message + prost::Name + Default> Decoder for RequestDecoder<T> {
    type Item = T;
    type Error = tonic::Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<T>, tonic::Status> {
        T::decode(buffer)
            .map(Some)
            .map_err(|error| tonic::Status::internal(format!("the message is no {}: {error}", T::NAME)))
    }
}

/// Counts an xDS stream as open until this value is dropped.
struct OpenStream(Arc<Status>);

impl OpenStream {
    fn new(status: &Arc<Status>) -> Self {
        status.add_xds_stream(1);
        Self(Arc::clone(status))
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.add_xds_stream(-1);
    }
}

/// Serves a stream. Returns the status that ends the stream.
async fn serve<S: Session>(
    mut requests: Streaming<S::Request>,
    mut published: Published,
    status: Arc<Status>,
    sender: mpsc::Sender<Vec<Bytes>>,
) -> tonic::Status {
    let _open = OpenStream::new(&status);
    let mut session = S::default();
    // The stream waits for the first snapshot, because a response without a snapshot would remove all members from the
    // client.
    let first = tokio::select! {
        () = sender.closed() => return closed_by_client(),
        first = published.wait_for(Option::is_some) => first.map(|snapshot| snapshot.clone()),
    };
    let Ok(Some(mut snapshot)) = first else { return ending() };
    loop {
        let responses = tokio::select! {
            // A response is computed only after the stream has accepted the previous response.
            biased;
            () = sender.closed() => return closed_by_client(),
            request = requests.message() => match request {
                Ok(Some(request)) => {
                    let handled = session.on_request(&request, &snapshot);
                    status.count_xds(handled.kind, handled.event);
                    handled.response.into_iter().collect()
                }
                Ok(None) => return tonic::Status::ok(""),
                Err(error) => {
                    count_error(&error, &status);
                    return error;
                }
            },
            changed = published.changed() => {
                if changed.is_err() {
                    return ending();
                }
                let latest = published.borrow_and_update().clone();
                snapshot = latest.unwrap_or_default();
                session.on_snapshot(&snapshot)
            }
        };
        for (kind, response) in responses {
            status.count_xds(kind, "sent");
            if sender.send(response.into_message()).await.is_err() {
                return closed_by_client();
            }
        }
    }
}

/// Counts and logs a request that the feed cannot read. Interrupted connections, whose errors have a source, are only
/// logged.
fn count_error(error: &tonic::Status, status: &Status) {
    if error.source().is_none() {
        status.count_xds("unknown", "malformed");
    }
    tracing::debug!(%error, "an xDS stream ended with an error");
}

fn closed_by_client() -> tonic::Status {
    tonic::Status::cancelled("the client has closed the stream")
}

fn ending() -> tonic::Status {
    tonic::Status::unavailable("the feed is ending")
}
