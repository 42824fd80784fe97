// SPDX-License-Identifier: Apache-2.0
//! The xDS v3 server: aggregated discovery (ADS), state of the world and delta.
//!
//! Each stream is one task with a session, which is a state machine without I/O. While a client has not read a
//! response, the feed computes no response from new snapshots, so the feed keeps only a few responses in memory for a
//! slow client. Responses with the same version of a Service port share its
//! encoded endpoints.

mod delta;
mod encode;
mod limits;
mod names;
mod request;
mod resources;
mod session;
mod sotw;

#[cfg(test)]
mod served_tests;
#[cfg(test)]
mod tests;

use std::{convert::Infallible, error::Error as _, sync::Arc};

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse as _, Response},
    routing::post,
};
use futures::{StreamExt as _, stream};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

pub use self::names::of as cluster_name;
use self::{
    delta::Delta,
    limits::{Limits, OpenStream},
    request::RequestDecoder,
    session::Session,
    sotw::StateOfTheWorld,
};
use crate::{follow::Published, held::Connection, status::Status};

/// The paths of the two methods of the gRPC service.
const STATE_OF_THE_WORLD: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources";
const DELTA: &str = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources";
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// The state that all streams share.
#[derive(Debug, Clone)]
struct Discovery {
    published: Published,
    status: Arc<Status>,
    limits: Limits,
}

/// Returns the routes of the aggregated discovery service (ADS), for both variants of xDS.
///
/// The feed does not use tonic's server: it would copy each response into a buffer of its own, so clients that do not
/// read their responses would take much memory. `most_names` is the maximum number of names to which all streams
/// together may subscribe.
pub fn router(published: Published, status: Arc<Status>, most_names: usize) -> Router {
    Router::new()
        .route(STATE_OF_THE_WORLD, post(open::<StateOfTheWorld>))
        .route(DELTA, post(open::<Delta>))
        .fallback(|| async { unimplemented("the feed serves only aggregated discovery") })
        .with_state(Discovery { published, status, limits: Limits::new(most_names) })
}

fn unimplemented(reason: &str) -> Response {
    tonic::Status::unimplemented(reason).into_http()
}

/// Opens a stream.
async fn open<S: Session>(
    State(discovery): State<Discovery>,
    Extension(client): Extension<Connection>,
    request: Request,
) -> Response {
    let Discovery { published, status, limits } = discovery;
    if request.headers().get("grpc-encoding").is_some_and(|encoding| encoding != "identity") {
        return unimplemented("the feed reads no compressed requests");
    }
    let Some(stream) = limits.open(&status) else {
        status.count_refused("xds");
        return tonic::Status::resource_exhausted(format!("the feed has {} xDS streams", limits::MOST_STREAMS))
            .into_http();
    };
    let arriving = Arc::new(client.requests());
    let complete = Arc::clone(&arriving);
    let decoder = RequestDecoder::<S::Request, _>::new(move || complete.complete());
    let body = request.into_body().map_frame(move |frame| {
        arriving.arrived(frame.data_ref().map_or(0, Bytes::len));
        frame
    });
    let requests = Streaming::new_request(decoder, body, None, Some(request::LARGEST));
    let (sender, receiver) = mpsc::channel(1);
    let answers = Answers { client, sender };
    let serving = tokio::spawn(serve::<S>(requests, published, status, stream, answers));
    let parts = ReceiverStream::new(receiver).flat_map(stream::iter).map(Frame::data);
    let end = stream::once(async move {
        let end = serving.await.unwrap_or_else(|error| tonic::Status::internal(error.to_string()));
        Frame::trailers(trailers(&end))
    });
    let frames = parts.chain(end).map(Ok::<_, Infallible>);
    ([(header::CONTENT_TYPE, GRPC)], Body::new(StreamBody::new(frames))).into_response()
}

/// Sends responses to the client of a stream.
struct Answers {
    client: Connection,
    sender: mpsc::Sender<Vec<Bytes>>,
}

impl Answers {
    /// Waits until the stream has accepted the previous response, then sends this one. Fails if the client has closed
    /// the stream.
    async fn send(&self, message: Vec<Bytes>) -> Result<(), tonic::Status> {
        self.sender.send(self.client.answer(message)).await.map_err(|_closed| closed_by_client())
    }
}

/// Returns the trailers that end a stream with this status.
fn trailers(end: &tonic::Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    if let Err(error) = end.add_header(&mut trailers) {
        tracing::debug!(%error, "the status of an xDS stream has a text that cannot be sent");
    }
    trailers
}

/// Serves a stream. Returns the status that ends the stream.
async fn serve<S: Session>(
    mut requests: Streaming<S::Request>,
    mut published: Published,
    status: Arc<Status>,
    mut stream: OpenStream,
    answers: Answers,
) -> tonic::Status {
    let mut session = S::default();
    // The stream waits for the first snapshot, because a response without a snapshot would remove all members from the
    // client.
    let first = tokio::select! {
        () = answers.sender.closed() => return closed_by_client(),
        first = published.wait_for(Option::is_some) => first.map(|snapshot| snapshot.clone()),
    };
    let Ok(Some(mut snapshot)) = first else { return ending() };
    loop {
        let responses = tokio::select! {
            // A response is computed only after the stream has accepted the previous response.
            biased;
            () = answers.sender.closed() => return closed_by_client(),
            request = requests.message() => match request {
                Ok(Some(request)) => {
                    let handled = session.on_request(&request, &snapshot);
                    status.count_xds(handled.kind, handled.event);
                    if !stream.set_names(session.names()) {
                        status.count_refused("xds");
                        return too_many_names(&stream);
                    }
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
                let responses = session.on_snapshot(&snapshot);
                // New Services of a wildcard subscription may exceed the limit: only a request is refused.
                stream.set_names(session.names());
                responses
            }
        };
        for (kind, response) in responses {
            status.count_xds(kind, "sent");
            if let Err(closed) = answers.send(response.into_message()).await {
                return closed;
            }
        }
    }
}

fn too_many_names(stream: &OpenStream) -> tonic::Status {
    let most = stream.most_names();
    tonic::Status::resource_exhausted(format!(
        "all xDS streams of the feed subscribe to more than {most} names: raise --xds-names and the memory limit"
    ))
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
