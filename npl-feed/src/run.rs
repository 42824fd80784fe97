// SPDX-License-Identifier: Apache-2.0
//! Starts all parts of the feed, and stops them after SIGTERM or SIGINT.

use std::{
    net::SocketAddr,
    pin::pin,
    sync::{Arc, Once},
    time::Duration,
};

use anyhow::Context as _;
use axum::{Router, middleware};
use ipnet::IpNet;
use npl_agent::core::pages;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_rustls::rustls::ServerConfig;
use tracing::{info, warn};

use crate::{
    access::{AccessError, TlsFiles, Token},
    client_memory::ClientMemory,
    config::Config,
    connection_limits::ConnectionLimits,
    dns,
    follow::{self, Published},
    http, kube,
    listen::{self, Listener, Shared},
    status::{Interface, Status},
    xds,
};

/// The maximum number of changes of the cluster that are queued for the main loop.
const WAITING_CHANGES: usize = 64;
/// The interval at which the token file and the TLS files are read again.
const RELOAD: Duration = Duration::from_secs(30);

/// Runs the feed until SIGINT, or until [`Config::shutdown_delay`] has passed since SIGTERM. A second SIGTERM ends the
/// feed immediately.
///
/// # Errors
///
/// Returns an error if the feed cannot bind an address, if it cannot use a token file, a TLS file or the kubeconfig, or
/// if a watch or another task of the feed ends.
pub async fn run(config: Config, limits: ConnectionLimits) -> anyhow::Result<()> {
    let status = Arc::new(Status::default());
    let (publisher, published) = watch::channel(None);
    let mut tasks = JoinSet::new();
    serve(&config, limits, &published, &status, &mut tasks).await?;

    let (sender, changes) = mpsc::channel(WAITING_CHANGES);
    let mut watches = kube::watch(&config, &status, &sender).await?;
    drop(sender);
    tasks.spawn(follow::run(changes, config.port_range, config.drain, status, publisher));

    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let signals = async || {
        tokio::select! {
            _ = terminate.recv() => Signal::Terminate,
            _ = interrupt.recv() => Signal::Interrupt,
        }
    };
    let mut end = pin!(end_of_service(signals, config.shutdown_delay));
    tokio::select! {
        () = &mut end => {}
        ended = watches.join_next() => anyhow::bail!("a watch ended: {ended:?}; this is a defect, report it"),
        ended = tasks.join_next() => anyhow::bail!("a task ended: {ended:?}; this is a defect, report it"),
    }
    info!("the feed ends; load balancers keep the members that they know");
    Ok(())
}

/// A signal that ends the feed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Signal {
    /// SIGTERM, which ends the feed after [`Config::shutdown_delay`].
    Terminate,
    /// SIGINT, which ends the feed immediately.
    Interrupt,
}

/// Waits until the feed has to stop serving: immediately after SIGINT, `delay` after SIGTERM, or immediately after any
/// signal during the delay. `next` waits for a signal.
async fn end_of_service(mut next: impl AsyncFnMut() -> Signal, delay: Duration) {
    if next().await == Signal::Interrupt || delay.is_zero() {
        return;
    }
    info!(
        ?delay,
        "SIGTERM: the feed serves for this time, so that kube-proxy first stops sending clients to this replica"
    );
    // A timeout is not an error: the delay has passed without a second signal.
    drop(timeout(delay, next()).await);
}

/// Binds all addresses, and starts the interfaces xDS, DNS and HTTP.
///
/// # Errors
///
/// Returns an error if the feed cannot bind an address, or cannot use a token file or a TLS file.
pub async fn serve(
    config: &Config,
    limits: ConnectionLimits,
    published: &Published,
    status: &Arc<Status>,
    tasks: &mut JoinSet<()>,
) -> anyhow::Result<()> {
    let allowed: Arc<[IpNet]> = config.allow.clone().into();
    let token = config.token_file.as_deref().map(|path| Token::follow(path, RELOAD)).transpose()?;
    let tls = config.tls().map(|files| follow_tls(files, tasks)).transpose()?;
    let logged = Once::new();
    let (memory, status) = (ClientMemory::default(), Arc::clone(status));
    let shared = Shared { allowed: Arc::clone(&allowed), tls, status: Arc::clone(&status), memory, limits };
    let bind = async |address: SocketAddr, interface: Interface| {
        let bind = async |address| Listener::bind(address, interface, shared.clone());
        listen::bind_with(address, &logged, bind).await.with_context(|| refused(interface.as_str(), address))
    };
    if let Some(address) = config.http.0 {
        let listener = bind(address, Interface::Http).await?;
        info!(address = %listener.address()?, "serving HTTP");
        let interfaces =
            http::Interfaces { xds: config.xds.0.is_some(), zone: config.dns.0.map(|_| config.zone.clone()) };
        let router = http::router(published.clone(), Arc::clone(&status), interfaces, token.clone());
        tasks.spawn(listener.serve(router, Some(http::probes(published.clone(), Arc::clone(&status)))));
    }
    if let Some(address) = config.xds.0 {
        let listener = bind(address, Interface::Xds).await?;
        info!(address = %listener.address()?, "serving xDS");
        let router = xds::router(published.clone(), Arc::clone(&status), config.xds_max_names);
        tasks.spawn(listener.serve(guarded(router, token), None));
    }
    if let Some(address) = config.dns.0 {
        let sockets = listen::bind_with(address, &logged, dns::Sockets::bind).await;
        let sockets = sockets.with_context(|| refused("dns", address))?;
        info!(address = %sockets.address()?, zone = %config.zone, "serving DNS");
        let (zone, published) = (config.zone.clone(), published.clone());
        tasks.spawn(async move {
            if let Err(error) = dns::serve(sockets, zone, &allowed, published, status, limits.dns).await {
                warn!(see = pages::url(pages::FEED_FAILURES), %error, "the DNS server has ended: the feed ends, and the kubelet restarts its container");
            }
        });
    }
    Ok(())
}

fn refused(flag: &str, address: SocketAddr) -> String {
    format!("listen on {address}: give --{flag} an address of this machine with a free port")
}

fn guarded(router: Router, token: Option<Token>) -> Router {
    match token {
        Some(token) => router.layer(middleware::from_fn_with_state(token, Token::check)),
        None => router,
    }
}

/// Reads the TLS files at the start and then every 30 seconds ([`RELOAD`]), so that the feed uses renewed certificates
/// without a restart.
fn follow_tls(files: TlsFiles, tasks: &mut JoinSet<()>) -> Result<watch::Receiver<Arc<ServerConfig>>, AccessError> {
    let (sender, receiver) = watch::channel(files.load()?);
    tasks.spawn(async move {
        loop {
            sleep(RELOAD).await;
            match files.load() {
                Ok(config) => drop(sender.send_replace(config)),
                Err(error) => {
                    warn!(see = pages::url(pages::FEED_SECURITY), %error, "the TLS files cannot be read again; the feed uses the previous certificate and key");
                }
            }
        }
    });
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::Instant;

    use super::*;

    const DELAY: Duration = Duration::from_secs(10);

    /// Returns how long the feed serves. Each signal arrives at the given time after the start of the feed.
    async fn serving_time(signals: &[(Duration, Signal)], delay: Duration) -> Duration {
        let started = Instant::now();
        let mut signals = signals.iter();
        let next = async || match signals.next() {
            Some((at, signal)) => {
                tokio::time::sleep_until(started + *at).await;
                *signal
            }
            None => pending().await,
        };
        end_of_service(next, delay).await;
        started.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn the_feed_serves_until_the_delay_after_sigterm_has_passed() {
        const AT: Duration = Duration::from_mins(1);
        for delay in [Duration::ZERO, Duration::from_millis(1), DELAY, Duration::from_hours(1)] {
            assert_eq!(serving_time(&[(AT, Signal::Terminate)], delay).await, AT + delay);
        }
        assert_eq!(serving_time(&[(AT, Signal::Interrupt)], DELAY).await, AT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_signal_ends_the_delay() {
        let [first, second] = [2, 5].map(Duration::from_secs);
        for signal in [Signal::Terminate, Signal::Interrupt] {
            assert_eq!(serving_time(&[(first, Signal::Terminate), (second, signal)], DELAY).await, second);
        }
        let late = [(first, Signal::Terminate), (first + 2 * DELAY, Signal::Terminate)];
        assert_eq!(serving_time(&late, DELAY).await, first + DELAY);
    }
}
