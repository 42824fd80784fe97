// SPDX-License-Identifier: Apache-2.0
//! Defines the command line of `npl-feed`.

use std::{fmt, net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

use clap::Parser;
use hickory_server::proto::rr::Name;
use ipnet::IpNet;
use npl_agent::{config::value, core::model::settings::PortRange, process::telemetry::LogFormat};

use crate::access::TlsFiles;

/// Serves the `NodePortLocal` mappings of a cluster to any load balancer: the members of each enabled Service by xDS,
/// DNS and HTTP. Reads Pods, Services and Nodes, and never writes to the API server.
#[derive(Debug, Clone, Parser)]
#[command(name = "npl-feed", version)]
pub struct Config {
    /// Serve xDS (ADS, state of the world and delta) on this address; `none` disables xDS. `[::]` means all addresses
    /// of both families, or all IPv4 addresses if the kernel has no IPv6.
    #[arg(long, env = "NPL_FEED_XDS", value_name = "ADDRESS|none", default_value = "[::]:18000")]
    pub xds: Listen,

    /// The maximum number of names to which all xDS streams together may subscribe, including the names of wildcard
    /// subscriptions. If a request makes the sum exceed the maximum, the feed ends the streams with the most names.
    /// Each load balancer subscribes to about two names for each Service port: its cluster and its endpoints. A name
    /// takes up to 500 bytes of memory.
    #[arg(long, env = "NPL_FEED_XDS_MAX_NAMES", value_name = "COUNT", default_value_t = 100_000)]
    pub xds_max_names: usize,

    /// Serve DNS by UDP and TCP on this address; `none` disables DNS.
    #[arg(long, env = "NPL_FEED_DNS", value_name = "ADDRESS|none", default_value = "[::]:5353")]
    pub dns: Listen,

    /// Serve the members of Services, the health probes and the metrics by HTTP on this address; `none` disables HTTP.
    #[arg(long, env = "NPL_FEED_HTTP", value_name = "ADDRESS|none", default_value = "[::]:8080")]
    pub http: Listen,

    /// Serve DNS names below this zone.
    #[arg(long, env = "NPL_FEED_ZONE", value_name = "ZONE", default_value = "npl.internal", value_parser = zone)]
    pub zone: Name,

    /// Serve only Services with these labels, in the syntax of `kubectl get --selector`. Unset: all enabled Services.
    #[arg(long, env = "NPL_FEED_SERVICES", value_name = "SELECTOR")]
    pub services: Option<String>,

    /// Connect to the API server with this kubeconfig file. Unset: with the service account of the feed's Pod.
    #[arg(long, env = "NPL_FEED_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Read the annotations of this domain. Give the value of the agents' `--annotation-domain`.
    #[arg(
        long,
        env = "NPL_FEED_ANNOTATION_DOMAIN",
        value_name = "DOMAIN",
        default_value = "nodeportlocal.antrea.io",
        value_parser = value::domain
    )]
    pub annotation_domain: String,

    /// Serve only node ports of this range, and the Pods' own host ports. Give the value of the agents' `--port-range`;
    /// if the agents have several ranges, give one that includes all of them.
    #[arg(long, env = "NPL_FEED_PORT_RANGE", value_name = "START-END", default_value = "61000-62000")]
    pub port_range: PortRange,

    /// Serve a withdrawn member as draining for this time. Give the value of the agents' `--drain`.
    #[arg(long, env = "NPL_FEED_DRAIN", value_name = "DURATION", default_value = "30s", value_parser = value::duration)]
    pub drain: Duration,

    /// After SIGTERM, serve for this time before the program ends, so that kube-proxy on the Nodes stops sending
    /// clients to this replica before the replica stops. Give the Pod a longer `terminationGracePeriodSeconds`.
    #[arg(
        long,
        env = "NPL_FEED_SHUTDOWN_DELAY",
        value_name = "DURATION",
        default_value = "10s",
        value_parser = value::duration
    )]
    pub shutdown_delay: Duration,

    /// Answer only clients with addresses in these ranges, separated by commas, for example
    /// `192.0.2.0/24,2001:db8::/32`. Other clients, such as the kubelet, get only the status codes of the probes.
    /// Unset: all clients.
    #[arg(long, env = "NPL_FEED_ALLOW", value_name = "RANGES", value_delimiter = ',', value_parser = range)]
    pub allow: Vec<IpNet>,

    /// Require the bearer token in this file for all xDS and HTTP requests except the probes. A change of the file
    /// takes effect within 30 seconds.
    #[arg(long, env = "NPL_FEED_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,

    /// Serve xDS and HTTP by TLS with the certificate chain in this PEM file, which is read again every 30 seconds. The
    /// kubelet's probes then need `scheme: HTTPS`.
    #[arg(long, env = "NPL_FEED_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// Use the private key in this PEM file for the certificate of `--tls-cert`.
    #[arg(long, env = "NPL_FEED_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// Serve xDS and HTTP only to clients with a certificate that a CA of this PEM file has signed. The kubelet's HTTP
    /// probes send no certificate, so configure TCP probes of the port.
    #[arg(long, env = "NPL_FEED_TLS_CLIENT_CA", value_name = "FILE", requires = "tls_cert")]
    pub tls_client_ca: Option<PathBuf>,

    /// Format of log lines on standard error.
    #[arg(long, env = "NPL_FEED_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
}

impl Config {
    /// The certificate and key files of TLS; `None` if the feed serves without TLS.
    pub fn tls(&self) -> Option<TlsFiles> {
        let (cert, key) = (self.tls_cert.clone()?, self.tls_key.clone()?);
        Some(TlsFiles { cert, key, client_ca: self.tls_client_ca.clone() })
    }
}

/// The address on which an interface listens; `None` if the interface is disabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listen(pub Option<SocketAddr>);

/// The reason why the feed refuses the value of an option.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// The value is not an address with a port.
    #[error("{0:?} is not an address with a port: give for example [::]:8080, or none")]
    Listen(String),
    /// The value is not the name of a DNS zone.
    #[error("{0:?} is not a DNS zone: give for example npl.internal")]
    Zone(String),
    /// The zone is too long for the names below it.
    #[error(
        "{0:?} is a zone of {len} characters, and the names below it would exceed the 255 bytes of DNS: give a zone of \
         at most {most} characters",
        len = .0.trim_end_matches('.').len(),
        most = LONGEST_ZONE
    )]
    LongZone(String),
    /// The value is not an address range.
    #[error("{0:?} is not an address range: give for example 192.0.2.0/24 or 2001:db8::/32")]
    Range(String),
}

impl FromStr for Listen {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        if text == "none" {
            return Ok(Self(None));
        }
        text.parse().map(|address| Self(Some(address))).map_err(|_unparsable| ValueError::Listen(text.to_owned()))
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.fmt(f),
            None => f.write_str("none"),
        }
    }
}

/// The maximum length of the zone's name in characters, without the final dot. A DNS name has at most 255 bytes. The
/// longest name below the zone, `_PORT._PROTOCOL.SERVICE.NAMESPACE`, takes 151 bytes, and the zone's name takes two
/// bytes more than it has characters.
const LONGEST_ZONE: usize = 255 - (17 + 6 + 64 + 64) - 2;

fn zone(text: &str) -> Result<Name, ValueError> {
    let refused = || ValueError::Zone(text.to_owned());
    let mut name = Name::from_ascii(text).map_err(|_malformed| refused())?;
    name.set_fqdn(true);
    if name.is_root() || name.num_labels() == 0 {
        return Err(refused());
    }
    // `Name::len` counts the final dot.
    if name.len() > LONGEST_ZONE + 1 { Err(ValueError::LongZone(text.to_owned())) } else { Ok(name.to_lowercase()) }
}

/// Parses an address range, or a single address as a range with one address.
fn range(text: &str) -> Result<IpNet, ValueError> {
    let text = text.trim();
    let address = || text.parse().ok().map(|address: std::net::IpAddr| IpNet::from(address));
    text.parse().ok().or_else(address).ok_or_else(|| ValueError::Range(text.to_owned()))
}

#[cfg(test)]
mod manifest_tests;

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use expect_test::expect_file;
    use npl_agent::reference;

    use super::*;

    fn parse(arguments: &[&str]) -> Result<Config, String> {
        let all = ["npl-feed"].iter().chain(arguments);
        Config::try_parse_from(all).map_err(|error| error.to_string())
    }

    #[test]
    fn by_default_all_interfaces_serve_all_clients() {
        let config = parse(&[]).unwrap();
        let listen = [config.xds, config.dns, config.http].map(|listen| listen.to_string());
        assert_eq!(listen, ["[::]:18000", "[::]:5353", "[::]:8080"]);
        assert_eq!((config.zone.to_ascii().as_str(), config.drain), ("npl.internal.", Duration::from_secs(30)));
        assert!(config.allow.is_empty() && config.token_file.is_none() && config.tls().is_none());
    }

    #[test]
    fn values_are_read() {
        let config = parse(&["--xds", "none", "--zone", "Example.COM", "--allow", "192.0.2.0/24,2001:db8::1"]).unwrap();
        assert_eq!((config.xds, config.zone.to_ascii().as_str()), (Listen(None), "example.com."));
        assert_eq!(
            config.allow.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["192.0.2.0/24", "2001:db8::1/128"]
        );
    }

    /// Returns a zone name with this number of characters, which must be between 65 and 127.
    fn zone_of(length: usize) -> String {
        format!("{}.{}", "a".repeat(63), "b".repeat(length - 64))
    }

    /// With the longest zone, the longest names that the feed serves have 255 bytes.
    #[test]
    fn the_longest_names_fit_below_the_longest_zone() {
        let zone = zone_of(LONGEST_ZONE);
        for text in [zone.clone(), format!("{zone}.")] {
            assert_eq!(parse(&["--zone", &text]).unwrap().zone.to_ascii(), format!("{zone}."));
        }
        let zone = Name::from_ascii(&zone).unwrap();
        let label = |length| "x".repeat(length);
        let below = |port| Name::from_labels([label(port), "_sctp".to_owned(), label(63), label(63)]);
        assert_eq!(below(16).unwrap().append_domain(&zone).unwrap().len() + 1, 255);
        assert!(below(17).unwrap().append_domain(&zone).is_err());
    }

    #[test]
    fn the_shutdown_delay_may_be_zero() {
        assert_eq!(parse(&[]).unwrap().shutdown_delay, Duration::from_secs(10));
        assert_eq!(parse(&["--shutdown-delay", "0s"]).unwrap().shutdown_delay, Duration::ZERO);
    }

    #[test]
    fn refused_values_are_named_with_an_example() {
        let long = zone_of(LONGEST_ZONE + 1);
        for (flag, value, expected) in [
            ("--xds", "8080", "is not an address with a port: give for example [::]:8080"),
            ("--zone", ".", "is not a DNS zone"),
            ("--zone", "a..b", "is not a DNS zone"),
            ("--zone", long.as_str(), "is a zone of 103 characters"),
            ("--allow", "192.0.2.0/33", "is not an address range"),
            ("--drain", "30", "is not a duration"),
            ("--port-range", "61000", "is not START-END"),
            ("--tls-cert", "a.pem", "--tls-key"),
        ] {
            let error = parse(&[flag, value]).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn the_reference_page_shows_all_flags() {
        let body = format!(
            "The flags, environment variables and defaults of `npl-feed`.\n{}",
            reference::flags::of_program(&Config::command())
        );
        expect_file![concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/feed.md")]
            .assert_eq(&reference::page("Flags of npl-feed", &body));
    }
}
