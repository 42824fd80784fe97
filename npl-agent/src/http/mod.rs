// SPDX-License-Identifier: Apache-2.0
//! The HTTP servers: `/metrics` for Prometheus, and `/livez`, `/readyz` and `/startupz` for the kubelet. A second
//! server, on the address of `--metrics-listen`, serves only `/metrics`, so that other machines can read the metrics
//! but cannot reach the probes.

mod health;

use std::{io, net::SocketAddr};

use axum::{
    Router,
    extract::State,
    http::{
        HeaderMap, StatusCode,
        header::{ACCEPT, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::net::TcpListener;

pub use self::health::Health;
use crate::metrics::{Format, Metrics};

/// Why metrics and probes cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// Another process, often a second agent, listens on the port.
    #[error("listen on {address}: the port is in use; stop the other process or choose another port with {flag}")]
    InUse {
        /// The address that the flag gives.
        address: SocketAddr,
        /// The flag, `--listen` or `--metrics-listen`.
        flag: &'static str,
    },
    /// No device of the Node has this address.
    #[error("listen on {address}: this Node does not have the address; give {flag} an address of this Node")]
    NoSuchAddress {
        /// The address that the flag gives.
        address: SocketAddr,
        /// The flag, `--listen` or `--metrics-listen`.
        flag: &'static str,
    },
    /// The kernel refused to open or bind the socket, or to listen on the socket, for a reason that no other variant
    /// covers.
    #[error("listen on {address}")]
    Listen {
        /// The address that the flag gives.
        address: SocketAddr,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// The listening sockets for metrics and probes. Both sockets are bound before the agent connects to the API server and
/// loads programs, so that the agent exits immediately if an address is unusable.
#[derive(Debug)]
pub struct Servers {
    /// The socket of `--listen`, for probes and metrics.
    probes: TcpListener,
    /// The socket of `--metrics-listen`, for metrics only.
    metrics: Option<TcpListener>,
}

impl Servers {
    /// Binds the addresses of `--listen` and `--metrics-listen`.
    ///
    /// # Errors
    ///
    /// If an address is in use, if no device of the Node has the address, or if the kernel refuses the socket.
    pub async fn bind(probes: SocketAddr, metrics: Option<SocketAddr>) -> Result<Self, HttpError> {
        let probes = bind(probes, "--listen").await?;
        let metrics = match metrics {
            Some(address) => Some(bind(address, "--metrics-listen").await?),
            None => None,
        };
        Ok(Self { probes, metrics })
    }

    /// Serves metrics and probes until the future is dropped.
    ///
    /// # Errors
    ///
    /// If one of the listening sockets fails.
    pub async fn serve(self, health: Health, metrics: Metrics) -> io::Result<()> {
        let alone = metrics_router(health.clone(), metrics.clone());
        let all = axum::serve(self.probes, router(health, metrics));
        match self.metrics {
            Some(listener) => tokio::select! {
                ended = all => ended,
                ended = axum::serve(listener, alone) => ended,
            },
            None => all.await,
        }
    }
}

async fn bind(address: SocketAddr, flag: &'static str) -> Result<TcpListener, HttpError> {
    TcpListener::bind(address).await.map_err(|source| {
        if source.kind() == io::ErrorKind::AddrInUse {
            HttpError::InUse { address, flag }
        } else if source.kind() == io::ErrorKind::AddrNotAvailable {
            HttpError::NoSuchAddress { address, flag }
        } else {
            HttpError::Listen { address, source }
        }
    })
}

fn metrics_router(health: Health, metrics: Metrics) -> Router {
    Router::new().route("/metrics", get(all_metrics)).with_state((health, metrics))
}

fn router(health: Health, metrics: Metrics) -> Router {
    let probes = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/startupz", get(startupz))
        .with_state(health.clone());
    metrics_router(health, metrics).merge(probes)
}

async fn all_metrics(State((health, metrics)): State<(Health, Metrics)>, headers: HeaderMap) -> Response {
    metrics.set_ready(health.is_ready());
    let accepted: Vec<&str> = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let format = Format::accepted(&accepted);
    match metrics.encode(format) {
        Ok(text) => ([(CONTENT_TYPE, format.content_type())], text).into_response(),
        Err(err) => (StatusCode::INTERNAL_SERVER_ERROR, format!("cannot encode the metrics: {err}\n")).into_response(),
    }
}

async fn livez(State(health): State<Health>) -> Response {
    answer(health.is_live(), "the main loop has not sent a heartbeat for 30 s; the kubelet restarts the agent")
}

async fn readyz(State(health): State<Health>) -> Response {
    answer(
        health.is_ready(),
        "the agent has not yet listed Pods, Services and the Node, or the programs are attached to no device through \
         which clients reach the Node; see the agent's log and `npl-agent doctor`",
    )
}

async fn startupz(State(health): State<Health>) -> Response {
    answer(
        health.is_started(),
        "the programs are not yet attached to a device through which clients reach the Node; see `npl-agent doctor`",
    )
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
