// SPDX-License-Identifier: Apache-2.0
//! The figures of the control plane, and their goals.

use crate::figures::{
    Aim::{self, Median, Most, P99, Ratio},
    Figure,
    Stage::{ApiLoad, Fleet, Kernel, Life, Services},
    figure,
};

const PATCH_AND_EVENT: &str = "a plain patch and its event";
const ANNOTATION_AIMS: &[Aim] = &[Ratio(1.5), Median(4.0), P99(10.0)];

pub(crate) const ANNOTATION_IDLE: Figure =
    figure("control-plane/annotation-idle", "ms", Life, ANNOTATION_AIMS).beside(PATCH_AND_EVENT);
pub(crate) const ANNOTATION_BUSY: Figure =
    figure("control-plane/annotation-1000-mappings", "ms", Life, ANNOTATION_AIMS).beside(PATCH_AND_EVENT);
pub(crate) const PODS_200: Figure =
    figure("control-plane/200-pods", "s", Life, &[Ratio(1.2)]).beside("200 plain patches");
pub(crate) const PODS_1000: Figure =
    figure("control-plane/1000-pods", "s", Life, &[Ratio(1.2)]).beside("1000 plain patches");
pub(crate) const CPU_1000: Figure = figure("control-plane/1000-pods-cpu", "s", Life, &[Median(0.5)]);
pub(crate) const WITHDRAWN_200: Figure =
    figure("control-plane/200-pods-withdrawn", "s", Life, &[Ratio(1.2)]).beside("200 × 2 plain patches");
pub(crate) const STEADY_REQUESTS: Figure = figure("control-plane/steady-requests", "requests", Life, &[Most(0.0)]);
pub(crate) const STEADY_CPU: Figure = figure("control-plane/steady-cpu", "% of a core", Life, &[Median(0.1)]);
pub(crate) const RESTART: Figure = figure("control-plane/restart-annotation", "s", Life, &[Median(0.15)]);
pub(crate) const RESTART_WRITES: Figure = figure("control-plane/restart-writes", "writes", Life, &[Most(0.0)]);
/// The requests of a restarted agent: seven permission checks, one read of the Node, three lists, three watches, and
/// one patch that annotates the new Pod.
pub(crate) const RESTART_REQUESTS: Figure = figure("control-plane/restart-requests", "requests", Life, &[Most(15.0)]);
pub(crate) const RESTART_PORTS: Figure = figure("control-plane/restart-ports-changed", "Pods", Life, &[Most(0.0)]);
pub(crate) const KERNEL_BACK: Figure = figure("control-plane/kernel-state-back", "ms", Life, &[Median(50.0)]);
pub(crate) const KERNEL_INSTALL: Figure = figure("control-plane/1000-mappings-installed", "ms", Kernel, &[Median(5.0)]);
pub(crate) const RESIDENT_2000: Figure = figure("control-plane/resident-2000-services", "MiB", Services, &[Most(20.0)]);
pub(crate) const RESIDENT_10000: Figure =
    figure("control-plane/resident-10000-services", "MiB", Services, &[Most(32.0)]);
pub(crate) const PEAK_10000: Figure = figure("control-plane/resident-10000-services-peak", "MiB", Services, &[]);
pub(crate) const SERVICE_CHANGE: Figure =
    figure("control-plane/service-change-cpu-10000-services", "ms", Services, &[Ratio(1.2)])
        .beside("the same with 1000 Services");

pub(crate) const FLEET_RESTART: Figure = figure("hundred-agents/restart", "s", Fleet, &[]);
pub(crate) const FLEET_CPU: Figure = figure("hundred-agents/restart-cpu", "s", Fleet, &[]);
pub(crate) const FLEET_WRITES: Figure = figure("hundred-agents/restart-writes", "writes", Fleet, &[Most(0.0)]);
pub(crate) const FLEET_CHANGED: Figure = figure("hundred-agents/restart-ports-changed", "Pods", Fleet, &[Most(0.0)]);
pub(crate) const FLEET_REQUESTS: Figure =
    figure("hundred-agents/restart-requests", "requests an agent", Fleet, &[Most(15.0)]);
pub(crate) const FLEET_BUSIEST: Figure = figure("hundred-agents/restart-busiest-second", "requests", Fleet, &[]);
pub(crate) const FLEET_AT_ONCE: Figure = figure("hundred-agents/restart-at-once", "requests", Fleet, &[]);
pub(crate) const FLEET_REFUSED: Figure = figure("hundred-agents/restart-refused", "requests", Fleet, &[Most(0.0)]);

/// The API server that the figures of compressed lists are compared with.
const WITHOUT_GZIP: &str = "an API server without gzip";
/// The API server that the figures of streaming lists are compared with.
const WITHOUT_STREAMS: &str = "an API server without streaming lists";

pub(crate) const START_SENT: Figure = figure("api-load/start-requests", "requests", ApiLoad, &[]);
pub(crate) const START_READ: Figure = figure("api-load/start-read", "kB", ApiLoad, &[Ratio(0.25)]).beside(WITHOUT_GZIP);
pub(crate) const RESTART_SENT: Figure = figure("api-load/restart-requests", "requests", ApiLoad, &[]);
pub(crate) const RESTART_SENT_NAMESPACES: Figure =
    figure("api-load/restart-requests-namespaces", "requests", ApiLoad, &[]);
pub(crate) const RESTART_READ: Figure =
    figure("api-load/restart-read", "kB", ApiLoad, &[Ratio(0.25)]).beside(WITHOUT_GZIP);
pub(crate) const RESTART_READ_SELECTOR: Figure = figure("api-load/restart-read-selector", "kB", ApiLoad, &[]);
pub(crate) const RESTART_READ_NAMESPACES: Figure = figure("api-load/restart-read-namespaces", "kB", ApiLoad, &[]);
pub(crate) const RESTART_SENT_STREAMED: Figure =
    figure("api-load/restart-requests-streamed", "requests", ApiLoad, &[]).beside(WITHOUT_STREAMS);
pub(crate) const RESTART_READ_STREAMED: Figure =
    figure("api-load/restart-read-streamed", "kB", ApiLoad, &[]).beside(WITHOUT_STREAMS);
pub(crate) const REPLACED_REQUESTS: Figure =
    figure("api-load/replaced-pod-requests", "requests", ApiLoad, &[Most(2.0)]);
pub(crate) const REPLACED_READ: Figure = figure("api-load/replaced-pod-read", "kB", ApiLoad, &[]).beside(WITHOUT_GZIP);
pub(crate) const SERVICE_READ: Figure =
    figure("api-load/changed-service-read", "kB", ApiLoad, &[]).beside(WITHOUT_GZIP);
pub(crate) const SERVICE_READ_NAMESPACES: Figure =
    figure("api-load/changed-service-read-namespaces", "kB", ApiLoad, &[]);
pub(crate) const MODEL_REQUESTS: Figure = figure("api-load/model-5000-nodes-requests", "requests", ApiLoad, &[]);
pub(crate) const MODEL_READ: Figure = figure("api-load/model-5000-nodes-read", "GB", ApiLoad, &[]).beside(WITHOUT_GZIP);
pub(crate) const MODEL_REQUESTS_STREAMED: Figure =
    figure("api-load/model-5000-nodes-requests-streamed", "requests", ApiLoad, &[]).beside(WITHOUT_STREAMS);
pub(crate) const MODEL_READ_STREAMED: Figure =
    figure("api-load/model-5000-nodes-read-streamed", "GB", ApiLoad, &[]).beside(WITHOUT_STREAMS);
pub(crate) const MODEL_READ_SELECTOR: Figure = figure("api-load/model-5000-nodes-read-selector", "GB", ApiLoad, &[]);
pub(crate) const MODEL_READ_NAMESPACES: Figure =
    figure("api-load/model-5000-nodes-read-namespaces", "GB", ApiLoad, &[]);

/// All figures, in display order.
pub(crate) const FIGURES: [&Figure; 45] = [
    &ANNOTATION_IDLE,
    &ANNOTATION_BUSY,
    &PODS_200,
    &PODS_1000,
    &CPU_1000,
    &WITHDRAWN_200,
    &RESTART,
    &RESTART_WRITES,
    &RESTART_PORTS,
    &RESTART_REQUESTS,
    &KERNEL_BACK,
    &KERNEL_INSTALL,
    &STEADY_REQUESTS,
    &STEADY_CPU,
    &SERVICE_CHANGE,
    &RESIDENT_2000,
    &RESIDENT_10000,
    &PEAK_10000,
    &FLEET_RESTART,
    &FLEET_CPU,
    &FLEET_WRITES,
    &FLEET_CHANGED,
    &FLEET_REQUESTS,
    &FLEET_BUSIEST,
    &FLEET_AT_ONCE,
    &FLEET_REFUSED,
    &START_SENT,
    &START_READ,
    &RESTART_SENT,
    &RESTART_READ,
    &RESTART_SENT_NAMESPACES,
    &RESTART_READ_NAMESPACES,
    &RESTART_READ_SELECTOR,
    &RESTART_SENT_STREAMED,
    &RESTART_READ_STREAMED,
    &REPLACED_REQUESTS,
    &REPLACED_READ,
    &SERVICE_READ,
    &SERVICE_READ_NAMESPACES,
    &MODEL_REQUESTS,
    &MODEL_READ,
    &MODEL_READ_NAMESPACES,
    &MODEL_READ_SELECTOR,
    &MODEL_REQUESTS_STREAMED,
    &MODEL_READ_STREAMED,
];
