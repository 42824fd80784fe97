// SPDX-License-Identifier: Apache-2.0
//! The pause container: waits for signals and thereby keeps a Pod's namespaces open.

use std::process::ExitCode;

use npl_testkit::reaper;

fn main() -> ExitCode {
    match reaper::prepare().and_then(|()| reaper::run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_no_signals) => ExitCode::FAILURE,
    }
}
