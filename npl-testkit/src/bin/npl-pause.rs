// SPDX-License-Identifier: Apache-2.0
//! What keeps a Pod's namespaces while its containers come and go: it waits.

use std::process::ExitCode;

use npl_testkit::reaper;

fn main() -> ExitCode {
    match reaper::prepare().and_then(|()| reaper::run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_no_signals) => ExitCode::FAILURE,
    }
}
