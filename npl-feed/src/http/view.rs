// SPDX-License-Identifier: Apache-2.0
//! Defines the views of the snapshot that clients can request, and caches the bodies of the views.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
};

use axum::body::Bytes;

use super::{
    consul,
    members::{self, Interfaces},
    prometheus, traefik,
};
use crate::core::snapshot::{LONGEST_NAME, Snapshot, Version};

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
    /// Returns the version of the view's content; `None` if the snapshot does not contain the view's
    /// Service or port.
    pub(super) fn version(&self, snapshot: &Snapshot) -> Option<Version> {
        match self {
            Self::Members | Self::Traefik | Self::Prometheus => Some(snapshot.version()),
            Self::Service { namespace, service } => members::version_of_service(snapshot, namespace, service),
            Self::Port { namespace, service, port } => {
                snapshot.port(namespace, service, port).map(|group| group.version)
            }
            Self::ConsulServices => Some(snapshot.version_of_names()),
            // Consul answers with an empty list if a service does not exist.
            Self::ConsulHealth { name, .. } => Some(consul::version(snapshot, name).unwrap_or_default()),
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

    /// Returns whether a name in the request is longer than any name of a Service or port, including the names in
    /// Consul's format.
    pub(super) fn has_too_long_name(&self) -> bool {
        let names: &[&String] = match self {
            Self::Service { namespace, service } => &[namespace, service],
            Self::Port { namespace, service, port } => &[namespace, service, port],
            Self::ConsulHealth { name, .. } => &[name],
            Self::Members | Self::ConsulServices | Self::Traefik | Self::Prometheus => &[],
        };
        names.iter().any(|name| name.len() > LONGEST_NAME)
    }

    /// Returns whether the view shows the whole snapshot.
    const fn is_whole(&self) -> bool {
        matches!(self, Self::Members | Self::Traefik | Self::Prometheus)
    }

    /// Returns whether answers with this view contain the index of Consul's blocking queries.
    pub(super) const fn is_consul(&self) -> bool {
        matches!(self, Self::ConsulServices | Self::ConsulHealth { .. })
    }
}

/// Writes the name of the object that does not exist, for error messages.
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

/// The bodies of all answers that are in memory. Answers with the same version of a view share one body. The bodies of
/// views of the whole snapshot are also kept for later requests, because these bodies take longest to render.
#[derive(Debug, Default)]
pub(super) struct Cache(Mutex<Bodies>);

#[derive(Debug, Default)]
struct Bodies {
    by_view: BTreeMap<View, CachedBody>,
    /// The number of cached bodies at which the cache removes the bodies that are no longer in memory.
    prune_at: usize,
}

#[derive(Debug)]
struct CachedBody {
    version: Version,
    body: Weak<Body>,
    /// Keeps a body of the whole snapshot in memory while no answer contains the body.
    _kept: Option<Arc<Body>>,
}

/// The bytes of an answer, which the first request renders.
#[derive(Debug, Default)]
struct Body(OnceLock<Vec<u8>>);

/// A body that has been rendered.
struct Rendered(Arc<Body>);

impl AsRef<[u8]> for Rendered {
    fn as_ref(&self) -> &[u8] {
        self.0.0.get().map_or(&[], Vec::as_slice)
    }
}

/// The lowest value of [`Bodies::prune_at`] after the first removal.
const PRUNE_AT_LEAST: usize = 64;

impl Cache {
    /// Returns the body of a view. The body is rendered only if no body of the same version is in memory.
    pub(super) fn get(&self, view: &View, version: Version, snapshot: &Snapshot, interfaces: &Interfaces) -> Bytes {
        // Bodies for absent services are not kept, because clients could request any number of names.
        if version == Version::default() {
            return view.render(snapshot, interfaces).into();
        }
        let body = self.body(view, version);
        // The lock is not held here, so requests for other views do not wait for the rendering.
        body.0.get_or_init(|| view.render(snapshot, interfaces));
        Bytes::from_owner(Rendered(body))
    }

    fn body(&self, view: &View, version: Version) -> Arc<Body> {
        let mut bodies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = bodies.by_view.get(view).filter(|known| known.version == version);
        if let Some(body) = known.and_then(|known| known.body.upgrade()) {
            return body;
        }
        if bodies.by_view.len() >= bodies.prune_at {
            bodies.by_view.retain(|_, known| known.body.strong_count() > 0);
            bodies.prune_at = (2 * bodies.by_view.len()).max(PRUNE_AT_LEAST);
        }
        let body = Arc::<Body>::default();
        let kept = view.is_whole().then(|| Arc::clone(&body));
        bodies.by_view.insert(view.clone(), CachedBody { version, body: Arc::downgrade(&body), _kept: kept });
        body
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
    fn names_that_no_service_can_have_are_refused() {
        let health = |name: String| View::ConsulHealth { name, only_passing: false };
        let longest = ["p".repeat(15), "s".repeat(63), "n".repeat(63)].join(".");
        assert!(!health(longest.clone()).has_too_long_name());
        assert!(health(format!("{longest}x")).has_too_long_name());
        let [namespace, service] = ["default", "web"].map(str::to_owned);
        let port = |port| View::Port { namespace: namespace.clone(), service: service.clone(), port };
        assert!(!port("http".to_owned()).has_too_long_name() && port("x".repeat(1000)).has_too_long_name());
    }

    #[test]
    fn answers_with_the_same_version_share_one_body() {
        let (cache, one, other) = (Cache::default(), one_member(61000), one_member(61001));
        for view in views() {
            let first = get(&cache, &view, &one);
            assert_eq!(first.as_ptr(), get(&cache, &view, &one).as_ptr(), "{view:?}");
            let second = get(&cache, &view, &other);
            assert_eq!(
                first == second,
                view == View::ConsulServices,
                "{view:?}: only the list of names stays the same if a node port changes"
            );
            assert_eq!(view.version(&one) == view.version(&other), first == second, "{view:?}");
        }
    }

    #[test]
    fn only_views_of_the_whole_snapshot_stay_in_memory_after_the_last_answer() {
        let (cache, snapshot) = (Cache::default(), one_member(61000));
        for view in views() {
            drop(get(&cache, &view, &snapshot));
            let bodies = cache.0.lock().unwrap();
            assert_eq!(bodies.by_view[&view].body.strong_count() > 0, view.is_whole(), "{view:?}");
        }
        let known = || cache.0.lock().unwrap().by_view.len();
        let before = known();
        for number in 0..10 * PRUNE_AT_LEAST {
            let absent = View::ConsulHealth { name: number.to_string(), only_passing: false };
            assert_eq!(&*get(&cache, &absent, &snapshot), b"[]");
            assert_eq!(known(), before, "names of absent services must not accumulate");
        }
    }
}
