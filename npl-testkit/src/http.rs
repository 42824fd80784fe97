// SPDX-License-Identifier: Apache-2.0
//! Sends a plain HTTP request, as a kubelet probe or a metrics scraper does.

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::netns::Netns;
use crate::{poll, traffic};

/// The time limit for connecting, and of each read and write: far above response times on a loaded machine.
const LIMIT: Duration = Duration::from_secs(30);

/// Sends a GET request for `path` and returns the status and the body. Uses HTTP/1.0, which has no chunked bodies.
pub fn get(from: &Netns, server: SocketAddr, path: &str) -> Result<(u16, String)> {
    let limit = poll::extended(LIMIT);
    let mut stream = from.run(|| traffic::open_tcp(server, limit))?.with_context(|| format!("request {path}"))?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: {server}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).with_context(|| format!("request {path} from {server}"))?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).with_context(|| format!("read {path} from {server}"))?;
    let (head, body) =
        answer.split_once("\r\n\r\n").with_context(|| format!("the response has no HTTP header: `{answer}`"))?;
    let status = head.split_whitespace().nth(1).and_then(|status| status.parse().ok());
    Ok((status.with_context(|| format!("the response has no status: `{head}`"))?, body.to_owned()))
}
