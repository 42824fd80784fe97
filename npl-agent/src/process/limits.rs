// SPDX-License-Identifier: Apache-2.0
//! The limit of open files. Each reserved node port uses one file descriptor.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::{debug, warn};

use crate::core::model::{port_range::open_files_warning, settings::Settings};

/// Raises the soft limit of open files to the hard limit. Logs a warning if the port range needs more open files than
/// the hard limit. Container runtimes set a soft limit of 1024, which is too low for one file descriptor per node port.
pub fn raise_open_files(settings: &Settings) {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
        debug!(from = soft, to = hard, "soft limit of open files raised");
        Ok(hard)
    });
    match raised {
        Ok(limit) => {
            if let Some(warning) = open_files_warning(settings, limit) {
                warn!("{warning}");
            }
        }
        Err(errno) => {
            warn!(
                err = %errno,
                "cannot raise the limit of open files; when this limit is reached, further Pod ports get no node port: \
                 raise LimitNOFILE of the container runtime"
            );
        }
    }
}
