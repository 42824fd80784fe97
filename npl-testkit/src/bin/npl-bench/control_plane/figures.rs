// SPDX-License-Identifier: Apache-2.0
//! What is measured of the control plane, and what each figure should be.

/// What a figure is measured with; each measures all of its figures at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// An agent from its start on an empty Node to its restart with a thousand mappings, round by round.
    Life,
    /// A cluster with many Services.
    Services,
    /// The datapath alone.
    Kernel,
}

/// One line of the table.
#[derive(Debug)]
pub(crate) struct Figure {
    /// As in results and for `--only`.
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    /// What was measured beside it, round by round, in the same unit.
    pub(crate) beside: Option<&'static str>,
    pub(crate) aims: &'static [Aim],
    pub(crate) stage: Stage,
}

/// What a figure should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Aim {
    /// The median at most this.
    Median(f64),
    /// The 99th percentile at most this.
    P99(f64),
    /// Every value at most this.
    Most(f64),
    /// The rounds' ratios to what was measured beside it: their median at most this.
    Ratio(f64),
}

const fn figure(name: &'static str, unit: &'static str, stage: Stage, aims: &'static [Aim]) -> Figure {
    Figure { name, unit, beside: None, aims, stage }
}

impl Figure {
    const fn beside(self, beside: &'static str) -> Self {
        Self { beside: Some(beside), ..self }
    }
}

use Aim::{Median, Most, P99, Ratio};
use Stage::{Kernel, Life, Services};

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
/// Seven questions about permissions, one about the Node, three lists, three watches, and the new Pod's annotation.
pub(crate) const RESTART_REQUESTS: Figure = figure("control-plane/restart-requests", "requests", Life, &[Most(15.0)]);
pub(crate) const RESTART_PORTS: Figure = figure("control-plane/restart-ports-changed", "Pods", Life, &[Most(0.0)]);
pub(crate) const KERNEL_BACK: Figure = figure("control-plane/kernel-state-back", "ms", Life, &[Median(50.0)]);
pub(crate) const KERNEL_INSTALL: Figure = figure("control-plane/1000-mappings-installed", "ms", Kernel, &[Median(5.0)]);
pub(crate) const RESIDENT_2000: Figure = figure("control-plane/resident-2000-services", "MiB", Services, &[Most(20.0)]);
pub(crate) const RESIDENT_10000: Figure =
    figure("control-plane/resident-10000-services", "MiB", Services, &[Most(32.0)]);
pub(crate) const PEAK_10000: Figure = figure("control-plane/resident-10000-services-peak", "MiB", Services, &[]);
pub(crate) const SERVICE_CHANGE: Figure =
    figure("control-plane/service-change-cpu-10000-services", "ms", Services, &[Ratio(1.2)]).beside("the same at 1000");

/// All of them, in the order in which they are shown.
pub(crate) const FIGURES: [&Figure; 18] = [
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
];
