// SPDX-License-Identifier: Apache-2.0
//! The lock that keeps a second agent, `npl-agent load` and `npl-agent cleanup` from changing the datapath of a network
//! namespace at the same time.

use std::{
    io,
    os::linux::net::SocketAddrExt as _,
    os::unix::net::{SocketAddr, UnixDatagram},
};

/// The name of an abstract socket. It belongs to the network namespace, as the datapath does, and disappears with the
/// process.
const NAME: &[u8] = b"npl-agent";

/// Why the lock could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another agent, or a cleanup, runs in this network namespace.
    #[error(
        "another npl-agent runs on this Node: stop it first, or remove the DaemonSet's second copy; a cleanup ends by itself"
    )]
    AlreadyRunning,
    /// The kernel refuses the lock's socket.
    #[error("bind the socket that keeps a second agent off this Node")]
    Socket(#[source] io::Error),
}

/// The lock, which is held until this is dropped.
#[derive(Debug)]
pub struct Lock {
    _socket: UnixDatagram,
}

/// Takes the lock of this network namespace.
///
/// # Errors
///
/// If another process holds it, or the kernel refuses.
pub fn take() -> Result<Lock, LockError> {
    take_named(NAME)
}

/// Whether a process holds the lock. Asking does not keep another process from taking it.
pub fn is_taken() -> bool {
    is_taken_named(NAME)
}

fn take_named(name: &[u8]) -> Result<Lock, LockError> {
    let bound = SocketAddr::from_abstract_name(name).and_then(|address| UnixDatagram::bind_addr(&address));
    bound.map(|socket| Lock { _socket: socket }).map_err(|error| {
        if error.kind() == io::ErrorKind::AddrInUse { LockError::AlreadyRunning } else { LockError::Socket(error) }
    })
}

/// Connects to the socket without sending anything.
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

    /// A name of its own for each test and process.
    fn name(test: &str) -> Vec<u8> {
        format!("npl-agent-{test}-{}", process::id()).into_bytes()
    }

    #[test]
    fn one_has_it_at_a_time_and_others_see_that() {
        let name = name("one");
        assert!(!is_taken_named(&name));
        let lock = take_named(&name).unwrap();
        assert!(is_taken_named(&name));
        assert!(matches!(take_named(&name), Err(LockError::AlreadyRunning)));
        drop(lock);
        assert!(!is_taken_named(&name));
        take_named(&name).unwrap();
    }

    /// `npl-agent status` may ask while an agent starts.
    #[test]
    fn asking_for_the_lock_does_not_keep_others_from_taking_it() {
        let (name, is_over) = (name("asked"), AtomicBool::new(false));
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
