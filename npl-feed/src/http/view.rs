// SPDX-License-Identifier: Apache-2.0
//! The views of the snapshot that clients can request, and the cache of their bodies.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use axum::body::Bytes;

use super::{
    consul,
    members::{self, Interfaces},
    prometheus, traefik,
};
use crate::core::snapshot::{Snapshot, Version};

/// A view of the snapshot, in the format of one path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum View {
    /// The members of all Services.
    Members,
    /// The members of one Service.
    Service { namespace: String, service: String },
    /// The members of one Service port.
    Port { namespace: String, service: String, port: String },
    /// The names of all services, in Consul's format.
    ConsulServices,
    /// The members of one service, in Consul's format.
    ConsulHealth { name: String, only_passing: bool },
    /// Traefik's dynamic configuration.
    Traefik,
    /// The targets of Prometheus' HTTP service discovery.
    Prometheus,
}

impl View {
    /// Returns the version of the view's content; `None` if the Service or port does not exist.
    pub(super) fn version(&self, snapshot: &Snapshot) -> Option<Version> {
        match self {
            Self::Members | Self::Traefik | Self::Prometheus => Some(snapshot.version()),
            Self::Service { namespace, service } => members::version_of_service(snapshot, namespace, service),
            Self::Port { namespace, service, port } => {
                snapshot.port(namespace, service, port).map(|group| group.version)
            }
            Self::ConsulServices => Some(Version::of(&consul::services(snapshot))),
            Self::ConsulHealth { name, .. } => Some(consul::version(snapshot, name)),
        }
    }

    fn render(&self, snapshot: &Snapshot, interfaces: &Interfaces) -> Vec<u8> {
        match self {
            Self::Members => members::all(snapshot, interfaces),
            Self::Service { namespace, service } => members::of_service(snapshot, interfaces, namespace, service),
            Self::Port { namespace, service, port } => {
                members::of_port(snapshot, interfaces, (namespace, service, port))
            }
            Self::ConsulServices => consul::services(snapshot),
            Self::ConsulHealth { name, only_passing } => consul::health(snapshot, name, *only_passing),
            Self::Traefik => traefik::configuration(snapshot),
            Self::Prometheus => prometheus::targets(snapshot),
        }
    }

    /// Returns whether the view shows the whole snapshot.
    const fn is_whole(&self) -> bool {
        matches!(self, Self::Members | Self::Traefik | Self::Prometheus)
    }

    /// Returns whether the answer has the index of Consul's blocking queries.
    pub(super) const fn is_consul(&self) -> bool {
        matches!(self, Self::ConsulServices | Self::ConsulHealth { .. })
    }
}

/// For error messages: the object that does not exist.
impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service { namespace, service } => write!(f, "enabled Service {namespace}/{service}"),
            Self::Port { namespace, service, port } => {
                write!(f, "port {port} of an enabled Service {namespace}/{service}")
            }
            Self::Members | Self::ConsulServices | Self::ConsulHealth { .. } | Self::Traefik | Self::Prometheus => {
                f.write_str("snapshot")
            }
        }
    }
}

/// The bodies that answers contain now. Answers with the same version of a view share one body. The bodies of views of
/// the whole snapshot are also kept for later requests, because they take longest to render.
#[derive(Debug, Default)]
pub(super) struct Cache(Mutex<Bodies>);

#[derive(Debug, Default)]
struct Bodies {
    by_view: BTreeMap<View, Body>,
    /// The number of bodies at which those that no answer contains are removed.
    prune_at: usize,
}

#[derive(Debug)]
struct Body {
    version: Version,
    content: Weak<[u8]>,
    /// Keeps the content while no answer contains it.
    _kept: Option<Arc<[u8]>>,
}

/// The smallest number of bodies at which bodies that no answer contains are removed.
const PRUNE_AT_LEAST: usize = 64;

impl Cache {
    /// Returns the body of a view, which is rendered unless an answer contains the same version already.
    pub(super) fn get(&self, view: &View, version: Version, snapshot: &Snapshot, interfaces: &Interfaces) -> Bytes {
        let mut bodies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = bodies.by_view.get(view).filter(|body| body.version == version);
        if let Some(content) = known.and_then(|body| body.content.upgrade()) {
            return Bytes::from_owner(content);
        }
        let content: Arc<[u8]> = view.render(snapshot, interfaces).into();
        if bodies.by_view.len() >= bodies.prune_at {
            bodies.by_view.retain(|_, body| body.content.strong_count() > 0);
            bodies.prune_at = (2 * bodies.by_view.len()).max(PRUNE_AT_LEAST);
        }
        let body =
            Body { version, content: Arc::downgrade(&content), _kept: view.is_whole().then(|| Arc::clone(&content)) };
        bodies.by_view.insert(view.clone(), body);
        Bytes::from_owner(content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::tests::{annotation, pod, snapshot};

    fn one_member(port: u16) -> Snapshot {
        snapshot(vec![pod("a", "n1", &annotation(8080, "192.0.2.1", port))])
    }

    fn get(cache: &Cache, view: &View, snapshot: &Snapshot) -> Bytes {
        cache.get(view, view.version(snapshot).unwrap(), snapshot, &Interfaces::default())
    }

    fn views() -> Vec<View> {
        let [namespace, service, port] = ["default", "web", "http"].map(str::to_owned);
        let health = |only_passing| View::ConsulHealth { name: "web.default".to_owned(), only_passing };
        vec![
            View::Members,
            View::Service { namespace: namespace.clone(), service: service.clone() },
            View::Port { namespace, service, port },
            View::ConsulServices,
            health(false),
            health(true),
            View::Traefik,
            View::Prometheus,
        ]
    }

    #[test]
    fn answers_with_the_same_version_share_one_body() {
        let (cache, one, other) = (Cache::default(), one_member(61000), one_member(61001));
        for view in views() {
            let first = get(&cache, &view, &one);
            assert_eq!(first.as_ptr(), get(&cache, &view, &one).as_ptr(), "{view:?}");
            let second = get(&cache, &view, &other);
            assert_eq!(first == second, view == View::ConsulServices, "{view:?}: only names show no node port");
            assert_eq!(view.version(&one) == view.version(&other), first == second, "{view:?}");
        }
    }

    #[test]
    fn only_views_of_the_whole_snapshot_stay_in_memory_after_the_last_answer() {
        let (cache, snapshot) = (Cache::default(), one_member(61000));
        for view in views() {
            drop(get(&cache, &view, &snapshot));
            let bodies = cache.0.lock().unwrap();
            assert_eq!(bodies.by_view[&view].content.strong_count() > 0, view.is_whole(), "{view:?}");
        }
        for number in 0..10 * PRUNE_AT_LEAST {
            get(&cache, &View::ConsulHealth { name: number.to_string(), only_passing: false }, &snapshot);
            let bodies = cache.0.lock().unwrap();
            assert!(bodies.by_view.len() <= PRUNE_AT_LEAST, "names of absent services must not accumulate");
        }
    }
}
