// SPDX-License-Identifier: Apache-2.0
//! Measured values and their summary.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Aim, Figure};

/// The smallest number of values for which a 99th percentile is meaningful.
const ENOUGH_FOR_P99: usize = 50;

/// All measured values, by figure name.
#[derive(Debug, Default)]
pub(crate) struct Samples(BTreeMap<&'static str, Rounds>);

#[derive(Debug, Default)]
struct Rounds {
    values: Vec<f64>,
    beside: Vec<f64>,
    ratios: Vec<f64>,
}

/// A row of the report.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) median: f64,
    pub(crate) p99: Option<f64>,
    pub(crate) max: f64,
    pub(crate) beside: Option<Beside>,
    /// The goals as text; empty for figures without a goal.
    pub(crate) aim: String,
    pub(crate) is_met: Option<bool>,
}

/// The reference that a figure is compared with.
#[derive(Debug, Serialize)]
pub(crate) struct Beside {
    pub(crate) what: &'static str,
    pub(crate) median: f64,
    /// The 99th percentile of the reference, which shows whether the goal is attainable.
    pub(crate) p99: Option<f64>,
    /// The median of the ratios per round.
    pub(crate) ratio: f64,
}

impl Samples {
    /// Adds the values of one round, and the values of the reference in this round.
    pub(crate) fn add(&mut self, figure: &Figure, values: &[f64], beside: &[f64]) {
        let rounds = self.0.entry(figure.name).or_default();
        rounds.values.extend(values);
        rounds.beside.extend(beside);
        if let (Some(value), Some(base)) = (median(values), median(beside)) {
            rounds.ratios.push(value / base);
        }
    }

    /// Returns the row of a figure, if the figure was measured.
    pub(crate) fn row(&self, figure: &Figure) -> Option<Row> {
        let Rounds { values, beside, ratios } = self.0.get(figure.name)?;
        let max = values.iter().copied().max_by(f64::total_cmp)?;
        let beside = figure
            .beside
            .and_then(|what| Some(Beside { what, median: median(beside)?, p99: p99(beside), ratio: median(ratios)? }));
        let mut row = Row {
            name: figure.name,
            unit: figure.unit,
            median: median(values)?,
            p99: p99(values),
            max,
            beside,
            aim: figure.aims.iter().map(|aim| aim.words()).collect::<Vec<_>>().join(", "),
            is_met: None,
        };
        row.is_met = (!figure.aims.is_empty()).then(|| figure.aims.iter().all(|aim| aim.is_met_by(&row)));
        Some(row)
    }
}

impl Aim {
    fn words(self) -> String {
        match self {
            Self::Median(most) => format!("median ≤ {most}"),
            Self::P99(most) => format!("p99 ≤ {most}"),
            Self::Most(0.0) => "0".to_owned(),
            Self::Most(most) => format!("≤ {most}"),
            Self::Ratio(most) => format!("ratio ≤ {most}"),
            Self::LeastRatio(least) => format!("ratio ≥ {least}"),
        }
    }

    /// Whether the goal is met. A goal without enough values is not met.
    fn is_met_by(self, row: &Row) -> bool {
        match self {
            Self::Median(most) => row.median <= most,
            Self::P99(most) => row.p99.is_some_and(|value| value <= most),
            Self::Most(most) => row.max <= most,
            Self::Ratio(most) => row.beside.as_ref().is_some_and(|beside| beside.ratio <= most),
            Self::LeastRatio(least) => row.beside.as_ref().is_some_and(|beside| beside.ratio >= least),
        }
    }
}

pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let sorted = sorted(values);
    let (low, high) = (sorted.get(sorted.len().checked_sub(1)? / 2)?, sorted.get(sorted.len() / 2)?);
    Some(f64::midpoint(*low, *high))
}

/// Returns the 99th percentile, if there are enough values.
fn p99(values: &[f64]) -> Option<f64> {
    if values.len() < ENOUGH_FOR_P99 { None } else { percentile(values, 99) }
}

/// Returns the percentile by the nearest-rank method.
pub(crate) fn percentile(values: &[f64], percent: usize) -> Option<f64> {
    let sorted = sorted(values);
    sorted.get((sorted.len() * percent).div_ceil(100).checked_sub(1)?).copied()
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::{Samples, median, percentile};
    use crate::figures::{Aim, Figure, Stage, figure};

    const COMPARED: Figure = figure("compared", "s", Stage::Kernel, &[Aim::Ratio(1.2)]).beside("the floor");
    const SPEED: Figure = figure("speed", "Gbit/s", Stage::Kernel, &[Aim::LeastRatio(0.98)]).beside("the ceiling");
    const NEVER: Figure = figure("never", "writes", Stage::Kernel, &[Aim::Most(0.0)]);
    const LATENCY: Figure =
        figure("latency", "ms", Stage::Kernel, &[Aim::Ratio(1.5), Aim::Median(4.0), Aim::P99(10.0)])
            .beside("the floor");

    #[test]
    fn medians_are_interpolated_and_percentiles_are_not() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!((median(&hundred), percentile(&hundred, 99)), (Some(50.5), Some(99.0)));
        assert_eq!((median(&[3.0, 1.0, 2.0]), percentile(&[7.0], 99)), (Some(2.0), Some(7.0)));
        assert_eq!((median(&[]), percentile(&[], 99)), (None, None));
    }

    #[test]
    fn ratios_are_computed_within_a_round() {
        let mut samples = Samples::default();
        for (ours, floor) in [(1.1, 1.0), (2.4, 2.0), (9.0, 3.0)] {
            samples.add(&COMPARED, &[ours], &[floor]);
        }
        let row = samples.row(&COMPARED).unwrap();
        let beside = row.beside.unwrap();
        assert!((beside.ratio - 1.2).abs() < 1e-9 && row.is_met == Some(true), "{}", beside.ratio);
    }

    #[test]
    fn a_rate_must_reach_the_least_ratio() {
        let verdict = |speed| {
            let mut samples = Samples::default();
            samples.add(&SPEED, &[speed], &[10.0]);
            samples.row(&SPEED).unwrap().is_met
        };
        assert_eq!((verdict(9.9), verdict(12.0), verdict(9.7)), (Some(true), Some(true), Some(false)));
    }

    #[test]
    fn a_goal_needs_enough_values_and_all_goals_must_be_met() {
        let mut samples = Samples::default();
        assert!(samples.row(&NEVER).is_none());
        samples.add(&NEVER, &[0.0, 0.0, 1.0], &[]);
        assert_eq!(samples.row(&NEVER).unwrap().is_met, Some(false));
        samples.add(&LATENCY, &[2.0; 10], &[1.5; 10]);
        assert_eq!(samples.row(&LATENCY).unwrap().is_met, Some(false), "ten values are too few for a 99th percentile");
        samples.add(&LATENCY, &[2.0; 90], &[1.5; 90]);
        let row = samples.row(&LATENCY).unwrap();
        assert_eq!((row.is_met, row.p99, row.beside.unwrap().p99), (Some(true), Some(2.0), Some(1.5)));
    }
}
