// SPDX-License-Identifier: Apache-2.0
//! Advice for the case that the agent cannot verify the API server's certificate.

/// The advice for a certificate that fails verification.
const UNVERIFIED: &str = "the API server's certificate cannot be verified: check the CA of the service account or kubeconfig, and that the \
     certificate is signed with RSA, Ed25519, ECDSA P-256 with SHA-256 or ECDSA P-384 with SHA-384, since this agent \
     verifies no other signatures; the agent retries";

/// The advice for an API server that ends the handshake before it sends a certificate.
const NO_COMMON_ALGORITHM: &str = "the API server ends the TLS handshake, as if its certificate had an ECDSA P-521 key: use a certificate with an RSA, \
     Ed25519, ECDSA P-256 or ECDSA P-384 key, and permit TLS 1.2 or 1.3, since this agent supports no other keys and \
     versions; the agent retries";

/// Returns the advice if a connection failed because of the API server's certificate. `cause` is the text of the error's
/// last cause. The text is compared, because the error's type belongs to a crate on which NPL does not depend directly.
pub fn advice(cause: &str) -> Option<&'static str> {
    if cause.contains("invalid peer certificate") {
        Some(UNVERIFIED)
    } else if cause.contains("received fatal alert: HandshakeFailure") {
        Some(NO_COMMON_ALGORITHM)
    } else {
        None
    }
}
