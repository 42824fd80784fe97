// SPDX-License-Identifier: Apache-2.0
//! The directory `npl` in the user's cache. Tools and kernels that take minutes to build are built once per machine,
//! not once per checkout.

use std::env;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::process::{elapsed, say};

/// The time limit of a build. The longest build, of the API server and etcd, takes up to five minutes on two cores.
pub(crate) const BUILD_DEADLINE: Duration = Duration::from_hours(1);

/// The time for which a run waits for another run that builds the same directory; longer than a build may take.
const LOCK_DEADLINE: Duration = BUILD_DEADLINE.saturating_add(Duration::from_mins(5));

/// Returns the directory `<cache>/npl/<name>-<hash of made_from>`. If the directory is missing, creates it and calls
/// `make` to fill it.
///
/// The directory gets this path by a rename when its content is complete, so that a killed run leaves no incomplete
/// directory there.
pub(crate) fn obtain(name: &str, made_from: &[&[u8]], make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let finished = entry(name, made_from)?;
    if finished.is_dir() {
        return Ok(finished);
    }
    let folder = root()?;
    fs::create_dir_all(&folder).with_context(|| format!("create the cache folder {}", folder.display()))?;
    let _lock = lock(&folder.join(format!("{name}.lock")), name)?;
    if finished.is_dir() {
        return Ok(finished);
    }
    let partial = folder.join(format!("{name}.partial-{}", process::id()));
    let _stale = fs::remove_dir_all(&partial);
    fs::create_dir_all(&partial).with_context(|| format!("create {}", partial.display()))?;
    let made = make(&partial).and_then(|()| {
        fs::rename(&partial, &finished).with_context(|| format!("move the finished {name} to {}", finished.display()))
    });
    if let Err(error) = made {
        let _partial = fs::remove_dir_all(&partial);
        return Err(error);
    }
    Ok(finished)
}

/// Returns the path of the directory that `obtain` returns, which may not exist yet.
pub(crate) fn entry(name: &str, made_from: &[&[u8]]) -> Result<PathBuf> {
    Ok(root()?.join(format!("{name}-{:016x}", hash(made_from))))
}

fn root() -> Result<PathBuf> {
    let folder = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    match folder.or_else(|| env::home_dir().map(|home| home.join(".cache"))) {
        Some(folder) => Ok(folder.join("npl")),
        None => bail!("built tools need a cache folder, and this user has no home folder: set XDG_CACHE_HOME"),
    }
}

/// Locks a cache directory. If another run of xtask is building the directory, waits until that run has released the
/// lock. The kernel releases the lock of a killed run.
fn lock(path: &Path, name: &str) -> Result<File> {
    let file = File::create(path).with_context(|| format!("create the lock file {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::Error(error)) => return Err(error).with_context(|| format!("lock {}", path.display())),
        Err(TryLockError::WouldBlock) => say(&format!("{name}: waiting for another run of xtask that builds it")),
    }
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(file.lock().map(|()| file)));
    let Ok(locked) = receiver.recv_timeout(LOCK_DEADLINE) else {
        let waited = elapsed(LOCK_DEADLINE);
        bail!("another xtask has been building {name} for {waited}: end that process and repeat this command")
    };
    locked.with_context(|| format!("lock {}", path.display()))
}

/// Returns the FNV-1a hash of all parts, which is sufficient to distinguish versions of a cache directory. The hash
/// includes the length of each part, so that ("a", "b") and ("ab", "") have different hashes.
fn hash(parts: &[&[u8]]) -> u64 {
    let bytes = parts.iter().flat_map(|part| part.len().to_le_bytes().into_iter().chain(part.iter().copied()));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::hash;

    #[test]
    fn the_key_depends_on_every_byte_and_every_boundary() {
        let keys = [hash(&[b"a", b"b"]), hash(&[b"ab", b""]), hash(&[b"a", b"c"]), hash(&[b"ab"])];
        for (i, key) in keys.iter().enumerate() {
            assert!(!keys.iter().skip(i + 1).any(|other| other == key), "{i}");
        }
    }
}
