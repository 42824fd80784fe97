// SPDX-License-Identifier: Apache-2.0
//! Serves one TCP connection or SCTP association of the echo server.

use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::net::TcpStream;

use super::pattern::{Digest, Pattern};
use super::server::Identity;
use super::{Answer, Protocol};
use crate::poll;

/// The maximum length of a request line. The server answers a longer line in parts of this length, as if each part were
/// a request.
const MAX_LINE: u64 = 64 * 1024;

/// The buffer size of bulk transfers.
const CHUNK: usize = 64 * 1024;

/// Answers requests until the client closes the connection.
pub(super) fn serve(stream: &TcpStream, identity: &Identity, protocol: Protocol) -> io::Result<()> {
    let mut reader = BufReader::with_capacity(CHUNK, stream);
    loop {
        let mut line = Vec::new();
        if (&mut reader).take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&line).into_owned();
        let words: Vec<&str> = text.split_whitespace().collect();
        match (words.as_slice(), numbers(&words)) {
            (["GET", ..], _) => return serve_http(&mut reader, stream, identity, &line),
            (["UPLOAD", ..], Some((length, _))) => {
                let (received, digest) = drain(&mut reader, length)?;
                send(stream, &answer(stream, identity, protocol, received, digest)?)?;
            }
            (["DOWNLOAD", ..], Some((length, seed))) => {
                io::copy(&mut BufReader::with_capacity(CHUNK, Pattern::new(seed, length)), &mut &*stream)?;
            }
            _line => send(stream, &answer(stream, identity, protocol, line.len() as u64, Digest::of(&line))?)?,
        }
    }
}

/// Parses the two numbers after a command word.
fn numbers(words: &[&str]) -> Option<(u64, u64)> {
    let [_word, length, seed] = words else { return None };
    Some((length.parse().ok()?, seed.parse().ok()?))
}

fn drain(reader: &mut impl Read, length: u64) -> io::Result<(u64, Digest)> {
    let mut digest = Digest::default();
    let mut received = 0;
    let mut buffer = vec![0; CHUNK];
    let mut limited = reader.take(length);
    loop {
        let read = poll::uninterrupted(|| limited.read(&mut buffer))?;
        let Some(bytes) = buffer.get(..read).filter(|bytes| !bytes.is_empty()) else { return Ok((received, digest)) };
        digest.update(bytes);
        received += bytes.len() as u64;
    }
}

fn serve_http(
    reader: &mut impl io::BufRead,
    stream: &TcpStream,
    identity: &Identity,
    request: &[u8],
) -> io::Result<()> {
    let mut header = String::new();
    while reader.take(MAX_LINE).read_line(&mut header)? > 2 {
        header.clear();
    }
    let body = answer(stream, identity, Protocol::Tcp, request.len() as u64, Digest::of(request))?;
    let length = body.len();
    send(
        stream,
        &format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        ),
    )
}

fn send(mut stream: &TcpStream, text: &str) -> io::Result<()> {
    stream.write_all(text.as_bytes())
}

fn answer(
    stream: &TcpStream,
    identity: &Identity,
    protocol: Protocol,
    received: u64,
    digest: Digest,
) -> io::Result<String> {
    line(identity, stream.peer_addr()?, protocol, received, digest)
}

/// Formats an [`Answer`] as one line of JSON.
pub(super) fn line(
    identity: &Identity,
    mut client: std::net::SocketAddr,
    protocol: Protocol,
    received: u64,
    digest: Digest,
) -> io::Result<String> {
    // A dual-stack socket reports IPv4 clients as IPv4-mapped IPv6 addresses, which are converted back to IPv4
    // addresses.
    client.set_ip(client.ip().to_canonical());
    let Identity { pod, node } = identity.clone();
    let answer = Answer { pod, node, client, protocol, received, digest: digest.to_string() };
    Ok(serde_json::to_string(&answer)? + "\n")
}
