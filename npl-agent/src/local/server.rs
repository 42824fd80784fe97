// SPDX-License-Identifier: Apache-2.0
//! Serves the agent's state on the local socket.

use std::{
    fs::{self, DirBuilder, Permissions},
    io,
    os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
    path::Path,
    time::Duration,
};

use axum::{
    Router,
    extract::{Path as UrlPath, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse as _, Response},
    routing::get,
};
use serde::Serialize;
use tokio::{
    net::UnixListener,
    sync::{mpsc, oneshot},
    time::timeout,
};

use super::{Request, SocketError, socket};
use crate::core::why::Question;

/// The mode of the runtime directory: only root may enter it.
const FOLDER_MODE: u32 = 0o700;
/// The mode of the socket: only root may connect to it.
const SOCKET_MODE: u32 = 0o600;
/// The time limit for the main loop to answer a request.
const PATIENCE: Duration = Duration::from_secs(2);

/// Creates the runtime directory, removes the socket of an earlier agent, and listens on a new socket. The caller holds
/// the lock that prevents a second agent, so no other agent uses the socket.
///
/// # Errors
///
/// If the runtime directory cannot be created or written, or if the path is too long for a socket.
pub fn bind(folder: &Path) -> Result<UnixListener, SocketError> {
    let socket = socket(folder);
    listen(folder, &socket).map_err(|source| SocketError { socket, source })
}

fn listen(folder: &Path, socket: &Path) -> io::Result<UnixListener> {
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder)?;
    // The mode is set explicitly, because the directory may have existed before with another mode, for example as a
    // volume.
    fs::set_permissions(folder, Permissions::from_mode(FOLDER_MODE))?;
    match fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    fs::set_permissions(socket, Permissions::from_mode(SOCKET_MODE))?;
    Ok(listener)
}

/// Serves requests until the future is dropped.
///
/// # Errors
///
/// If the listening socket fails.
pub async fn serve(listener: UnixListener, requests: mpsc::Sender<Request>) -> io::Result<()> {
    let router = Router::new()
        .route("/v1/state", get(state))
        .route("/v1/why/{kind}/{namespace}/{name}", get(why))
        .route("/v1/why/{kind}/{namespace}/{name}/{port}", get(why_port))
        .with_state(requests);
    axum::serve(listener, router).await
}

async fn state(State(requests): State<mpsc::Sender<Request>>) -> Response {
    answer(&requests, Request::State).await
}

type WhySubject = (String, String, String);

async fn why(State(requests): State<mpsc::Sender<Request>>, UrlPath(subject): UrlPath<WhySubject>) -> Response {
    explain(&requests, subject, None).await
}

async fn why_port(
    State(requests): State<mpsc::Sender<Request>>,
    UrlPath((kind, namespace, name, port)): UrlPath<(String, String, String, u16)>,
) -> Response {
    explain(&requests, (kind, namespace, name), Some(port)).await
}

async fn explain(
    requests: &mpsc::Sender<Request>,
    (kind, namespace, name): WhySubject,
    pod_port: Option<u16>,
) -> Response {
    match Question::new(&kind, &namespace, &name, pod_port) {
        Some(question) => answer(requests, |reply| Request::Why(question, reply)).await,
        None => (StatusCode::BAD_REQUEST, "ask for a pod or a service\n").into_response(),
    }
}

/// Passes a request to the main loop, and encodes the main loop's reply as JSON.
async fn answer<T: Serialize>(
    requests: &mpsc::Sender<Request>,
    request: impl FnOnce(oneshot::Sender<T>) -> Request,
) -> Response {
    let (sender, reply) = oneshot::channel();
    let exchange = async {
        requests.send(request(sender)).await.ok()?;
        reply.await.ok()
    };
    let unavailable = |problem: &'static str| (StatusCode::SERVICE_UNAVAILABLE, problem).into_response();
    let value = match timeout(PATIENCE, exchange).await {
        Ok(Some(value)) => value,
        Ok(None) => return unavailable("the main loop has ended: the Node is retired, or the agent ends\n"),
        Err(_elapsed) => {
            return unavailable("the main loop has not answered within 2 s: the agent is starting, or it hangs\n");
        }
    };
    match serde_json::to_string(&value) {
        Ok(text) => ([(CONTENT_TYPE, "application/json")], text).into_response(),
        Err(err) => (StatusCode::INTERNAL_SERVER_ERROR, format!("cannot encode the answer: {err}\n")).into_response(),
    }
}
