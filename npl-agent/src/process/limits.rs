// SPDX-License-Identifier: Apache-2.0
//! The limit of open files. The agent reserves node ports by sockets, and opens one socket for each port, IP family and
//! protocol.

use nix::{
    errno::Errno,
    sys::resource::{Resource, getrlimit, setrlimit},
};
use tracing::{debug, warn};

use crate::core::{
    model::{port_range::open_files_warning, settings::Settings},
    pages,
};

/// Raises the soft limit of open files to the hard limit, and returns the hard limit. The soft limit is often 1024:
/// containers inherit this default of systemd unless the unit of the container runtime sets a different limit.
///
/// # Errors
///
/// Returns the kernel's error if a limit cannot be read or raised.
pub fn raise_soft_limit() -> Result<u64, Errno> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    debug!(from = soft, to = hard, "raised the soft limit of open files");
    Ok(hard)
}

/// Raises the soft limit of open files to the hard limit, because the usual soft limit of 1024 is too low for the
/// sockets that reserve the node ports. Logs a warning if the port range needs more open files than the hard limit.
pub fn raise_open_files(settings: &Settings) {
    match raise_soft_limit() {
        Ok(limit) => {
            if let Some(warning) = open_files_warning(settings, limit) {
                warn!(see = pages::url(pages::LIMITS), "{warning}");
            }
        }
        Err(errno) => {
            warn!(
                see = pages::url(pages::LIMITS),
                err = %errno,
                "cannot raise the limit of open files; when this limit is reached, further Pod ports get no node port: \
                 raise LimitNOFILE of the container runtime"
            );
        }
    }
}
