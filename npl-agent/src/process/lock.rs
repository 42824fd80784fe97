// SPDX-License-Identifier: Apache-2.0
//! A lock for each BPF file system. Because of this lock, only one process at a time changes the datapath: `npl-agent
//! run`, `load` or `cleanup`.
//!
//! The lock is a `flock` on the directory of pinned maps and programs, which only root can open. An abstract Unix
//! socket would not be a safe lock, because every Pod on the host network could bind that socket.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use npl_common::names::PIN_ROOT;

/// The mode of the directory: only root can open and lock it.
const ONLY_ROOT: u32 = 0o700;
/// How long a process tries to acquire the lock while only checks, such as [`is_taken`], hold the lock.
const PATIENCE: Duration = Duration::from_secs(10);
/// The delay between two attempts to acquire the lock. The delay is short, because a process that only checks the lock
/// holds the lock for microseconds.
const PAUSE: Duration = Duration::from_millis(1);

/// Why the lock could not be acquired.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another `npl-agent run`, `load` or `cleanup` holds the lock of this BPF file system.
    #[error(
        "another npl-agent runs on this Node: stop that process, or delete the second DaemonSet; if the process is \
         `npl-agent cleanup`, wait until it ends"
    )]
    AlreadyRunning,
    /// The directory could not be created, opened or locked.
    #[error("lock the folder {} to exclude a second npl-agent on this Node; run npl-agent as root", folder.display())]
    Folder {
        /// The path of the directory.
        folder: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// The lock, held until this value is dropped or the process ends.
#[derive(Debug)]
pub struct Lock {
    _folder: Flock<File>,
}

/// Acquires the lock of a mounted BPF file system.
///
/// # Errors
///
/// If another process holds the lock, or if this process is not permitted to create or open the directory.
pub fn take(bpffs: &Path) -> Result<Lock, LockError> {
    take_within(bpffs, Duration::ZERO)
}

/// Like [`take`], but waits at most `limit` until the process that holds the lock ends.
///
/// # Errors
///
/// The errors of [`take`].
pub fn take_within(bpffs: &Path, limit: Duration) -> Result<Lock, LockError> {
    let folder = bpffs.join(PIN_ROOT);
    let started = Instant::now();
    loop {
        match attempt(&folder) {
            Ok(Some(lock)) => return Ok(lock),
            Ok(None) if started.elapsed() < PATIENCE => thread::sleep(PAUSE),
            Ok(None) => return Err(LockError::AlreadyRunning),
            Err(source) if is_held(&source) && started.elapsed() < limit => thread::sleep(PAUSE),
            Err(source) if is_held(&source) => return Err(LockError::AlreadyRunning),
            Err(source) => return Err(LockError::Folder { folder, source }),
        }
    }
}

/// Returns whether a process, such as an agent, holds the lock. The check itself holds a shared lock for microseconds;
/// an agent that starts at this moment retries.
pub fn is_taken(bpffs: &Path) -> bool {
    let opened = File::open(bpffs.join(PIN_ROOT));
    opened.is_ok_and(|folder| lock(folder, FlockArg::LockSharedNonblock).is_err_and(|error| is_held(&error)))
}

/// Tries once to acquire the lock. Returns `None` if only checks held the lock, or if the directory was removed in the
/// meantime. Tries a shared lock first, which fails if an agent, `load` or `cleanup` holds the lock, and succeeds if
/// only checks hold the lock.
fn attempt(folder: &Path) -> io::Result<Option<Lock>> {
    match DirBuilder::new().mode(ONLY_ROOT).create(folder) {
        // An earlier version of NPL may have created the directory with another mode.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::set_permissions(folder, Permissions::from_mode(ONLY_ROOT)).or_else(ignore_absence)?;
        }
        created => created?,
    }
    let opened = match File::open(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let shared = lock(opened, FlockArg::LockSharedNonblock)?;
    match shared.relock(FlockArg::LockExclusiveNonblock) {
        Err(Errno::EWOULDBLOCK) => return Ok(None),
        taken => taken?,
    }
    // `npl-agent cleanup` removes the directory, and a lock on a removed directory excludes no other process. The inode
    // of the locked directory is therefore compared with the inode at the path.
    let is_current = fs::metadata(folder).is_ok_and(|now| shared.metadata().is_ok_and(|it| it.ino() == now.ino()));
    Ok(is_current.then_some(Lock { _folder: shared }))
}

fn lock(folder: File, how: FlockArg) -> io::Result<Flock<File>> {
    Flock::lock(folder, how).map_err(|(_, errno)| errno.into())
}

fn is_held(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

fn ignore_absence(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::fs::PermissionsExt as _,
        path::{Path, PathBuf},
        process,
        sync::atomic::{AtomicBool, Ordering},
        thread,
        time::Duration,
    };

    use npl_common::names::PIN_ROOT;

    use super::{LockError, is_taken, take, take_within};

    /// A directory in place of a BPF file system. Dropping this value removes the directory.
    struct Folder(PathBuf);

    impl Folder {
        fn new(test: &str) -> Self {
            let path = std::env::temp_dir().join(format!("npl-lock-{test}-{}", process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn pins(&self) -> PathBuf {
            self.0.join(PIN_ROOT)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn only_one_process_holds_the_lock_and_others_can_check() {
        let folder = Folder::new("one");
        assert!(!is_taken(&folder.0));
        let lock = take(&folder.0).unwrap();
        assert!(is_taken(&folder.0));
        assert!(matches!(take(&folder.0), Err(LockError::AlreadyRunning)));
        drop(lock);
        assert!(!is_taken(&folder.0));
        take(&folder.0).unwrap();
    }

    #[test]
    fn a_process_can_wait_for_the_end_of_the_previous_one() {
        let folder = Folder::new("wait");
        let lock = take(&folder.0).unwrap();
        thread::scope(|scope| {
            let next = scope.spawn(|| take_within(&folder.0, Duration::from_mins(5)).map(drop));
            assert!(matches!(take_within(&folder.0, Duration::from_millis(20)), Err(LockError::AlreadyRunning)));
            assert!(!next.is_finished());
            drop(lock);
            next.join().unwrap().unwrap();
        });
    }

    #[test]
    fn only_root_can_open_the_folder_of_the_lock() {
        let folder = Folder::new("mode");
        let lock = take(&folder.0).unwrap();
        assert_eq!(mode(&folder.pins()), 0o700);
        drop(lock);
        fs::set_permissions(folder.pins(), Permissions::from_mode(0o755)).unwrap();
        let _lock = take(&folder.0).unwrap();
        assert_eq!(mode(&folder.pins()), 0o700, "the mode of a folder that an earlier version has created");
    }

    #[test]
    fn the_lock_can_be_acquired_after_a_cleanup_has_removed_the_folder() {
        let folder = Folder::new("removed");
        let cleanup = take(&folder.0).unwrap();
        fs::remove_dir(folder.pins()).unwrap();
        let agent = take(&folder.0).unwrap();
        drop(cleanup);
        assert!(is_taken(&folder.0));
        drop(agent);
    }

    #[test]
    fn a_folder_that_cannot_be_created_is_named() {
        let missing = Path::new("/proc/no-such-folder");
        let error = take(missing).unwrap_err();
        assert!(error.to_string().contains("/proc/no-such-folder/npl"), "{error}");
        assert!(!is_taken(missing));
    }

    /// `npl-agent status` may check the lock while an agent starts, so a check must not block the start.
    #[test]
    fn checking_the_lock_does_not_block_a_starting_agent() {
        let (folder, is_over) = (Folder::new("checked"), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    is_taken(&folder.0);
                }
            });
            let refused = (0..500).filter(|_| take(&folder.0).is_err()).count();
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(refused, 0);
        });
    }
}
