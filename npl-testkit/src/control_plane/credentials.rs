// SPDX-License-Identifier: Apache-2.0
//! Creates the accounts, tokens and keys of a control plane.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};

use crate::run::random_hex;

/// The DER encoding of a `SubjectPublicKeyInfo` (RFC 5480) up to the point of a P-256 key.
const P256_PUBLIC_KEY: &[u8] = &[
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce,
    0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

/// The groups that Kubernetes assigns to a service account of `npl-system`.
const AGENT_GROUPS: [&str; 3] = ["system:serviceaccounts", "system:serviceaccounts:npl-system", "system:authenticated"];

/// A user that authenticates to the API server with a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// The user name.
    pub user: String,
    /// The groups of the user.
    pub groups: Vec<String>,
}

impl Account {
    /// Creates an account in these groups.
    pub fn new(user: &str, groups: &[&str]) -> Self {
        Self { user: user.to_owned(), groups: groups.iter().map(ToString::to_string).collect() }
    }

    /// Returns the account of the agents.
    pub fn agent() -> Self {
        Self::new(super::AGENT_USER, &AGENT_GROUPS)
    }

    /// Creates an account with all rights.
    pub(super) fn admin() -> Self {
        Self::new(super::ADMIN, &["system:masters"])
    }
}

/// The tokens of all accounts, by user.
#[derive(Clone, Debug)]
pub(super) struct Tokens(BTreeMap<String, String>);

impl Tokens {
    /// Creates a token for each account and writes the token file of the API server.
    pub(super) fn write(file: &Path, accounts: &[Account]) -> Result<Self> {
        let mut tokens = BTreeMap::new();
        let mut lines = Vec::new();
        for (number, Account { user, groups }) in accounts.iter().enumerate() {
            let token = random_hex(16)?;
            lines.push(format!("{token},{user},{number},\"{}\"\n", groups.join(",")));
            tokens.insert(user.clone(), token);
        }
        write_secret(file, &lines.concat())?;
        Ok(Self(tokens))
    }

    pub(super) fn of(&self, user: &str) -> Result<&str> {
        self.0.get(user).map(String::as_str).with_context(|| format!("this control plane has no account {user}"))
    }
}

/// Creates a key pair for service account tokens. The API server requires the public key in a separate file.
pub(super) fn write_signing_key(private_file: &Path, public_file: &Path) -> Result<()> {
    let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
    let random = SystemRandom::new();
    let private = EcdsaKeyPair::generate_pkcs8(algorithm, &random).ok().context("create a signing key")?;
    let pair = EcdsaKeyPair::from_pkcs8(algorithm, private.as_ref(), &random).ok().context("read a signing key")?;
    let public = [P256_PUBLIC_KEY, pair.public_key().as_ref()].concat();
    write_secret(private_file, &pem("PRIVATE KEY", private.as_ref()))?;
    write_secret(public_file, &pem("PUBLIC KEY", &public))
}

/// Returns a self-contained kubeconfig.
pub(super) fn kubeconfig(server: SocketAddr, certificate: &[u8], user: &str, token: &str) -> String {
    let certificate = STANDARD.encode(certificate);
    format!(
        "apiVersion: v1
kind: Config
current-context: npl
contexts: [{{name: npl, context: {{cluster: npl, user: \"{user}\"}}}}]
clusters: [{{name: npl, cluster: {{server: \"https://{server}\", certificate-authority-data: {certificate}}}}}]
users: [{{name: \"{user}\", user: {{token: \"{token}\"}}}}]
"
    )
}

/// Creates a file that only its owner can read.
pub(crate) fn write_secret(path: &Path, text: &str) -> Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("create {}", path.display()))?;
    file.write_all(text.as_bytes()).with_context(|| format!("write {}", path.display()))
}

fn pem(label: &str, content: &[u8]) -> String {
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", STANDARD.encode(content))
}
