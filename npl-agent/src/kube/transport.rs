// SPDX-License-Identifier: Apache-2.0
//! The HTTP layer of the client of the API server: TLS, time limits, and probes that detect dead connections.

use std::time::Duration;

use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_timeout::TimeoutConnector;
use hyper_util::{
    client::legacy::{Builder, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use kube::{
    Client, Config,
    client::{ConfigExt as _, RustlsTlsError},
};
use tower::{BoxError, ServiceBuilder, timeout::TimeoutLayer};
use tower_http::decompression::DecompressionLayer;

use super::token::TokenFile;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for the headers of an answer. For a watch, the API server sends the headers immediately; for a list, the
/// API server sends the headers when the list is complete.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit between two reads of an answer's body. This limit exceeds the duration of a watch, so that a watch
/// without events is not interrupted.
const READ_TIMEOUT: Duration = Duration::from_secs(super::watch::WATCH_SECONDS as u64 + 10);
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// The time limits after which a connection fails because its peer no longer answers. TCP probes detect a dead peer;
/// HTTP/2 pings also detect a dead API server behind a proxy that still acknowledges TCP segments.
#[derive(Debug, Clone, Copy)]
pub(super) struct Liveness {
    /// Time without a packet after which the kernel sends TCP keep-alive probes.
    idle: Duration,
    /// Time between two TCP keep-alive probes.
    interval: Duration,
    /// Time without an acknowledgment of data or probes after which the connection fails.
    unacknowledged: Duration,
    /// Time without a received frame after which the HTTP/2 client sends a ping.
    ping_after: Duration,
    /// If no frame arrives within this time after the ping, the connection fails.
    ping_timeout: Duration,
}

/// The time limits of the agent's connections. A watch may be silent for minutes, so only probes distinguish a dead
/// connection from a cluster without changes. The time limit of HTTP/2 pings is the default of client-go.
pub(super) const LIVENESS: Liveness = Liveness {
    idle: Duration::from_secs(10),
    interval: Duration::from_secs(5),
    unacknowledged: Duration::from_secs(20),
    ping_after: Duration::from_secs(10),
    ping_timeout: Duration::from_secs(15),
};

/// Builds kube's client stack with these changes. The client does not retry, because a retry minutes later would send
/// an outdated patch. The client disables Nagle's algorithm, which can delay a patch by 40 ms. TCP probes test
/// silent connections. The client offers HTTP/2, because a ping of HTTP/2 also detects a dead API server behind a
/// proxy. [`TokenFile`] reads the service account token.
pub(super) fn build(mut config: Config, liveness: Liveness) -> kube::Result<Client> {
    let token = TokenFile::take(&mut config.auth_info)?;
    let (for_requests, for_responses) = (token.clone(), token);
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(liveness.idle));
    tcp.set_keepalive_interval(Some(liveness.interval));
    tcp.set_tcp_user_timeout(Some(liveness.unacknowledged));
    let mut connector = TimeoutConnector::new(https(&config, tcp)?);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    connector.set_read_timeout(Some(READ_TIMEOUT));
    connector.set_write_timeout(Some(WRITE_TIMEOUT));
    connector.set_reset_reader_on_write(true);
    let mut http = Builder::new(TokioExecutor::new());
    http.timer(TokioTimer::new())
        .http2_keep_alive_interval(liveness.ping_after)
        .http2_keep_alive_timeout(liveness.ping_timeout)
        .http2_keep_alive_while_idle(true);
    let service = ServiceBuilder::new()
        .layer(TimeoutLayer::new(ANSWER_TIMEOUT))
        .layer(config.base_uri_layer())
        // This layer decompresses lists, because the API server compresses lists above 128 KiB. Watches arrive
        // uncompressed, because kube does not request compression for watches.
        .layer(DecompressionLayer::new())
        .map_request(move |request| TokenFile::authorize(for_requests.as_ref(), request))
        .map_response(move |response| TokenFile::invalidate_if_refused(for_responses.as_ref(), response))
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(http.build(connector));
    Ok(Client::new(service, config.default_namespace))
}

/// Builds the same connector as [`kube::client::ConfigExt::rustls_https_connector_with_connector`], except that this
/// connector also offers HTTP/2 to the server. The connector of kube's function offers only HTTP/1.1.
fn https(config: &Config, tcp: HttpConnector) -> kube::Result<HttpsConnector<HttpConnector>> {
    let mut builder = HttpsConnectorBuilder::new().with_tls_config(config.rustls_client_config()?).https_or_http();
    if let Some(name) = config.tls_server_name.clone() {
        let name = name.try_into().map_err(|err| kube::Error::RustlsTls(RustlsTlsError::InvalidServerName(err)))?;
        builder = builder.with_server_name_resolver(FixedServerNameResolver::new(name));
    }
    Ok(builder.enable_all_versions().wrap_connector(tcp))
}

#[cfg(test)]
#[path = "transport_tests.rs"]
pub(super) mod tests;
