// SPDX-License-Identifier: Apache-2.0
//! Writes the log lines of the kernel programs to the agent's log. Only the trace build contains this module.

use std::{fs, os::fd::AsFd as _, thread};

use aya::{EbpfLoader, maps::MapError};
use aya_log::EbpfLogger;
use log::{Level, Log, Metadata, Record};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use npl_common::names::PINNED_MAPS;
use tracing::{debug, error, info, trace, warn};

use super::{
    attach::Hooks,
    error::DatapathError,
    object::embedded_object,
    pins::{CONSTANTS, LOGS, Pins, pin_error},
};

/// The maps that only the trace build has: the ring buffer for log lines and, for each CPU, the packet and the verdict
/// that the running program is about to log.
const MAPS: [&str; 2] = [LOGS, "npl_log_note"];

/// The log target of the programs' log lines. A filter in `NPL_LOG` selects the lines by this target.
const TARGET: &str = "npl_ebpf";

/// Pins [`MAPS`], like the maps of constants, in the directory of the build's programs, so that the next agent
/// recognizes the maps as NPL's.
pub(super) fn pin_maps(loader: &mut EbpfLoader<'_>, pins: &Pins, build: &str) -> Result<(), DatapathError> {
    let folder = pins.programs_of(build);
    fs::create_dir_all(&folder).map_err(|source| pin_error("create", &folder, source))?;
    for name in MAPS {
        loader.map_pin_path(name, folder.join(format!("{CONSTANTS}{name}")));
    }
    Ok(())
}

impl Hooks {
    /// Starts a thread that prints the logs of the programs.
    ///
    /// # Errors
    ///
    /// If the logs cannot be read.
    pub fn print_logs(&self) -> Result<(), DatapathError> {
        print(&self.pins, &self.programs.build)
    }
}

fn print(pins: &Pins, build: &str) -> Result<(), DatapathError> {
    let mut loader = EbpfLoader::new();
    for name in PINNED_MAPS {
        loader.map_pin_path(name, pins.map(name));
    }
    pin_maps(&mut loader, pins, build)?;
    // aya-log finds the ring buffer only in a loaded object. The object is therefore loaded here, without its programs.
    let mut object = loader.load(embedded_object()?).map_err(DatapathError::Load)?;
    let logger = EbpfLogger::init_with_logger(&mut object, Lines).map_err(|error| match error {
        aya_log::Error::MapError(source) => DatapathError::OpenMap { name: LOGS, source },
        aya_log::Error::MapNotFound | aya_log::Error::ProgramNotFound | aya_log::Error::ProgramError(_) => {
            DatapathError::Missing(LOGS)
        }
    })?;
    let thread = thread::Builder::new().name("trace".to_owned()).spawn(move || forward(logger));
    thread.map_err(|error| DatapathError::OpenMap { name: LOGS, source: MapError::IoError(error) })?;
    // No page: only developers build with the feature `trace`, so no document describes this warning.
    warn!(
        "this is a trace build: the programs log the verdict on each packet that they translate, drop or count under a reason, which slows down every packet"
    );
    Ok(())
}

fn forward(mut logger: EbpfLogger<Lines>) {
    loop {
        logger.flush();
        match poll(&mut [PollFd::new(logger.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => {
                // No page: only developers build with the feature `trace`, so no document describes this warning.
                return warn!(err = %error, "no more logs of the kernel programs are printed: the ring buffer cannot be polled");
            }
        }
    }
}

/// Writes the log lines of aya-log to the agent's log.
struct Lines;

impl Log for Lines {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let line = record.args().to_string();
        // The programs pad all texts with spaces to the same length, so the spaces at the end are removed.
        let line = line.trim_end();
        match record.level() {
            // No page: the kernel programs of a trace build, which only developers use, have written the line.
            Level::Error => error!(target: TARGET, "{line}"),
            // No page: the kernel programs of a trace build, which only developers use, have written the line.
            Level::Warn => warn!(target: TARGET, "{line}"),
            Level::Info => info!(target: TARGET, "{line}"),
            Level::Debug => debug!(target: TARGET, "{line}"),
            Level::Trace => trace!(target: TARGET, "{line}"),
        }
    }

    fn flush(&self) {}
}
