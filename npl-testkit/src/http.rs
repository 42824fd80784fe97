// SPDX-License-Identifier: Apache-2.0
//! One plain HTTP request, as a kubelet probe or a metrics scraper sends.

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;

use anyhow::{Context, Result};

use crate::netns::Netns;
use crate::traffic;

/// Sends a GET request for `path` and returns the status and the body.
pub fn get(from: &Netns, server: SocketAddr, path: &str) -> Result<(u16, String)> {
    let mut stream = traffic::tcp_connect(from, server)?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).with_context(|| format!("request {path} from {server}"))?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).with_context(|| format!("read {path} from {server}"))?;
    let (head, body) =
        answer.split_once("\r\n\r\n").with_context(|| format!("the response has no HTTP header: `{answer}`"))?;
    let is_chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body =
        if is_chunked { joined(body).context("the chunks of the response are malformed")? } else { body.to_owned() };
    let status = head.split_whitespace().nth(1).and_then(|status| status.parse().ok());
    Ok((status.with_context(|| format!("the response has no status: `{head}`"))?, body))
}

/// The content of a body in chunks, each behind a line with its size.
fn joined(body: &str) -> Option<String> {
    let (mut content, mut rest) = (Vec::new(), body.as_bytes());
    loop {
        let end = rest.windows(2).position(|pair| pair == b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(rest.get(..end)?).ok()?.trim(), 16).ok()?;
        let chunk = rest.get(end + 2..)?;
        if size == 0 {
            return String::from_utf8(content).ok();
        }
        content.extend(chunk.get(..size)?);
        rest = chunk.get(size + 2..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::joined;

    #[test]
    fn chunks_are_joined_whatever_they_contain() {
        assert_eq!(
            joined("3\r\n{\"a\r\nB\r\n\": \"5\r\n\u{e9}\"}\r\n0\r\n\r\n").as_deref(),
            Some("{\"a\": \"5\r\n\u{e9}\"}")
        );
        assert_eq!(joined("4\r\nab"), None);
    }
}
