// SPDX-License-Identifier: Apache-2.0
//! Answers conditional HTTP requests and long polls.

use std::{convert::Infallible, time::Duration};

use axum::{
    extract::{FromRequestParts, Query},
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use tokio::time::{Instant, timeout_at};

use super::{CONSUL_INDEX, Context, JSON, problem, view::View};
use crate::core::snapshot::{Snapshot, Version};

/// The value of the header `If-None-Match`, with all its lines joined by commas; `None` if the request has no such
/// header, or if the header is longer than [`LONGEST_ETAGS`], because no client needs to send that many versions. Only
/// this header is copied, so the other headers take no memory while the request waits.
pub(super) struct Etags(Option<String>);

/// The maximum length of the header `If-None-Match` in bytes.
const LONGEST_ETAGS: usize = 512;
/// The maximum length of the parameters `index` and `wait` in bytes.
const LONGEST_INDEX: usize = 64;

impl<S: Sync> FromRequestParts<S> for Etags {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        let lines = parts.headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
        let value = lines.collect::<Vec<_>>().join(",");
        Ok(Self(Some(value).filter(|value| !value.is_empty() && value.len() <= LONGEST_ETAGS)))
    }
}

impl Etags {
    /// Returns whether the header names this `ETag`, as a strong or weak validator.
    fn contain(&self, own: &str) -> bool {
        self.all().any(|etag| etag.trim_start_matches("W/") == own)
    }

    /// Returns whether the header is `*`, which matches every content, but names no version.
    fn are_any(&self) -> bool {
        self.all().any(|etag| etag == "*")
    }

    fn all(&self) -> impl Iterator<Item = &str> {
        self.0.as_deref().unwrap_or_default().split(',').map(str::trim)
    }
}

/// The time for which a long poll waits by default; Consul has the same default.
const WAIT: Duration = Duration::from_mins(5);
const LONGEST_WAIT: Duration = Duration::from_mins(10);

/// The version of a view's members, and the `ETag` of the view's representation.
struct Current {
    version: Version,
    etag: String,
}

impl Current {
    /// Derives the `ETag` from the representation: feeds with different configurations or releases have different
    /// `ETag`s for equal members.
    fn new(context: &Context, version: Version) -> Self {
        let content = format!("{} {version}", context.representation);
        Self { version, etag: format!("\"{}\"", Version::of(content.as_bytes())) }
    }

    /// Returns whether the client already has this version, according to the client's index or `ETag`.
    fn is_known(&self, index: Option<&str>, etags: &Etags) -> bool {
        let has_index = index.is_some_and(|index| {
            let index = index.trim_matches('"');
            index == self.etag.trim_matches('"')
                || index == self.version.to_string()
                || index == self.version.index().to_string()
        });
        has_index || etags.contain(&self.etag)
    }
}

/// The query parameters of a request for members.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Poll {
    /// The version that the client already has: an `ETag` without quotes, the version in a body, or Consul's index.
    index: Option<String>,
    /// The maximum time, such as `30s`, to wait for a version that differs from the client's version.
    wait: Option<String>,
    /// Consul's parameter that requests only healthy members. An empty value means `true`.
    passing: Option<String>,
}

/// Extracts the parameters, or answers 400 if the query string is malformed.
impl<S: Send + Sync> FromRequestParts<S> for Poll {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Response> {
        let query = Query::<Self>::try_from_uri(&parts.uri);
        query.map(|Query(poll)| poll).map_err(|rejection| problem(StatusCode::BAD_REQUEST, &rejection.body_text()))
    }
}

impl Poll {
    /// Returns whether the request is for healthy members only. The parameter has the same values as a boolean in
    /// Consul.
    ///
    /// # Errors
    ///
    /// Returns the text of the answer if the value is malformed.
    pub(super) fn asks_only_passing(&self) -> Result<bool, &'static str> {
        match self.passing.as_deref() {
            None | Some("0" | "f" | "F" | "false" | "False" | "FALSE") => Ok(false),
            Some("" | "1" | "t" | "T" | "true" | "True" | "TRUE") => Ok(true),
            Some(_) => Err("passing is not a boolean: give passing=true or passing=false"),
        }
    }

    /// Returns how long to wait for a change.
    ///
    /// # Errors
    ///
    /// Returns the text of the answer if a parameter is malformed.
    fn wait(&self) -> Result<Duration, String> {
        // Long values would take memory while the request waits.
        if self.index.as_ref().is_some_and(|index| index.len() > LONGEST_INDEX) {
            return Err(format!("index is longer than {LONGEST_INDEX} bytes: give the ETag or X-Consul-Index"));
        }
        let Some(text) = self.wait.as_deref() else {
            return Ok(if self.index.is_some() { WAIT } else { Duration::ZERO });
        };
        let wait = Some(text).filter(|text| text.len() <= LONGEST_INDEX).and_then(seconds);
        wait.map(|wait| wait.min(LONGEST_WAIT)).ok_or_else(|| {
            let shown: String = text.chars().take(LONGEST_INDEX).collect();
            format!("wait={shown} is not a duration: give seconds or minutes, such as wait=30s")
        })
    }

    /// Answers as soon as the feed's version differs from the client's version. When the waiting time is over, or if
    /// too many long polls wait, answers with 304 if the client has sent the current version's `ETag`, and otherwise
    /// with the current version.
    pub(super) async fn answer(&self, context: &Context, etags: &Etags, view: &View) -> Response {
        let wait = match self.wait() {
            Ok(wait) => wait,
            Err(text) => return problem(StatusCode::BAD_REQUEST, &text),
        };
        if view.has_too_long_name() {
            return problem(StatusCode::BAD_REQUEST, "a name in the path is longer than any name of a Service or port");
        }
        let until = Instant::now() + wait;
        let mut permit = None;
        let mut published = context.published.clone();
        loop {
            let Some(snapshot) = published.borrow_and_update().clone() else {
                return problem(StatusCode::SERVICE_UNAVAILABLE, "Pods, Services and Nodes are not listed yet");
            };
            let Some(version) = view.version(&snapshot) else {
                return problem(StatusCode::NOT_FOUND, &format!("there is no {view}"));
            };
            let current = Current::new(context, version);
            let waits = Instant::now() < until && current.is_known(self.index.as_deref(), etags);
            if waits && permit.is_none() {
                permit = context.permit_to_wait();
            }
            // Without a permit to wait, the client gets the current version at once.
            if !waits || permit.is_none() {
                return respond(context, view, &current, &snapshot, etags);
            }
            drop(snapshot);
            // A timeout is not an error: if the waiting time is over, the next iteration of the loop answers with the
            // current version.
            if let Ok(Err(_closed)) = timeout_at(until, published.changed()).await {
                return problem(StatusCode::SERVICE_UNAVAILABLE, "the feed is ending");
            }
        }
    }
}

/// Answers with the body of the view, or with 304 if the client has sent the view's `ETag`.
fn respond(context: &Context, view: &View, current: &Current, snapshot: &Snapshot, etags: &Etags) -> Response {
    let Ok(etag) = HeaderValue::try_from(&current.etag) else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let mut response = if etags.are_any() || etags.contain(&current.etag) {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        let body = context.cache.get(view, current.version, snapshot, &context.interfaces);
        ([(header::CONTENT_TYPE, JSON)], body).into_response()
    };
    // Both answers have these headers, because a cache updates the headers of its stored answer with the headers of a
    // 304.
    let headers = response.headers_mut();
    headers.insert(header::ETAG, etag);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if view.is_consul() {
        headers.insert(CONSUL_INDEX, HeaderValue::from(current.version.index()));
    }
    response
}

/// Parses a duration in the format of Consul's clients: `30s`, `5m`, `500ms`, or a number of seconds.
fn seconds(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at_checked(digits)?;
    let number: u32 = number.parse().ok()?;
    match unit {
        "ms" => Some(Duration::from_millis(number.into())),
        "" | "s" => Some(Duration::from_secs(number.into())),
        "m" | "m0s" => Some(Duration::from_mins(number.into())),
        _ => None,
    }
}
