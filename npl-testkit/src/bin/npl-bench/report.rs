// SPDX-License-Identifier: Apache-2.0
//! Formats the results as tables or JSON.

use std::fmt::Write as _;
use std::ops::Range;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use comfy_table::{CellAlignment, Table, TableStyle, presets};
use serde::Serialize;

use crate::cases::Case;
use crate::figures::{self, Row};
use crate::ratios::Ratio;

/// The output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Tables for a terminal.
    Table,
    /// JSON.
    Json,
    /// Markdown tables for docs/performance.md.
    Markdown,
}

/// The results of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    rounds: usize,
    results: Vec<Measured>,
    ratios: Vec<Compared>,
    figures: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Measured {
    name: &'static str,
    mode: String,
    unit: &'static str,
    #[serde(flatten)]
    spread: Spread,
}

#[derive(Debug, Serialize)]
struct Compared {
    name: String,
    #[serde(flatten)]
    spread: Spread,
    /// The lower bound that the project aims for.
    aim: Option<f64>,
    is_met: Option<bool>,
}

/// The median and extremes over all rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Report {
    /// Computes ratios round by round, so that temporary changes of the machine's speed affect both sides of a ratio.
    pub(crate) fn new(
        rounds: usize,
        samples: &[(Case, Vec<f64>)],
        ratios: &[Ratio],
        figures: Vec<Row>,
    ) -> Result<Self> {
        let of = |wanted: Case| {
            let found = samples.iter().find(|(case, _)| *case == wanted);
            found.map(|(_, rates)| rates).with_context(|| format!("{wanted} was not measured"))
        };
        let mut results = Vec::new();
        for (case, rates) in samples {
            let spread = Spread::of(rates)?;
            results.push(Measured { name: case.workload.name(), mode: case.mode.name(), unit: "Mpps", spread });
        }
        let mut compared = Vec::new();
        for ratio in ratios {
            let (above, below) = (of(ratio.numerator)?, of(ratio.denominator)?);
            let values: Vec<f64> = above.iter().zip(below).map(|(above, below)| above / below).collect();
            let spread = Spread::of(&values)?;
            let is_met = ratio.aim.map(|aim| spread.median >= aim);
            compared.push(Compared { name: ratio.name(), spread, aim: ratio.aim, is_met });
        }
        Ok(Self { rounds, results, ratios: compared, figures })
    }

    /// Returns the report as text with a final line break.
    pub(crate) fn show(&self, format: Format) -> Result<String> {
        if format == Format::Json {
            return Ok(serde_json::to_string_pretty(self).context("write JSON")? + "\n");
        }
        let preset = if format == Format::Markdown { presets::ASCII_MARKDOWN } else { presets::UTF8_FULL_CONDENSED };
        let mut text = String::new();
        let packets = (!self.ratios.is_empty()).then(|| [self.results(preset), self.ratios(preset)]);
        let figures = (!self.figures.is_empty()).then(|| figures::table(&self.figures, preset));
        let tables: Vec<String> = packets.into_iter().flatten().chain(figures).map(|table| table.to_string()).collect();
        writeln!(text, "{}", tables.join("\n\n"))?;
        if format == Format::Table {
            writeln!(
                text,
                "{} rounds. Packet rates are in millions per second (Mpps). Ratios are computed in each round, \
                 and their median is shown. `A_vs_B` is A's rate divided by B's rate. The ratio of a figure is its \
                 value divided by the value of the reference in the `compared with` column.",
                self.rounds
            )?;
        }
        Ok(text)
    }

    fn results(&self, preset: TableStyle) -> Table {
        let mut table = table(preset, ["workload", "forwarding", "Mpps, median", "min", "max"], 2..5);
        for Measured { name, mode, unit: _, spread } in &self.results {
            table.add_row([
                (*name).to_owned(),
                mode.clone(),
                number(spread.median),
                number(spread.min),
                number(spread.max),
            ]);
        }
        table
    }

    fn ratios(&self, preset: TableStyle) -> Table {
        let mut table = table(preset, ["ratio", "median", "min", "max", "aim", "result"], 1..4);
        for Compared { name, spread, aim, is_met } in &self.ratios {
            table.add_row([
                name.clone(),
                number(spread.median),
                number(spread.min),
                number(spread.max),
                aim.map(|aim| format!("≥ {aim}")).unwrap_or_default(),
                figures::verdict(*is_met).to_owned(),
            ]);
        }
        table
    }
}

impl Spread {
    fn of(values: &[f64]) -> Result<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        ensure!(!sorted.is_empty(), "nothing was measured");
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) };
        Ok(Self { median, min: sorted[0], max: sorted[sorted.len() - 1] })
    }
}

/// Returns a table whose columns in the range `numbers` are right-aligned.
fn table<const N: usize>(preset: TableStyle, header: [&str; N], numbers: Range<usize>) -> Table {
    let mut table = Table::new();
    table.load_style(preset).set_header(header);
    for column in table.column_iter_mut().skip(numbers.start).take(numbers.len()) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Formats a number with two decimal places, or with three if the number is below 1.
fn number(value: f64) -> String {
    if value < 1.0 { format!("{value:.3}") } else { format!("{value:.2}") }
}

#[cfg(test)]
mod tests {
    use super::{Format, Report, Spread};
    use crate::cases::{Case, Mode, Workload};
    use crate::ratios::Ratio;

    #[test]
    fn a_ratio_meets_its_goal_with_the_median_of_its_rounds() {
        let [ours, routing] = [Mode::Ours, Mode::Routing].map(|mode| Case { workload: Workload::Established, mode });
        let verdict = |aim| {
            let samples = [(ours, vec![0.5, 0.9, 2.0]), (routing, vec![1.0; 3])];
            let ratio = Ratio { numerator: ours, denominator: routing, aim };
            let report = Report::new(3, &samples, &[ratio], Vec::new()).unwrap();
            let shown = report.show(Format::Markdown).unwrap();
            let line = shown.lines().find(|line| line.contains(&ratio.name())).unwrap();
            (report.ratios[0].is_met, line.replace(' ', ""))
        };
        let line = |aim| format!("|established_ours_vs_routing|0.900|0.500|2.00|{aim}|");
        assert_eq!(verdict(Some(0.9)), (Some(true), line("≥0.9|met")));
        assert_eq!(verdict(Some(0.92)), (Some(false), line("≥0.92|missed")));
        assert_eq!(verdict(None), (None, line("|")));
    }

    #[test]
    fn the_median_is_the_middle_value_or_the_mean_of_both() {
        let spread = |values: &[f64]| Spread::of(values).unwrap();
        assert_eq!(spread(&[3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(spread(&[4.0, 1.0]), Spread { median: 2.5, min: 1.0, max: 4.0 });
        assert!(Spread::of(&[]).is_err());
    }
}
