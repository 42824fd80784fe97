// SPDX-License-Identifier: Apache-2.0
//! `/metrics` for Prometheus, `/livez`, `/readyz` and `/startupz` for the kubelet.

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
    /// Another program uses the address, most likely a second agent.
    #[error("listen on {0}: the address is in use; stop the other program or give --listen another port")]
    InUse(SocketAddr),
    /// No device has this address.
    #[error("listen on {0}: the machine does not have this address; give --listen one of its own")]
    NoSuchAddress(SocketAddr),
    /// Another failure.
    #[error("listen on {address}")]
    Listen {
        /// The address of `--listen`.
        address: SocketAddr,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// Binds the address of `--listen`.
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

/// Serves until the future is dropped.
pub async fn serve(listener: TcpListener, health: Health, metrics: Metrics) -> io::Result<()> {
    axum::serve(listener, router(health, metrics)).await
}

fn router(health: Health, metrics: Metrics) -> Router {
    let probes = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/startupz", get(startupz))
        .with_state(health);
    Router::new().route("/metrics", get(all_metrics)).with_state(metrics).merge(probes)
}

async fn all_metrics(State(metrics): State<Metrics>) -> Response {
    match metrics.encode() {
        Ok(text) => ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(err) => (StatusCode::INTERNAL_SERVER_ERROR, format!("encode metrics: {err}\n")).into_response(),
    }
}

async fn livez(State(health): State<Health>) -> Response {
    answer(health.is_live(), "the agent's main loop has not made progress for 30 s")
}

async fn readyz(State(health): State<Health>) -> Response {
    answer(health.is_ready(), "Pods and Services are not listed yet, or no device carries the programs")
}

async fn startupz(State(health): State<Health>) -> Response {
    answer(health.is_started(), "no device carries the programs yet")
}

fn answer(is_well: bool, otherwise: &'static str) -> Response {
    if is_well {
        "ok\n".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, format!("{otherwise}\n")).into_response()
    }
}

#[cfg(test)]
mod tests;
