// SPDX-License-Identifier: Apache-2.0
//! A client of etcd, which uses etcd's JSON gateway.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::netns::Netns;

/// The largest number of operations in one transaction, which is etcd's default limit.
const OPERATIONS: usize = 128;

/// As the first key, this byte selects all keys from the first one. As the end of the range, it selects all keys up to
/// the last one.
const ALL: &[u8] = &[0];

/// A client of an etcd that listens on the loopback device of a namespace.
#[derive(Clone, Copy, Debug)]
pub(super) struct EtcdClient<'n> {
    port: u16,
    netns: Option<&'n Netns>,
}

impl<'n> EtcdClient<'n> {
    pub(super) fn new(port: u16, netns: Option<&'n Netns>) -> Self {
        Self { port, netns }
    }

    /// Returns the revision at which each key was last written, by key.
    pub(super) fn keys(self) -> Result<BTreeMap<String, String>> {
        let all = STANDARD.encode(ALL);
        let found = self.call("kv/range", &json!({ "key": all, "range_end": all, "keys_only": true }))?;
        let entries = found.get("kvs").and_then(Value::as_array).into_iter().flatten();
        entries.map(|entry| parse(entry).with_context(|| format!("parse {entry}"))).collect()
    }

    /// Deletes these keys.
    pub(super) fn delete(self, keys: &[&String]) -> Result<()> {
        for part in keys.chunks(OPERATIONS) {
            let delete = |key: &&String| json!({ "requestDeleteRange": { "key": STANDARD.encode(key) } });
            let operations: Vec<Value> = part.iter().map(delete).collect();
            self.call("kv/txn", &json!({ "success": operations }))?;
        }
        Ok(())
    }

    /// Compacts etcd to this revision, so that watches from older revisions fail.
    pub(super) fn compact(self, revision: &str) -> Result<()> {
        self.call("kv/compaction", &json!({ "revision": revision, "physical": true })).map(drop)
    }

    fn call(self, method: &str, request: &Value) -> Result<Value> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let body = request.to_string();
        let send = || -> Result<String> {
            let mut response = ureq::post(format!("http://{address}/v3/{method}")).send(body.as_str())?;
            Ok(response.body_mut().read_to_string()?)
        };
        let text = match self.netns {
            Some(netns) => netns.run(send)?,
            None => send(),
        };
        let text = text.with_context(|| format!("call etcd's {method}"))?;
        serde_json::from_str(&text).with_context(|| format!("parse etcd's answer to {method}: {text}"))
    }
}

/// Returns the key of an entry, and the revision at which the entry was last written.
fn parse(entry: &Value) -> Option<(String, String)> {
    let key = STANDARD.decode(entry.get("key")?.as_str()?).ok()?;
    Some((String::from_utf8(key).ok()?, entry.get("mod_revision")?.as_str()?.to_owned()))
}
