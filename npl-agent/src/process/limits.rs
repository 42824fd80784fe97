// SPDX-License-Identifier: Apache-2.0
//! How many files this process may have open: a node port that is held takes one.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::{debug, warn};

use crate::core::model::{port_range::open_files_warning, settings::Settings};

/// Allows this process what it may allow itself, and says so where that is not enough. Container runtimes start processes
/// with 1024, for the sake of programs that are older than `poll`.
pub fn raise_open_files(settings: &Settings) {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
        debug!(from = soft, to = hard, "limit of open files raised");
        Ok(hard)
    });
    match raised {
        Ok(limit) => {
            if let Some(warning) = open_files_warning(settings, limit) {
                warn!("{warning}");
            }
        }
        Err(errno) => {
            warn!(err = %errno, "the limit of open files cannot be raised: Pods beyond it get no node port");
        }
    }
}
