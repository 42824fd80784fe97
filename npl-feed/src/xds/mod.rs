// SPDX-License-Identifier: Apache-2.0
//! Serves xDS v3 by the aggregated discovery service (ADS), in both variants: state of the world and delta.
//!
//! Each stream is one task with a session, which is a state machine without I/O. While a client has not read a
//! response, the feed computes no response from new snapshots, so the feed keeps only a few responses in memory for a
//! slow client. Responses with the same version of a Service port share the encoded endpoints of this port.

mod delta;
mod encode;
mod frames;
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

use std::{convert::Infallible, error::Error as _, mem, sync::Arc};

use axum::{
    Extension, Router,
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

pub use self::names::of as cluster_name;
use self::{
    delta::Delta,
    encode::Reply,
    frames::Requests,
    limits::{Limits, OpenStream},
    resources::Kind,
    session::{Session, Subscribed, Trigger},
    sotw::StateOfTheWorld,
};
use crate::{
    client_memory::{self, Connection},
    core::snapshot::Snapshot,
    follow::Published,
    status::{ClientRefusal, Status},
};

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
/// The feed does not use tonic's server, because tonic would copy each response into a separate buffer, so clients that
/// do not read their responses would take much memory. `most_names` is the maximum number of names to which all streams
/// together may subscribe.
pub fn router(published: Published, status: Arc<Status>, most_names: usize) -> Router {
    for kind in Kind::ALL {
        status.create_xds_counter(kind.as_str(), "nack");
    }
    Router::new()
        .route(STATE_OF_THE_WORLD, post(open::<StateOfTheWorld>))
        .route(DELTA, post(open::<Delta>))
        .fallback(|| async { unimplemented("the feed serves only the aggregated discovery service (ADS) of xDS v3") })
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
        return unimplemented("the feed does not read compressed requests: disable compression in the client");
    }
    let Some(stream) = limits.open(&status) else {
        status.count_refused("xds", ClientRefusal::Streams);
        let text = format!("the feed has its maximum of {} open xDS streams: try again later", limits::MOST_STREAMS);
        return tonic::Status::resource_exhausted(text).into_http();
    };
    let requests = Requests::new(request.into_body(), client.incomplete_request());
    let (sender, receiver) = mpsc::channel(1);
    let answers = Answers { _stream: client.stream(), client, sender };
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
    _stream: client_memory::Stream,
}

impl Answers {
    /// Waits until the stream has accepted the previous response, then sends `response`. Fails if the client has closed
    /// the stream.
    async fn send(&self, response: Reply) -> Result<(), tonic::Status> {
        let message = self.client.answer(response.into_message());
        let permit = match self.sender.try_reserve() {
            Ok(permit) => permit,
            Err(_full_or_closed) => {
                let _window = self.client.window();
                self.sender.reserve().await.map_err(|_closed| closed_by_client())?
            }
        };
        permit.send(message);
        Ok(())
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
    requests: Requests<Body>,
    published: Published,
    status: Arc<Status>,
    stream: OpenStream,
    answers: Answers,
) -> tonic::Status {
    let serving = Serving { session: S::default(), status: &status, stream: &stream, answers: &answers };
    tokio::select! {
        biased;
        () = stream.ended() => too_many_names(&stream),
        () = answers.sender.closed() => closed_by_client(),
        end = serving.run(requests, published) => end.unwrap_or_else(|status| status),
    }
}

/// The state of a stream that is being served.
struct Serving<'a, S> {
    session: S,
    status: &'a Status,
    stream: &'a OpenStream,
    answers: &'a Answers,
}

impl<S: Session> Serving<'_, S> {
    /// Answers requests and sends changes. Returns the status that ends the stream.
    async fn run(
        mut self,
        mut requests: Requests<Body>,
        mut published: Published,
    ) -> Result<tonic::Status, tonic::Status> {
        // The stream waits for the first snapshot, because a response without a snapshot would remove all members from
        // the client.
        let first = published.wait_for(Option::is_some).await.map(|snapshot| snapshot.clone());
        let Ok(Some(mut snapshot)) = first else { return Err(ending()) };
        loop {
            // A response is computed only after the stream has accepted the previous response.
            tokio::select! {
                biased;
                request = requests.next() => {
                    let request = request.inspect_err(|error| count_error(error, self.status))?;
                    let Some(request) = request else { return Ok(tonic::Status::ok("")) };
                    self.answer(&request, &snapshot).await?;
                }
                changed = published.changed() => {
                    changed.map_err(|_closed| ending())?;
                    let former = mem::replace(&mut snapshot, published.borrow_and_update().clone().unwrap_or_default());
                    let services = snapshot.services_changed_since(&former);
                    for kind in self.session.kinds() {
                        self.respond(kind, &snapshot, Trigger::Snapshot(&services)).await?;
                    }
                    // New Services of a wildcard subscription may exceed the limit, because the feed refuses only
                    // requests.
                    self.stream.set_names(self.session.names());
                }
            }
        }
    }

    async fn answer(&mut self, request: &S::Request, snapshot: &Snapshot) -> Result<(), tonic::Status> {
        let Subscribed { kind, event, due } = self.session.subscribe(request);
        self.status.count_xds(kind, event);
        // The names are counted both before and after a response is built, because a response to a wildcard
        // subscription adds names.
        self.count_names()?;
        let Some((kind, trigger)) = due else { return Ok(()) };
        self.respond(kind, snapshot, trigger).await?;
        self.count_names()
    }

    fn count_names(&self) -> Result<(), tonic::Status> {
        if self.stream.request_names(self.session.names()) { Ok(()) } else { Err(too_many_names(self.stream)) }
    }

    async fn respond(&mut self, kind: Kind, snapshot: &Snapshot, trigger: Trigger<'_>) -> Result<(), tonic::Status> {
        let Some(response) = self.session.respond(kind, snapshot, trigger) else { return Ok(()) };
        self.status.count_xds(kind.as_str(), "sent");
        self.answers.send(response).await
    }
}

fn too_many_names(stream: &OpenStream) -> tonic::Status {
    let most = stream.most_names();
    tonic::Status::resource_exhausted(format!(
        "all xDS streams together subscribe to more than {most} names: raise --xds-max-names and the memory limit"
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
