// SPDX-License-Identifier: Apache-2.0
//! An API server for tests, which passes each request to the test and sends the answer that the test chooses.

use std::{convert::Infallible, sync::Arc, time::Duration};

use futures::{StreamExt as _, stream};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Bytes, Frame};
use kube::{Client, client::Body};
use serde_json::{Value, json};
use tokio::time::timeout;
use tower_test::mock::{self, SendResponse};

use crate::metrics::{Counts, DatapathCounters, Metrics};

/// The maximum time to wait for a request. This time exceeds the delays after which the agent retries, so that a test
/// with a paused clock receives the retries.
const LIMIT: Duration = Duration::from_mins(10);

pub(super) type AnswerBody = UnsyncBoxBody<Bytes, Infallible>;

/// Returns the body of an answer that begins with this text and does not end, like the body of a watch.
pub(super) fn without_end(text: impl Into<String>) -> AnswerBody {
    let first = Frame::data(Bytes::from(text.into()));
    StreamBody::new(stream::iter([Ok(first)]).chain(stream::pending())).boxed_unsync()
}

pub(super) struct MockServer(mock::Handle<Request<Body>, Response<AnswerBody>>);

pub(super) struct ReceivedRequest {
    /// The method, the path and the query of the request, as one line of text.
    pub(super) line: String,
    pub(super) content_type: String,
    pub(super) body: Value,
    answer: SendResponse<Response<AnswerBody>>,
}

pub(super) fn api_server() -> (Client, MockServer) {
    let (service, handle) = mock::pair::<Request<Body>, Response<AnswerBody>>();
    (Client::new(service, "default"), MockServer(handle))
}

pub(super) fn metrics() -> Metrics {
    struct NoCounters;
    impl DatapathCounters for NoCounters {
        fn read(&self) -> Counts {
            Counts::default()
        }
    }
    Metrics::new(Arc::new(NoCounters))
}

impl MockServer {
    pub(super) async fn next_request(&mut self) -> ReceivedRequest {
        let (request, answer) = timeout(LIMIT, self.0.next_request()).await.unwrap().unwrap();
        let (parts, body) = request.into_parts();
        let bytes = body.collect_bytes().await.unwrap();
        let content_type = parts.headers.get("content-type").map_or("", |value| value.to_str().unwrap());
        ReceivedRequest {
            line: format!("{} {}", parts.method, parts.uri),
            content_type: content_type.to_owned(),
            body: if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes).unwrap() },
            answer,
        }
    }

    /// Waits until the client is dropped, and fails if the client sends another request.
    pub(super) async fn expect_end(mut self) {
        assert!(timeout(LIMIT, self.0.next_request()).await.unwrap().is_none(), "unexpected request");
    }
}

impl ReceivedRequest {
    pub(super) fn answer(self, status: u16, body: impl Into<String>) {
        self.answer_with_headers(status, &[], body);
    }

    pub(super) fn answer_with_headers(self, status: u16, headers: &[(&str, &str)], body: impl Into<String>) {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        self.answer.send_response(response.body(Full::from(body.into()).boxed_unsync()).unwrap());
    }

    /// Answers with this status, and with this text as the beginning of a body that does not end. The API server
    /// answers a watch in this way.
    pub(super) fn answer_without_end(self, status: u16, body: impl Into<String>) {
        let response = Response::builder().status(status).body(without_end(body));
        self.answer.send_response(response.unwrap());
    }

    pub(super) fn break_connection(self) {
        self.answer.send_error(std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
    }

    /// Leaves the request unanswered for as long as the returned value exists.
    pub(super) fn keep_waiting(self) -> SendResponse<Response<AnswerBody>> {
        self.answer
    }
}

/// Returns a bookmark, the watch event that reports only a new resource version, with these annotations.
pub(super) fn bookmark(version: &str, annotations: &Value) -> Value {
    let metadata = json!({ "resourceVersion": version, "annotations": annotations });
    json!({ "type": "BOOKMARK", "object": { "kind": "Pod", "apiVersion": "v1", "metadata": metadata } })
}

/// Returns the bookmark that ends the initial events of a streaming list.
pub(super) fn end_of_initial_events(version: &str) -> Value {
    bookmark(version, &json!({ "k8s.io/initial-events-end": "true" }))
}

/// Returns the body of an error answer: an object of kind `Status`.
pub(super) fn refusal(code: u16, reason: &str, message: &str) -> String {
    json!({ "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message }).to_string()
}
