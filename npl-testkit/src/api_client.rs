// SPDX-License-Identifier: Apache-2.0
//! A small, untyped client of the API server. Tests measure latencies with this client, so the client reuses
//! connections.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;
use ureq::http::{Method, Request, Response, StatusCode};
use ureq::tls::{RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use crate::netns::Netns;
use crate::poll;

/// The time limit for connecting to the API server, and for receiving the status and the header of a response.
const LIMIT: Duration = Duration::from_secs(30);

/// The number of idle connections that a client keeps open: at least as many as the threads that share a client.
const IDLE_CONNECTIONS: usize = 16;

/// The media type of a JSON merge patch (RFC 7396).
const MERGE_PATCH: &str = "application/merge-patch+json";

/// A client that trusts the server's certificate and authenticates with a bearer token.
#[derive(Clone, Debug)]
pub struct ApiClient {
    agent: Agent,
    base: String,
    token: String,
    netns: Option<Netns>,
}

impl ApiClient {
    pub(crate) fn new(server: SocketAddr, authority: &[u8], token: &str, netns: Option<&Netns>) -> Self {
        let certificates: Vec<_> = parse_pem(authority)
            .filter_map(|item| match item {
                Ok(ureq::tls::PemItem::Certificate(certificate)) => Some(certificate),
                Ok(_key) => None,
                Err(_not_pem) => None,
            })
            .collect();
        let tls = TlsConfig::builder().root_certs(RootCerts::from(certificates)).build();
        let config = Agent::config_builder()
            .tls_config(tls)
            .timeout_connect(Some(poll::extended(LIMIT)))
            .timeout_recv_response(Some(poll::extended(LIMIT)))
            .http_status_as_error(false)
            .max_idle_connections(IDLE_CONNECTIONS)
            .max_idle_connections_per_host(IDLE_CONNECTIONS)
            .proxy(None)
            .build();
        let (base, token) = (format!("https://{server}"), format!("Bearer {token}"));
        Self { agent: config.into(), base, token, netns: netns.cloned() }
    }

    /// Returns a client for threads that already run in the API server's network namespace. The requests of this client
    /// need no extra thread that enters the namespace.
    #[must_use]
    pub fn from_inside(self) -> Self {
        Self { netns: None, ..self }
    }

    /// Returns the body of a text resource such as a health report.
    pub fn text(&self, path: &str) -> Result<String> {
        let response = self.send(&Method::GET, path, None)?;
        let (status, text) = read(response).with_context(|| format!("GET {path}"))?;
        if !status.is_success() {
            bail!("GET {path} returned {status}: {text}");
        }
        Ok(text)
    }

    /// Returns an object or a list.
    pub fn get(&self, path: &str) -> Result<Value> {
        self.json(&Method::GET, path, None)
    }

    /// Returns an object, or `None` if the server returns 404.
    pub fn find(&self, path: &str) -> Result<Option<Value>> {
        let (status, value) = self.exchange(&Method::GET, path, None)?;
        if status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        accept(&Method::GET, path, status, value).map(Some)
    }

    /// Creates an object in the collection at `path`.
    pub fn create(&self, path: &str, object: &Value) -> Result<Value> {
        self.json(&Method::POST, path, Some(("application/json", object)))
    }

    /// Applies a JSON merge patch (RFC 7396).
    pub fn merge_patch(&self, path: &str, patch: &Value) -> Result<Value> {
        self.json(&Method::PATCH, path, Some((MERGE_PATCH, patch)))
    }

    /// Applies a JSON merge patch and checks only the status, without parsing the returned object.
    pub fn merge_patch_unread(&self, path: &str, patch: &Value) -> Result<()> {
        let (status, text) = read(self.send(&Method::PATCH, path, Some((MERGE_PATCH, patch)))?)?;
        if !status.is_success() {
            bail!("PATCH {path} returned {status}: {text}");
        }
        Ok(())
    }

    /// Applies a strategic merge patch, which merges lists by the key of their elements.
    pub fn strategic_patch(&self, path: &str, patch: &Value) -> Result<Value> {
        self.json(&Method::PATCH, path, Some(("application/strategic-merge-patch+json", patch)))
    }

    /// Deletes an object without a grace period, as a kubelet does after the Pod's containers have exited.
    pub fn delete(&self, path: &str) -> Result<()> {
        self.json(&Method::DELETE, &format!("{path}?gracePeriodSeconds=0"), None).map(drop)
    }

    /// Watches a collection and passes each event to `on_event`, until `on_event` returns `false`, or until `limit`
    /// times [`poll::patience`] has passed.
    pub fn watch(&self, path: &str, limit: Duration, mut on_event: impl FnMut(Value) -> bool + Send) -> Result<()> {
        let separator = if path.contains('?') { '&' } else { '?' };
        // The API server closes the watch after this time, so a read cannot block longer.
        let seconds = (limit * poll::patience()).as_secs().max(1);
        let path = format!("{path}{separator}watch=true&timeoutSeconds={seconds}");
        let response = self.send(&Method::GET, &path, None)?;
        let status = response.status();
        if !status.is_success() {
            bail!("GET {path} returned {status}");
        }
        for line in BufReader::new(response.into_body().into_reader()).lines() {
            let line = line.with_context(|| format!("read from the watch {path}"))?;
            let event = serde_json::from_str(&line).with_context(|| format!("parse the event `{line}`"))?;
            if !on_event(event) {
                return Ok(());
            }
        }
        Ok(())
    }

    fn json(&self, method: &Method, path: &str, body: Option<(&str, &Value)>) -> Result<Value> {
        let (status, value) = self.exchange(method, path, body)?;
        accept(method, path, status, value)
    }

    fn exchange(&self, method: &Method, path: &str, body: Option<(&str, &Value)>) -> Result<(StatusCode, Value)> {
        let response = self.send(method, path, body)?;
        let (status, text) = read(response).with_context(|| format!("{method} {path}"))?;
        let value =
            serde_json::from_str(&text).with_context(|| format!("parse the response to {method} {path}: {text}"))?;
        Ok((status, value))
    }

    fn send(&self, method: &Method, path: &str, body: Option<(&str, &Value)>) -> Result<Response<Body>> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header("Authorization", &self.token)
            .header("Accept", "application/json");
        if let Some((content, _)) = body {
            request = request.header("Content-Type", content);
        }
        let run = || match body {
            Some((_, value)) => {
                let request = request.body(value.to_string()).map_err(|err| anyhow!(err))?;
                self.agent.run(request).map_err(|err| anyhow!(err))
            }
            None => self.agent.run(request.body(()).map_err(|err| anyhow!(err))?).map_err(|err| anyhow!(err)),
        };
        match &self.netns {
            Some(netns) => netns.run(run)?,
            None => run(),
        }
        .with_context(|| format!("{method} {}{path}", self.base))
    }
}

fn read(response: Response<Body>) -> Result<(StatusCode, String)> {
    let (parts, mut body) = response.into_parts();
    // A list of ten thousand Pods exceeds ureq's default limit of 10 MiB, so the limit is raised.
    let text = body.with_config().limit(1 << 30).read_to_string().context("read the response body")?;
    Ok((parts.status, text))
}

fn accept(method: &Method, path: &str, status: StatusCode, value: Value) -> Result<Value> {
    if status.is_success() {
        return Ok(value);
    }
    let message = value.get("message").and_then(Value::as_str).unwrap_or("no message");
    bail!("{method} {path} returned {status}: {message}")
}
