// SPDX-License-Identifier: Apache-2.0
//! A lock for each network namespace, so that only one process changes the datapath: `run`, `load` or `cleanup`.

use std::{
    io,
    os::linux::net::SocketAddrExt as _,
    os::unix::net::{SocketAddr, UnixDatagram},
};

/// The name of an abstract Unix socket. The kernel scopes it to the network namespace, as the datapath is, and releases
/// it when the process ends.
const NAME: &[u8] = b"npl-agent";

/// Why the lock could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another `npl-agent run`, `load` or `cleanup` holds the lock of this network namespace.
    #[error(
        "another npl-agent runs on this Node: stop it, or delete the second DaemonSet; if it is `npl-agent cleanup`, wait \
         until it ends"
    )]
    AlreadyRunning,
    /// The kernel refused the lock's socket.
    #[error("lock this Node against a second npl-agent: bind the abstract Unix socket `npl-agent`")]
    Socket(#[source] io::Error),
}

/// The lock, held until this value is dropped.
#[derive(Debug)]
pub struct Lock {
    _socket: UnixDatagram,
}

/// Takes the lock of this network namespace.
///
/// # Errors
///
/// If another process holds the lock, or the kernel refuses the socket.
pub fn take() -> Result<Lock, LockError> {
    take_named(NAME)
}

/// Whether a process of this network namespace holds the lock. The check does not take the lock, so an agent that
/// starts at the same time is not refused.
pub fn is_taken() -> bool {
    is_taken_named(NAME)
}

fn take_named(name: &[u8]) -> Result<Lock, LockError> {
    let bound = SocketAddr::from_abstract_name(name).and_then(|address| UnixDatagram::bind_addr(&address));
    bound.map(|socket| Lock { _socket: socket }).map_err(|error| {
        if error.kind() == io::ErrorKind::AddrInUse { LockError::AlreadyRunning } else { LockError::Socket(error) }
    })
}

fn is_taken_named(name: &[u8]) -> bool {
    let connect = |address| UnixDatagram::unbound().and_then(|socket| socket.connect_addr(&address));
    SocketAddr::from_abstract_name(name).and_then(connect).is_ok()
}

#[cfg(test)]
mod tests {
    use std::{
        process,
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use super::{LockError, is_taken_named, take_named};

    /// A lock name that no other test or process uses.
    fn name(test: &str) -> Vec<u8> {
        format!("npl-agent-{test}-{}", process::id()).into_bytes()
    }

    #[test]
    fn only_one_process_holds_the_lock_and_others_can_check() {
        let name = name("one");
        assert!(!is_taken_named(&name));
        let lock = take_named(&name).unwrap();
        assert!(is_taken_named(&name));
        assert!(matches!(take_named(&name), Err(LockError::AlreadyRunning)));
        drop(lock);
        assert!(!is_taken_named(&name));
        take_named(&name).unwrap();
    }

    /// `npl-agent status` checks the lock while an agent may be starting.
    #[test]
    fn checking_the_lock_does_not_block_a_starting_agent() {
        let (name, is_over) = (name("checked"), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    is_taken_named(&name);
                }
            });
            let refused = (0..20_000).filter(|_| take_named(&name).is_err()).count();
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(refused, 0);
        });
    }
}
