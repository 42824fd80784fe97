// SPDX-License-Identifier: Apache-2.0
//! The xDS v3 server: aggregated discovery (ADS), state of the world and delta.
//!
//! Each stream is one task with a session, which is a state machine without I/O. While a client has not read a
//! response, the feed computes no response from new snapshots, so the feed keeps only a few responses in memory for a
//! slow client.

mod delta;
mod names;
mod resources;
mod session;
mod sotw;

#[cfg(test)]
mod served_tests;
#[cfg(test)]
mod tests;

use std::{pin::Pin, sync::Arc};

use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
    aggregated_discovery_service_server::{AggregatedDiscoveryService, AggregatedDiscoveryServiceServer},
};
use futures::{Stream, StreamExt as _};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Streaming};

pub use self::names::of as cluster_name;
use self::{delta::Delta, session::Session, sotw::StateOfTheWorld};
use crate::{follow::Published, status::Status};

/// The maximum size of a request in bytes, enough for a list of some ten thousand names.
const LARGEST_REQUEST: usize = 1024 * 1024;

/// The responses of one xDS stream.
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, tonic::Status>> + Send>>;

/// The aggregated discovery service (ADS), for both variants of xDS.
#[derive(Debug, Clone)]
pub struct Discovery {
    published: Published,
    status: Arc<Status>,
}

/// Creates the gRPC service of aggregated discovery.
pub fn service(published: Published, status: Arc<Status>) -> AggregatedDiscoveryServiceServer<Discovery> {
    AggregatedDiscoveryServiceServer::new(Discovery { published, status })
        .max_decoding_message_size(LARGEST_REQUEST)
        .max_encoding_message_size(usize::MAX)
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Discovery {
    type StreamAggregatedResourcesStream = Answers<DiscoveryResponse>;
    type DeltaAggregatedResourcesStream = Answers<DeltaDiscoveryResponse>;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, tonic::Status> {
        Ok(Response::new(self.start::<StateOfTheWorld>(request.into_inner())))
    }

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, tonic::Status> {
        Ok(Response::new(self.start::<Delta>(request.into_inner())))
    }
}

impl Discovery {
    fn start<S: Session>(&self, requests: Streaming<S::Request>) -> Answers<S::Response> {
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(serve::<S>(requests, self.published.clone(), Arc::clone(&self.status), sender));
        ReceiverStream::new(receiver).boxed()
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

async fn serve<S: Session>(
    mut requests: Streaming<S::Request>,
    mut published: Published,
    status: Arc<Status>,
    sender: mpsc::Sender<Result<S::Response, tonic::Status>>,
) {
    let _open = OpenStream::new(&status);
    let mut session = S::default();
    // The stream waits for the first snapshot, because a response without a snapshot would remove all members from the
    // client.
    let first = tokio::select! {
        () = sender.closed() => return,
        first = published.wait_for(Option::is_some) => first.map(|snapshot| snapshot.clone()),
    };
    let Ok(Some(mut snapshot)) = first else { return };
    loop {
        let responses = tokio::select! {
            // A response is computed only after the stream has accepted the previous response.
            biased;
            () = sender.closed() => return,
            request = requests.message() => match request {
                Ok(Some(request)) => {
                    let handled = session.on_request(&request, &snapshot);
                    status.count_xds(handled.kind, handled.event);
                    handled.response.into_iter().collect()
                }
                Ok(None) => return,
                Err(error) => {
                    status.count_xds("unknown", "malformed");
                    tracing::debug!(%error, "an xDS stream ended with an error");
                    return;
                }
            },
            changed = published.changed() => {
                if changed.is_err() {
                    return;
                }
                let latest = published.borrow_and_update().clone();
                snapshot = latest.unwrap_or_default();
                session.on_snapshot(&snapshot)
            }
        };
        for (kind, response) in responses {
            status.count_xds(kind, "sent");
            if sender.send(Ok(response)).await.is_err() {
                return;
            }
        }
    }
}
