// SPDX-License-Identifier: Apache-2.0
//! The figures of the feed, and their goals.

use npl_testkit::load_balancers::{CADDY, ENVOY, HAPROXY, LoadBalancer, NGINX, TRAEFIK};

use crate::figures::{
    Aim::{self, Most, P99},
    Figure,
    Stage::Feed,
    figure,
};

const PATCH_AND_EVENT: &str = "a plain patch's event";

const BY_PUSH: &[Aim] = &[P99(20.0)];
const BY_DNS: &[Aim] = &[Most(2_000.0)];
const BY_POLL: &[Aim] = &[Most(5_000.0)];

/// The time from an annotation to the response to a long poll: the delay of the feed without a load balancer.
pub(super) const LONG_POLL: Figure = figure("feed/http-long-poll", "ms", Feed, &[]).beside(PATCH_AND_EVENT);
/// The memory of a feed with 10 000 members.
pub(super) const RESIDENT: Figure = figure("feed/resident-10000-members", "MiB", Feed, &[Most(40.0)]);
pub(super) const STEADY_CPU: Figure = figure("feed/steady-cpu-10000-members", "% of a core", Feed, &[Most(1.0)]);
/// [`XDS_ENVOY`] without the time of the API server: the time from the event on a plain watch to the first request.
pub(super) const XDS_AFTER_EVENT: Figure = figure("feed/xds-envoy-after-event", "ms", Feed, &[]);
pub(super) const XDS_ENVOY: Figure = figure("feed/xds-envoy", "ms", Feed, BY_PUSH).beside(PATCH_AND_EVENT);
const DNS_HAPROXY: Figure = figure("feed/dns-haproxy", "ms", Feed, BY_DNS).beside(PATCH_AND_EVENT);
const DNS_NGINX: Figure = figure("feed/dns-nginx", "ms", Feed, BY_DNS).beside(PATCH_AND_EVENT);
const DNS_CADDY: Figure = figure("feed/dns-caddy", "ms", Feed, BY_DNS).beside(PATCH_AND_EVENT);
const HTTP_TRAEFIK: Figure = figure("feed/http-traefik", "ms", Feed, BY_POLL).beside(PATCH_AND_EVENT);

/// The way in which a load balancer receives changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Receives {
    /// The feed sends each change.
    Pushed,
    /// The load balancer asks the feed at an interval.
    Asked,
}

/// The figure of each load balancer.
pub(super) const BALANCERS: [(&Figure, LoadBalancer, Receives); 5] = [
    (&XDS_ENVOY, ENVOY, Receives::Pushed),
    (&DNS_HAPROXY, HAPROXY, Receives::Asked),
    (&DNS_NGINX, NGINX, Receives::Asked),
    (&DNS_CADDY, CADDY, Receives::Asked),
    (&HTTP_TRAEFIK, TRAEFIK, Receives::Asked),
];

/// All figures, in display order.
pub(crate) const FIGURES: [&Figure; 9] = [
    &LONG_POLL,
    &XDS_ENVOY,
    &XDS_AFTER_EVENT,
    &DNS_HAPROXY,
    &DNS_NGINX,
    &DNS_CADDY,
    &HTTP_TRAEFIK,
    &RESIDENT,
    &STEADY_CPU,
];
