// SPDX-License-Identifier: Apache-2.0
//! The pause container: keeps a Pod's namespaces open until a signal ends the program.

use std::process::ExitCode;

use npl_echo::reaper;

fn main() -> ExitCode {
    match reaper::prepare().and_then(|()| reaper::run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_no_signals) => ExitCode::FAILURE,
    }
}
