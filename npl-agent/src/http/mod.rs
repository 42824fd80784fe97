// SPDX-License-Identifier: Apache-2.0
//! The HTTP server: `/metrics` for Prometheus, and `/livez`, `/readyz` and `/startupz` for the kubelet.

mod health;

use std::{io, net::SocketAddr};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::net::TcpListener;

pub use self::health::Health;
use crate::metrics::{self, Metrics};

/// Why metrics and probes cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// Another process listens on the port, often a second agent.
    #[error("listen on {0}: the port is in use; stop the other process or choose another port with --listen")]
    InUse(SocketAddr),
    /// No device of the Node has this address.
    #[error("listen on {0}: this Node does not have the address; give --listen an address of this Node")]
    NoSuchAddress(SocketAddr),
    /// The kernel returned another error for the socket.
    #[error("listen on {address}")]
    Listen {
        /// The address of `--listen`.
        address: SocketAddr,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Binds the address of `--listen`, so that the agent exits at start if the address is unusable.
///
/// # Errors
///
/// If the address is in use, not on this Node, or not permitted by the kernel.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, HttpError> {
    TcpListener::bind(address).await.map_err(|source| {
        if source.kind() == io::ErrorKind::AddrInUse {
            HttpError::InUse(address)
        } else if source.kind() == io::ErrorKind::AddrNotAvailable {
            HttpError::NoSuchAddress(address)
        } else {
            HttpError::Listen { address, source }
        }
    })
}

/// Serves metrics and probes until the future is dropped.
///
/// # Errors
///
/// If the listening socket fails.
pub async fn serve(listener: TcpListener, health: Health, metrics: Metrics) -> io::Result<()> {
    axum::serve(listener, router(health, metrics)).await
}

fn router(health: Health, metrics: Metrics) -> Router {
    let probes = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/startupz", get(startupz))
        .with_state(health.clone());
    Router::new().route("/metrics", get(all_metrics)).with_state((health, metrics)).merge(probes)
}

async fn all_metrics(State((health, metrics)): State<(Health, Metrics)>) -> Response {
    metrics.set_ready(health.is_ready());
    match metrics.encode() {
        Ok(text) => ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(err) => (StatusCode::INTERNAL_SERVER_ERROR, format!("cannot encode the metrics: {err}\n")).into_response(),
    }
}

async fn livez(State(health): State<Health>) -> Response {
    answer(health.is_live(), "the main loop has not sent a heartbeat for 30 s; the kubelet restarts the agent")
}

async fn readyz(State(health): State<Health>) -> Response {
    answer(
        health.is_ready(),
        "Pods, Services and the Node are not listed yet, or the programs are attached to no device; see the agent's \
         log and `npl-agent doctor`",
    )
}

async fn startupz(State(health): State<Health>) -> Response {
    answer(health.is_started(), "the programs are not attached to any device yet; see `npl-agent doctor`")
}

fn answer(is_ok: bool, problem: &'static str) -> Response {
    if is_ok {
        "ok\n".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, format!("{problem}\n")).into_response()
    }
}

#[cfg(test)]
mod tests;
