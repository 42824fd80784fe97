// SPDX-License-Identifier: Apache-2.0
//! The API server's audit log of the agent's requests.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::AGENT_USER;
use crate::run::Run;

/// The files of the audit policy and of the audit log. The API server writes the entry of a request before it completes
/// the response.
#[derive(Debug)]
pub struct AuditLog {
    policy: PathBuf,
    log: PathBuf,
}

/// One request of the agent to which the API server has sent an answer, or the start of a watch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AuditedRequest {
    /// The verb, such as `list`.
    pub verb: String,
    /// The resource, such as `services`.
    pub resource: String,
    /// The namespace of the request; `None` for a request for all namespaces, or for a resource without namespaces.
    pub namespace: Option<String>,
    /// The path and the query.
    pub uri: String,
}

impl AuditLog {
    /// Writes a policy that logs each request of the agent once, and a watch twice: at its start and at its end.
    pub fn new(run: &Run) -> Result<Self> {
        let (policy, log) = (run.file("audit-policy.json"), run.file("audit.log"));
        let rules = json!([{"level": "Metadata", "users": [AGENT_USER]}, {"level": "None"}]);
        let content = json!({
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": rules,
        });
        fs::write(&policy, content.to_string()).context("write the audit policy")?;
        Ok(Self { policy, log })
    }

    /// Returns the flags with which the API server writes this log.
    pub fn flags(&self) -> [String; 2] {
        [format!("--audit-policy-file={}", self.policy.display()), format!("--audit-log-path={}", self.log.display())]
    }

    /// Returns the agent's requests so far, each once, in the order of their answers.
    pub fn requests(&self) -> Result<Vec<AuditedRequest>> {
        let text = fs::read_to_string(&self.log).context("read the audit log")?;
        // The API server may be writing the last line.
        let complete = text.rsplit_once('\n').map_or("", |(complete, _)| complete);
        let mut known = BTreeSet::new();
        let mut requests = Vec::new();
        for line in complete.lines() {
            let (id, request) = entry(line).with_context(|| format!("parse the audit entry {line}"))?;
            if known.insert(id) {
                requests.push(request);
            }
        }
        Ok(requests)
    }
}

/// Returns the ID and the request of an entry. The entries of one request have the same ID.
fn entry(line: &str) -> Result<(String, AuditedRequest)> {
    let entry: Value = serde_json::from_str(line)?;
    let text = |pointer: &str| entry.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
    let request = AuditedRequest {
        verb: text("/verb").context("no verb")?,
        resource: text("/objectRef/resource").unwrap_or_default(),
        namespace: text("/objectRef/namespace"),
        uri: text("/requestURI").context("no URI")?,
    };
    Ok((text("/auditID").context("no ID")?, request))
}
