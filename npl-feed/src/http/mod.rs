// SPDX-License-Identifier: Apache-2.0
//! Serves the HTTP interface: members as JSON, and in the formats of Consul, Traefik and Prometheus.

mod consul;
mod members;
mod poll;
mod prometheus;
mod traefik;
mod view;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    extract::{FromRequestParts, Path, Request, State},
    http::{HeaderName, HeaderValue, StatusCode, header, request::Parts},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};

use http_body_util::BodyExt as _;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, SemaphorePermit};

pub use self::members::Interfaces;
use self::{
    poll::{Etags, Poll},
    view::{Cache, View},
};
use crate::{
    access::Token,
    client_memory::{Connection, Part},
    core::snapshot::Version,
    follow::Published,
    status::{ClientRefusal, Status},
};

/// The `OpenAPI` description of the HTTP interface. Tests check that routes and answers match the description.
pub const OPENAPI: &str = include_str!("openapi.json");

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const METRICS: HeaderValue = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// The maximum number of long polls that wait for a change. Further long polls are answered at once.
const MOST_WAITING: usize = 4096;

/// The state that all HTTP handlers share.
#[derive(Debug, Clone)]
struct Context {
    published: Published,
    status: Arc<Status>,
    cache: Arc<Cache>,
    interfaces: Arc<Interfaces>,
    /// The version of the representation of the members, see [`Interfaces::version`].
    representation: Version,
    waiting: Arc<Semaphore>,
}

impl Context {
    /// Returns a permit with which a long poll may wait; `None` if too many long polls wait already.
    fn permit_to_wait(&self) -> Option<SemaphorePermit<'_>> {
        let permit = self.waiting.try_acquire().ok();
        if permit.is_none() {
            self.status.count_refused("http", ClientRefusal::Requests);
        }
        permit
    }
}

/// Returns the routes for admitted clients. If a token is configured, all routes except the probes require the token.
pub fn router(published: Published, status: Arc<Status>, interfaces: Interfaces, token: Option<Token>) -> Router {
    let context = Context {
        published,
        status,
        cache: Arc::default(),
        representation: interfaces.version(),
        interfaces: Arc::new(interfaces),
        waiting: Arc::new(Semaphore::new(MOST_WAITING)),
    };
    let mut data = Router::new()
        .route("/v1/members", get(all_members))
        .route("/v1/members/{namespace}/{service}", get(service_members))
        .route("/v1/members/{namespace}/{service}/{port}", get(port_members))
        .route("/v1/catalog/services", get(consul_services))
        .route("/v1/health/service/{name}", get(consul_health))
        .route("/traefik", get(traefik))
        .route("/v1/http_sd", get(http_sd))
        .route("/openapi.json", get(|| async { ([(header::CONTENT_TYPE, JSON)], OPENAPI) }))
        .route("/metrics", get(metrics))
        .method_not_allowed_fallback(method_not_allowed);
    if let Some(token) = token {
        data = data.layer(middleware::from_fn_with_state(token, Token::check));
    }
    data.route("/healthz", get(|| async { "ok\n" }).fallback(method_not_allowed))
        .route("/readyz", get(readyz).fallback(method_not_allowed))
        .fallback(|| async { problem(StatusCode::NOT_FOUND, "no such path: see /openapi.json") })
        .layer(middleware::from_fn_with_state(context.clone(), count_and_register))
        .with_state(context)
}

/// Returns the routes for clients outside the allow list: the probes, which require no token and whose answers contain
/// no details.
pub fn probes(published: Published, status: Arc<Status>) -> Router {
    let readiness = move || {
        let is_ready = published.borrow().is_some();
        async move { if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE } }
    };
    let refusal = move || {
        status.count_refused("http", ClientRefusal::Allow);
        async { StatusCode::FORBIDDEN }
    };
    Router::new().route("/healthz", get(|| async { StatusCode::OK })).route("/readyz", get(readiness)).fallback(refusal)
}

/// Counts an answer, and registers the answer's body until the client has read the body.
async fn count_and_register(State(context): State<Context>, request: Request, next: Next) -> Response {
    let client = request.extensions().get::<Connection>().cloned();
    let response = next.run(request).await;
    context.status.count_http(match response.status().as_u16() {
        ..300 => "2xx",
        300..400 => "3xx",
        400..500 => "4xx",
        _ => "5xx",
    });
    let Some(client) = client else { return response };
    let (head, body) = response.into_parts();
    // All bodies of this interface are in memory, so `collect` neither waits nor copies.
    let Ok(body) = body.collect().await else { return StatusCode::INTERNAL_SERVER_ERROR.into_response() };
    let mut parts = client.answer(vec![Part::Shared(body.to_bytes())]);
    Response::from_parts(head, parts.pop().map_or_else(Body::empty, Body::from))
}

/// The names in the path. If a name is malformed, the request gets an answer with the status code 400.
struct Names<T>(T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Names<T> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        let path = Path::<T>::from_request_parts(parts, state).await;
        path.map(|Path(names)| Self(names)).map_err(|rejection| problem(rejection.status(), &rejection.body_text()))
    }
}

async fn method_not_allowed() -> Response {
    problem(StatusCode::METHOD_NOT_ALLOWED, "the feed only answers GET and HEAD")
}

async fn all_members(State(context): State<Context>, poll: Poll, etags: Etags) -> Response {
    poll.answer(&context, &etags, &View::Members).await
}

async fn service_members(
    State(context): State<Context>,
    Names((namespace, service)): Names<(String, String)>,
    poll: Poll,
    etags: Etags,
) -> Response {
    poll.answer(&context, &etags, &View::Service { namespace, service }).await
}

async fn port_members(
    State(context): State<Context>,
    Names((namespace, service, port)): Names<(String, String, String)>,
    poll: Poll,
    etags: Etags,
) -> Response {
    poll.answer(&context, &etags, &View::Port { namespace, service, port }).await
}

async fn consul_services(State(context): State<Context>, poll: Poll, etags: Etags) -> Response {
    poll.answer(&context, &etags, &View::ConsulServices).await
}

async fn consul_health(
    State(context): State<Context>,
    Names(name): Names<String>,
    poll: Poll,
    etags: Etags,
) -> Response {
    let only_passing = match poll.asks_only_passing() {
        Ok(only_passing) => only_passing,
        Err(text) => return problem(StatusCode::BAD_REQUEST, text),
    };
    poll.answer(&context, &etags, &View::ConsulHealth { name, only_passing }).await
}

async fn traefik(State(context): State<Context>, poll: Poll, etags: Etags) -> Response {
    poll.answer(&context, &etags, &View::Traefik).await
}

async fn http_sd(State(context): State<Context>, poll: Poll, etags: Etags) -> Response {
    poll.answer(&context, &etags, &View::Prometheus).await
}

async fn metrics(State(context): State<Context>) -> Response {
    match context.status.encode() {
        Ok(text) => ([(header::CONTENT_TYPE, METRICS)], text).into_response(),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, &format!("encode the metrics: {error}")),
    }
}

/// Answers the readiness probe. The feed is ready once it has a snapshot. While the API server is unreachable, the feed
/// stays ready, because the known members are probably still correct; the answer's text names the interrupted watches.
async fn readyz(State(context): State<Context>) -> Response {
    let outage = context.status.outage();
    if context.published.borrow().is_none() {
        let detail = outage.unwrap_or_else(|| "Pods, Services and Nodes are not listed yet".to_owned());
        return (StatusCode::SERVICE_UNAVAILABLE, format!("{detail}\n")).into_response();
    }
    outage.map_or_else(|| "ok\n".into_response(), |detail| format!("ok, but {detail}\n").into_response())
}

/// Returns an HTTP error answer with this status code and message.
fn problem(code: StatusCode, text: &str) -> Response {
    let body = serde_json::json!({ "error": text }).to_string();
    let mut response = (code, [(header::CONTENT_TYPE, JSON)], body).into_response();
    if code == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

/// The name of the header with the index of Consul's blocking queries.
const CONSUL_INDEX: HeaderName = HeaderName::from_static("x-consul-index");
