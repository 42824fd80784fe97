// SPDX-License-Identifier: Apache-2.0
//! Answers conditional HTTP requests and long polls.

use std::{convert::Infallible, time::Duration};

use axum::{
    extract::FromRequestParts,
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use serde::{Deserialize, de::IgnoredAny};
use tokio::time::{Instant, timeout_at};

use super::{Context, problem, view::View, with_body};
use crate::core::snapshot::{Snapshot, Version};

/// The value of the header `If-None-Match`; `None` if the request has no such header, or if the header is longer than
/// [`LONGEST_ETAGS`]: no client has a reason to send that many versions. Only this header is copied, so the other
/// headers take no memory while the request waits.
pub(super) struct Etags(Option<String>);

/// The maximum length of the header `If-None-Match` in bytes.
const LONGEST_ETAGS: usize = 512;
/// The maximum length of the parameters `index` and `wait` in bytes.
const LONGEST_INDEX: usize = 64;

impl<S: Sync> FromRequestParts<S> for Etags {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
        let value = parts.headers.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok());
        Ok(Self(value.filter(|value| value.len() <= LONGEST_ETAGS).map(str::to_owned)))
    }
}

/// How long a long poll waits by default; Consul has the same default.
const WAIT: Duration = Duration::from_mins(5);
const LONGEST_WAIT: Duration = Duration::from_mins(10);

fn etag(version: Version) -> String {
    format!("\"{version}\"")
}

/// Returns whether the client already has this version, according to the client's index or `ETag`.
fn is_known(version: Version, index: Option<&str>, etags: Option<&str>) -> bool {
    let has_index = index.is_some_and(|index| {
        let index = index.trim_matches('"');
        index == version.to_string() || index == version.index().to_string()
    });
    let own = etag(version);
    let is_own = |etag: &str| etag == "*" || etag.trim_start_matches("W/") == own;
    has_index || etags.is_some_and(|etags| etags.split(',').map(str::trim).any(is_own))
}

/// The query parameters of a request for members.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Poll {
    /// The version that the client already has: an `ETag` without quotes, or Consul's index.
    index: Option<String>,
    /// The maximum time, such as `30s`, to wait for a version that differs from the client's version.
    wait: Option<String>,
    /// Consul's parameter that requests only healthy members. The value of the parameter is ignored.
    passing: Option<IgnoredAny>,
}

impl Poll {
    pub(super) fn asks_only_passing(&self) -> bool {
        self.passing.is_some()
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
    /// too many long polls wait, the answer is 304 if the client has sent the current version as its `ETag`, and the
    /// current version otherwise.
    pub(super) async fn answer(&self, context: &Context, etags: &Etags, view: &View) -> Response {
        let wait = match self.wait() {
            Ok(wait) => wait,
            Err(text) => return problem(StatusCode::BAD_REQUEST, &text),
        };
        if view.has_too_long_name() {
            return problem(StatusCode::BAD_REQUEST, "a name in the path is longer than any name of a Service or port");
        }
        let etags = etags.0.as_deref();
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
            let waits = Instant::now() < until && is_known(version, self.index.as_deref(), etags);
            if waits && permit.is_none() {
                permit = context.permit_to_wait();
            }
            // Without a permit to wait, the client gets the current version at once.
            if !waits || permit.is_none() {
                return respond(context, view, version, &snapshot, etags);
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

/// Answers with the body of the view, or with 304 if the client has sent the view's version as its `ETag`.
fn respond(context: &Context, view: &View, version: Version, snapshot: &Snapshot, etags: Option<&str>) -> Response {
    let Ok(etag) = HeaderValue::try_from(etag(version)) else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    if is_known(version, None, etags) {
        return (StatusCode::NOT_MODIFIED, [(header::ETAG, etag)]).into_response();
    }
    let body = context.cache.get(view, version, snapshot, &context.interfaces);
    with_body(body, etag, view.is_consul().then(|| version.index()))
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
