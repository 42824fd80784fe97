// SPDX-License-Identifier: Apache-2.0
//! The table of figures.

use comfy_table::{CellAlignment, Table, TableStyle};

use super::samples::Row;

const HEADER: [&str; 11] =
    ["figure", "unit", "median", "p99", "max", "compared with", "its median", "its p99", "ratio", "aim", "result"];

/// Returns a table with these rows.
pub(crate) fn table(rows: &[Row], style: TableStyle) -> Table {
    let mut table = Table::new();
    table.load_style(style).set_header(HEADER);
    for column in [2, 3, 4, 6, 7, 8] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for row in rows {
        let beside = row.beside.as_ref();
        table.add_row([
            row.name.to_owned(),
            row.unit.to_owned(),
            number(row.median),
            row.p99.map(number).unwrap_or_default(),
            number(row.max),
            beside.map_or_else(String::new, |beside| beside.what.to_owned()),
            beside.map_or_else(String::new, |beside| number(beside.median)),
            beside.and_then(|beside| beside.p99).map(number).unwrap_or_default(),
            beside.map_or_else(String::new, |beside| number(beside.ratio)),
            row.aim.clone(),
            verdict(row.is_met).to_owned(),
        ]);
    }
    table
}

/// Returns the result for a goal; empty without a goal.
pub(crate) const fn verdict(is_met: Option<bool>) -> &'static str {
    match is_met {
        Some(true) => "met",
        Some(false) => "missed",
        None => "",
    }
}

/// Formats a number with three decimal places below 1, with two below 100, and without decimal places from 100 on.
fn number(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value < 1.0 => format!("{value:.3}"),
        value if value < 100.0 => format!("{value:.2}"),
        value => format!("{value:.0}"),
    }
}
