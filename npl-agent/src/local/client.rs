// SPDX-License-Identifier: Apache-2.0
//! Reads the agent's state from its local socket.

use std::{io, path::Path, time::Duration};

use http::{Request as HttpRequest, StatusCode, header::HOST};
use http_body_util::{BodyExt as _, Empty};
use hyper::{body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::{net::UnixStream, time::timeout};

use super::socket;
use crate::core::{
    view::AgentView,
    why::{Explanation, Question},
};

/// How long a command waits for the agent's answer. The agent answers each request within two seconds, so this limit is
/// longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a command did not get a usable answer from the agent.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The agent's local socket does not exist, or no process listens on the socket.
    #[error("no agent listens on {socket}: {source}")]
    Absent {
        /// The path of the socket.
        socket: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The agent did not answer within the time limit.
    #[error("the agent did not answer within 5 s: it is overloaded, or it hangs")]
    Silent,
    /// The agent answered the request with an HTTP status other than success.
    #[error("{0}")]
    Refused(String),
    /// The connection to the agent's socket failed before the answer was complete.
    #[error("read the agent's answer: {0}")]
    Broken(#[from] hyper::Error),
    /// The agent's answer cannot be decoded.
    #[error("decode the agent's answer: {0} (the agent probably has another version than this command)")]
    Malformed(#[from] serde_json::Error),
}

/// Requests the state of the running agent.
///
/// # Errors
///
/// If no agent answers, or if the answer is not usable.
pub async fn ask(folder: &Path) -> Result<AgentView, AskError> {
    get(folder, "/v1/state").await
}

/// Asks the running agent why it serves, or does not serve, a Pod or a Service.
///
/// # Errors
///
/// If no agent answers, or if the answer is not usable.
pub async fn ask_why(folder: &Path, question: &Question) -> Result<Explanation, AskError> {
    get(folder, &format!("/v1/why/{}", question.path())).await
}

async fn get<T: DeserializeOwned>(folder: &Path, path: &str) -> Result<T, AskError> {
    let exchange = timeout(PATIENCE, exchange(folder, path));
    let (status, body) = exchange.await.unwrap_or(Err(AskError::Silent))?;
    if status != StatusCode::OK {
        return Err(AskError::Refused(String::from_utf8_lossy(&body).trim_end().to_owned()));
    }
    Ok(serde_json::from_slice(&body)?)
}

async fn exchange(folder: &Path, path: &str) -> Result<(StatusCode, Bytes), AskError> {
    let socket = socket(folder);
    let stream = UnixStream::connect(&socket).await;
    let stream = stream.map_err(|source| AskError::Absent { socket: socket.display().to_string(), source })?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let request = HttpRequest::get(path).header(HOST, "agent").body(Empty::<Bytes>::new());
    let request = request.map_err(|error| AskError::Refused(format!("ask for {path:?}: {error}")))?;
    let (head, body) = sender.send_request(request).await?.into_parts();
    let body = body.collect().await?.to_bytes();
    connection.abort();
    Ok((head.status, body))
}
