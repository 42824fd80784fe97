// SPDX-License-Identifier: Apache-2.0
//! Controls access to the feed's interfaces by a bearer token, by TLS with client certificates, and by the allow list
//! of client addresses.

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    extract::{Request, State},
    http::{HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use ipnet::IpNet;
use npl_agent::core::pages;
use tokio::time::Instant;
use tokio_rustls::rustls::{
    self, RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};
use tracing::warn;

use crate::core::snapshot::Version;

/// The reason why the feed cannot use a token file, certificate file or key file.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The feed cannot read or parse a file that an option names.
    #[error("read {}: {reason}; give --{option} a readable file", path.display())]
    Unreadable {
        /// The command-line option that names the file.
        option: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system or of the PEM parser.
        reason: String,
    },
    /// The token file is empty.
    #[error("the file {} of --token-file is empty: write a token into it", .0.display())]
    EmptyToken(PathBuf),
    /// rustls rejects the server's certificate and key, for example because the key does not match the certificate.
    #[error("use the certificate of --tls-cert with the key of --tls-key: {0}; give a matching pair")]
    Certificate(#[source] rustls::Error),
    /// rustls rejects the CA certificates of `--tls-client-ca`.
    #[error("use the certificates of --tls-client-ca: {0}; give CA certificates in PEM format")]
    ClientCa(String),
}

/// A bearer token, stored as a digest. The feed compares digests instead of tokens, so the duration of a comparison
/// reveals nothing about the token.
#[derive(Debug, Clone)]
pub struct Token(Arc<Mutex<Followed>>);

#[derive(Debug)]
struct Followed {
    digest: Version,
    /// The path of the token file, the shortest interval between two reads of the file, and the earliest time of the
    /// next read; `None` for a fixed token.
    file: Option<(PathBuf, Duration, Instant)>,
}

impl Token {
    /// Reads the token from a file, without surrounding white space. When a request arrives at least `interval` after
    /// the last read, the feed reads the file again.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be read or is empty.
    pub fn follow(path: &Path, interval: Duration) -> Result<Self, AccessError> {
        let file = Some((path.to_owned(), interval, Instant::now() + interval));
        Ok(Self(Arc::new(Mutex::new(Followed { digest: digest_of(path)?, file }))))
    }

    /// Creates a token that does not come from a file and never changes.
    pub fn fixed(token: &str) -> Self {
        Self(Arc::new(Mutex::new(Followed { digest: Version::of(token.as_bytes()), file: None })))
    }

    fn digest(&self) -> Version {
        let mut followed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let due = followed.file.as_mut().filter(|(_, _, next)| *next <= now).map(|(path, interval, next)| {
            *next = now + *interval;
            digest_of(path)
        });
        match due {
            Some(Ok(digest)) => followed.digest = digest,
            Some(Err(error)) => {
                warn!(see = pages::url(pages::FEED_SECURITY), %error, "the token file cannot be read again; the feed requires the previous token");
            }
            None => {}
        }
        followed.digest
    }

    /// Passes a request with the valid token to the next handler, and refuses any other request.
    pub async fn check(State(token): State<Self>, request: Request, next: Next) -> Response {
        let sent = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        // The name of the scheme is not case-sensitive (RFC 9110, section 11.1).
        let sent =
            sent.and_then(|value| value.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("Bearer"));
        let sent = sent.map(|(_, sent)| Version::of(sent.trim().as_bytes()));
        if sent == Some(token.digest()) {
            return next.run(request).await;
        }
        const ADVICE: &str = "send the header Authorization: Bearer TOKEN";
        let kind = request.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
        if kind.is_some_and(|kind| kind.starts_with(b"application/grpc")) {
            return tonic::Status::unauthenticated(ADVICE).into_http();
        }
        let challenge = [(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))];
        (StatusCode::UNAUTHORIZED, challenge, ADVICE).into_response()
    }
}

fn digest_of(path: &Path) -> Result<Version, AccessError> {
    let text = fs::read_to_string(path).map_err(|err| unreadable("token-file", path, &err))?;
    let token = text.trim();
    if token.is_empty() { Err(AccessError::EmptyToken(path.to_owned())) } else { Ok(Version::of(token.as_bytes())) }
}

/// The certificate and key files of TLS.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The file of the server's certificate chain, in PEM format.
    pub cert: PathBuf,
    /// The file of the server's private key, in PEM format.
    pub key: PathBuf,
    /// The file of the CA certificates that sign client certificates, in PEM format; `None` if clients need no
    /// certificate.
    pub client_ca: Option<PathBuf>,
}

impl TlsFiles {
    /// Reads the certificate and key files, and builds the TLS configuration of the server.
    ///
    /// # Errors
    ///
    /// Returns an error if a file cannot be read, if rustls rejects the CA certificates, or if the certificate and the
    /// key do not match.
    pub fn load(&self) -> Result<Arc<ServerConfig>, AccessError> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(AccessError::Certificate)?;
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates("tls-client-ca", path)? {
                    roots.add(certificate).map_err(|err| AccessError::ClientCa(err.to_string()))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                builder
                    .with_client_cert_verifier(verifier.build().map_err(|err| AccessError::ClientCa(err.to_string()))?)
            }
        };
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(|err| unreadable("tls-key", &self.key, &err))?;
        let chain = certificates("tls-cert", &self.cert)?;
        let mut config = builder.with_single_cert(chain, key).map_err(AccessError::Certificate)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

fn certificates(option: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, AccessError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let certificates = read.map_err(|err| unreadable(option, path, &err))?;
    if certificates.is_empty() {
        let none = io::Error::other("the file has no certificate in PEM format");
        return Err(unreadable(option, path, &none));
    }
    Ok(certificates)
}

fn unreadable(option: &'static str, path: &Path, err: &dyn std::fmt::Display) -> AccessError {
    AccessError::Unreadable { option, path: path.to_owned(), reason: err.to_string() }
}

/// Returns whether the allow list admits a client's address. An empty list admits all clients.
pub fn admits(allowed: &[IpNet], address: IpAddr) -> bool {
    let address = address.to_canonical();
    allowed.is_empty() || allowed.iter().any(|range| range.contains(&address))
}
