// SPDX-License-Identifier: Apache-2.0
//! Reuses the control planes of earlier tests. A start takes more than two seconds of processor time; the removal of an
//! earlier test's objects takes a few hundredths of a second.
//!
//! A test never sees objects of an earlier test. A control plane is reused only if the earlier test has passed. Also,
//! the earlier test must have created no objects except Services, and objects that the API server itself does not act
//! on. These objects are deleted, and the control plane is reused only when the API server no longer returns them. If
//! the earlier test has changed anything else, such as RBAC rules or admission webhooks, the control plane is stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::{Mutex, Once, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{ControlPlane, Front};
use crate::netns::Netns;
use crate::proxy::Proxy;
use crate::run::Run;
use crate::{poll, process};

/// The kinds of objects of which a pool deletes all that a test has created: the prefix of their keys in etcd, and the
/// API path that lists them. The API server's own decisions do not depend on objects of these kinds.
const ERASED: [(&str, &str); 3] = [
    ("/registry/events/", "/api/v1/events"),
    ("/registry/minions/", "/api/v1/nodes"),
    ("/registry/pods/", "/api/v1/pods"),
];

/// The prefix of the keys of Services, and the API path that lists them. Services are deleted through the API server,
/// which then releases their addresses. The API server writes an Event if a Service or its address disappears from etcd.
const SERVICES: (&str, &str) = ("/registry/services/specs/", "/api/v1/services");

/// The keys that the API server itself writes at any time: its leases, its record of compactions, and the address of its
/// Service. An entry that ends with a slash is the prefix of several keys.
const OWN: [&str; 4] = [
    "/registry/ipaddresses/10.96.0.1",
    "/registry/leases/kube-system/",
    "/registry/peerserverleases/",
    "compact_rev_key",
];

/// The API path of the API server's own Service.
const OWN_SERVICE: &str = "/api/v1/namespaces/default/services/kubernetes";

/// The time limit for the API server to create its own Service, and to notice that objects were deleted from etcd. Both
/// take less than a second.
const NOTICED_WITHIN: Duration = Duration::from_secs(20);

/// The number of attempts to delete all objects. A second attempt finds objects whose creation was in progress when the
/// earlier test ended.
const ATTEMPTS: usize = 3;

/// All pools of this process that have control planes.
static POOLS: Mutex<Vec<&'static Pool>> = Mutex::new(Vec::new());

/// Control planes that no running test uses. All control planes of a pool have the same objects.
#[derive(Debug)]
pub struct Pool {
    prepare: fn(&ControlPlane) -> Result<()>,
    unused: Mutex<Vec<Prepared>>,
    at_exit: Once,
}

/// A control plane of a pool, for one network namespace. Dropping this value returns the control plane to its pool,
/// unless the thread is panicking.
#[derive(Debug)]
pub struct PooledControlPlane {
    prepared: Option<Prepared>,
    pool: &'static Pool,
}

/// A control plane, and the keys that etcd had after the preparation. Fields are dropped in declaration order.
#[derive(Debug)]
struct Prepared {
    plane: ControlPlane,
    keys: BTreeMap<String, String>,
    _run: Run,
}

impl Pool {
    /// Creates an empty pool. `prepare` creates the objects that each test needs, and waits until the API server applies
    /// these objects.
    pub const fn new(prepare: fn(&ControlPlane) -> Result<()>) -> Self {
        Self { prepare, unused: Mutex::new(Vec::new()), at_exit: Once::new() }
    }

    /// Returns a control plane for clients in `netns`: an unused one without the objects of earlier tests, or a new one.
    pub fn take(&'static self, netns: &Netns) -> Result<PooledControlPlane> {
        let mut prepared = match self.erased() {
            Some(prepared) => prepared,
            None => self.start()?,
        };
        prepared.plane.serve_in(netns)?;
        Ok(PooledControlPlane { prepared: Some(prepared), pool: self })
    }

    /// Takes an unused control plane and deletes the objects of the earlier test. Stops control planes that cannot be
    /// reused.
    fn erased(&self) -> Option<Prepared> {
        loop {
            let prepared = self.unused.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            match prepared.erase() {
                Ok(()) => return Some(prepared),
                Err(reason) => process::report(&format!("a control plane is not reused: {reason:#}")),
            }
        }
    }

    fn start(&'static self) -> Result<Prepared> {
        self.at_exit.call_once(|| empty_at_exit(self));
        let run = Run::start()?;
        let plane = ControlPlane::start(&run, None)?;
        // The API server creates its own Service shortly after it is ready.
        let client = plane.client()?;
        poll::until("the API server's own Service", NOTICED_WITHIN, || client.find(OWN_SERVICE).ok().flatten())?;
        (self.prepare)(&plane).context("prepare a control plane")?;
        let keys = plane.etcd_client().keys()?;
        Ok(Prepared { plane, keys, _run: run })
    }
}

impl Deref for PooledControlPlane {
    type Target = ControlPlane;

    #[expect(clippy::expect_used, reason = "only `drop` takes the value")]
    fn deref(&self) -> &ControlPlane {
        &self.prepared.as_ref().expect("a control plane until the drop").plane
    }
}

impl Drop for PooledControlPlane {
    fn drop(&mut self) {
        let Some(mut prepared) = self.prepared.take().filter(|_prepared| !thread::panicking()) else { return };
        prepared.plane.front = None;
        self.pool.unused.lock().unwrap_or_else(PoisonError::into_inner).push(prepared);
    }
}

impl Prepared {
    /// Deletes the objects that were created since the preparation, and waits until the API server has noticed.
    ///
    /// # Errors
    /// Returns an error if objects of other kinds than [`ERASED`] have changed.
    fn erase(&self) -> Result<()> {
        let etcd = self.plane.etcd_client();
        let mut kinds = BTreeSet::from([SERVICES]);
        self.delete_services(&etcd.keys()?)?;
        for _ in 0..ATTEMPTS {
            let now = etcd.keys()?;
            let created = created(&self.keys, &now)?;
            if created.is_empty() {
                return self.wait_until_noticed(&kinds);
            }
            kinds.extend(created.iter().filter_map(|key| kind_of(key)));
            etcd.delete(&created)?;
        }
        bail!("objects are created although the test has ended");
    }

    /// Deletes the Services among the keys `now` that were created since the preparation.
    fn delete_services(&self, now: &BTreeMap<String, String>) -> Result<()> {
        let client = self.plane.client()?;
        for key in now.keys().filter(|key| !self.keys.contains_key(*key)) {
            if let Some((namespace, name)) = key.strip_prefix(SERVICES.0).and_then(|name| name.split_once('/')) {
                client.delete(&format!("/api/v1/namespaces/{namespace}/services/{name}"))?;
            }
        }
        Ok(())
    }

    /// Waits until the API server's caches of these kinds contain only the objects of the preparation. With
    /// `resourceVersion=0`, the API server answers from its cache.
    fn wait_until_noticed(&self, kinds: &BTreeSet<(&str, &str)>) -> Result<()> {
        let client = self.plane.client()?;
        for (prefix, path) in kinds {
            let kept = self.keys.keys().filter(|key| key.starts_with(prefix)).count();
            poll::until(&format!("an API server without deleted objects in {path}"), NOTICED_WITHIN, || {
                let list = client.get(&format!("{path}?resourceVersion=0")).ok()?;
                (list.get("items").and_then(Value::as_array)?.len() == kept).then_some(())
            })?;
        }
        Ok(())
    }
}

/// Returns the keys of `now` that `before` does not have.
///
/// # Errors
/// Returns an error if a test has changed another object than those of [`ERASED`].
fn created<'k>(before: &BTreeMap<String, String>, now: &'k BTreeMap<String, String>) -> Result<Vec<&'k String>> {
    let is_own = |key: &str| OWN.iter().any(|own| key == *own || own.ends_with('/') && key.starts_with(own));
    if let Some((key, _)) = before.iter().find(|(key, revision)| !is_own(key) && now.get(*key) != Some(revision)) {
        bail!("{key} was changed");
    }
    let new: Vec<&String> = now.keys().filter(|key| !before.contains_key(*key) && !is_own(key)).collect();
    match new.iter().find(|key| kind_of(key).is_none()) {
        Some(key) => bail!("{key} was created"),
        None => Ok(new),
    }
}

fn kind_of(key: &str) -> Option<(&'static str, &'static str)> {
    ERASED.into_iter().find(|(prefix, _)| key.starts_with(prefix))
}

impl ControlPlane {
    /// Serves the API in `netns`, too, on the address that the API server has in its own namespace.
    fn serve_in(&mut self, netns: &Netns) -> Result<()> {
        let address = self.address();
        let proxy = Proxy::start_between((netns, address), (self.netns.as_ref(), address))?;
        self.front = Some(Front { netns: netns.clone(), _proxy: proxy });
        Ok(())
    }
}

/// Stops the unused control planes of a pool, and removes their files, when this process exits: the value of a static
/// is not dropped.
#[expect(unsafe_code, reason = "the standard library has no hook for the end of the process")]
fn empty_at_exit(pool: &'static Pool) {
    extern "C" fn empty() {
        for pool in POOLS.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            pool.unused.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
    }
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if pools.is_empty() {
        // SAFETY: `empty` is a function of this program, which is not unloaded.
        let registered = unsafe { libc::atexit(empty) };
        if registered != 0 {
            process::report("the control planes of the pool are not removed at exit");
        }
    }
    pools.push(pool);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::created;

    #[test]
    fn only_objects_without_effect_on_the_api_server_are_erased() {
        let keys = |keys: &[(&str, &str)]| -> BTreeMap<String, String> {
            keys.iter().map(|(key, revision)| ((*key).to_owned(), (*revision).to_owned())).collect()
        };
        let role = ("/registry/clusterroles/npl-agent", "7");
        let before = keys(&[role, ("/registry/leases/kube-system/apiserver-a", "8")]);
        let lease = ("/registry/leases/kube-system/apiserver-a", "20");
        let pod = ("/registry/pods/shop/web-0", "12");
        assert_eq!(created(&before, &keys(&[role, lease, pod])).unwrap(), [pod.0]);
        for (now, reason) in [
            (keys(&[("/registry/clusterroles/npl-agent", "9"), lease]), "clusterroles/npl-agent was changed"),
            (keys(&[lease, pod]), "clusterroles/npl-agent was changed"),
            (keys(&[role, lease, ("/registry/namespaces/other", "13")]), "namespaces/other was created"),
            (keys(&[role, lease, ("/registry/ipaddresses/10.96.0.17", "11")]), "ipaddresses/10.96.0.17 was created"),
        ] {
            let error = created(&before, &now).unwrap_err().to_string();
            assert!(error.ends_with(reason), "{error}");
        }
    }
}
