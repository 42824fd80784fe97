// SPDX-License-Identifier: Apache-2.0
//! The limit of open files: each reserved node port needs one.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::{debug, warn};

use crate::core::model::{port_range::open_files_warning, settings::Settings};

/// Raises the soft limit to the hard limit, and warns if that is too low. Container runtimes start processes with a
/// soft limit of 1024, for the sake of `select`.
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
