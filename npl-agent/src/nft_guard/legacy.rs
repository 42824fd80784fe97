// SPDX-License-Identifier: Apache-2.0
//! Reads the rules of legacy iptables by the socket options of `linux/netfilter_ipv4/ip_tables.h`, because no library
//! that this project uses reads these rules. Reading the rules requires only `CAP_NET_ADMIN`.

#![expect(unsafe_code, reason = "a system call takes pointers")]

use std::{
    fs, io,
    net::{Ipv4Addr, Ipv6Addr, UdpSocket},
    os::fd::AsRawFd as _,
};

use crate::core::model::Family;

/// The socket options `IPT_SO_GET_INFO` and `IP6T_SO_GET_INFO`, which return the size of a table's rules.
const GET_INFO: libc::c_int = 64;
/// The socket options `IPT_SO_GET_ENTRIES` and `IP6T_SO_GET_ENTRIES`, which return a table's rules.
const GET_ENTRIES: libc::c_int = 65;
/// The size in bytes of the field for a table's name, including the zero byte at the end of the name.
const NAME: usize = 32;
/// The size of `struct ipt_getinfo`, in bytes. The last field of the structure is the size of the table's rules in
/// bytes.
const INFO: usize = 84;
/// The offset in bytes of the rules in `struct ipt_get_entries`.
const RULES: usize = 40;
/// The maximum number of attempts to read the rules of a table. An attempt fails if the rules change during the
/// attempt.
const ATTEMPTS: usize = 5;

/// Returns the names of the legacy iptables tables of an IP family; empty if the kernel has no legacy iptables.
///
/// # Errors
///
/// If the kernel's file with the names of the tables exists, but cannot be read.
pub(super) fn tables(family: Family) -> io::Result<Vec<String>> {
    let path = match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    };
    match fs::read_to_string(path) {
        Ok(names) => Ok(names.lines().map(str::to_owned).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(io::Error::new(error.kind(), format!("read {path}: {error}"))),
    }
}

/// Reads the rules of a table, in the kernel's layout; empty if the table does not exist.
///
/// # Errors
///
/// If the kernel returns an error, or the rules change during every attempt to read them (`WouldBlock`).
pub(super) fn read(family: Family, table: &str) -> io::Result<Vec<u8>> {
    read_by(table, |option, request| ask(family, option, request))
}

fn read_by(table: &str, mut ask: impl FnMut(libc::c_int, &mut [u8]) -> io::Result<()>) -> io::Result<Vec<u8>> {
    if table.len() >= NAME {
        return Ok(Vec::new());
    }
    for _attempt in 0..ATTEMPTS {
        let mut info = with_name(table, INFO);
        match ask(GET_INFO, &mut info) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            answer => answer?,
        }
        let size = info.last_chunk().copied().map(u32::from_ne_bytes).unwrap_or_default();
        let length = usize::try_from(size).map_err(io::Error::other)?;
        let mut entries = with_name(table, RULES + length);
        entries[NAME..NAME + size_of::<u32>()].copy_from_slice(&size.to_ne_bytes());
        match ask(GET_ENTRIES, &mut entries) {
            // The rules have changed since their size was read, so the next iteration reads the size and the rules
            // again.
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
            answer => return answer.map(|()| entries.split_off(RULES)),
        }
    }
    // The function returns an error and not an empty list of rules, because the agent would conclude from an empty list
    // that the Node has no policy engine.
    let text =
        format!("the rules of the iptables table {table} changed during each of {ATTEMPTS} attempts to read them");
    Err(io::Error::new(io::ErrorKind::WouldBlock, text))
}

/// Returns whether the rules contain a chain whose name begins with this prefix, or a jump to such a chain. The prefix
/// counts only after a control character (below 0x20), because in the kernel's layout, a name is at the beginning of a
/// field. After a printable character, the prefix is in the middle of a longer text.
pub(super) fn names(rules: &[u8], prefix: &str) -> bool {
    let prefix = prefix.as_bytes();
    let mut ends = rules.windows(prefix.len() + 1);
    ends.any(|window| window.split_first().is_some_and(|(before, rest)| *before < b' ' && rest == prefix))
}

fn with_name(table: &str, length: usize) -> Vec<u8> {
    let mut request = vec![0; length];
    request[..table.len()].copy_from_slice(table.as_bytes());
    request
}

fn ask(family: Family, option: libc::c_int, request: &mut [u8]) -> io::Result<()> {
    let (socket, level) = match family {
        Family::V4 => (UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?, libc::SOL_IP),
        Family::V6 => (UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?, libc::SOL_IPV6),
    };
    let mut length = libc::socklen_t::try_from(request.len()).map_err(io::Error::other)?;
    // SAFETY: the kernel writes at most `length` bytes to the request, which outlives the call.
    let result =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, request.as_mut_ptr().cast(), &raw mut length) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::{ATTEMPTS, GET_ENTRIES, GET_INFO, names, read_by};

    /// Reads from a simulated kernel whose rules have 8 bytes and change during the first `changes` attempts.
    fn read_while_changing(changes: usize) -> io::Result<Vec<u8>> {
        let mut attempts = 0;
        read_by("filter", |option, request| {
            match option {
                GET_INFO => *request.last_chunk_mut().unwrap() = 8_u32.to_ne_bytes(),
                GET_ENTRIES if attempts < changes => {
                    attempts += 1;
                    return Err(io::Error::from_raw_os_error(libc::EAGAIN));
                }
                _ => *request.last_chunk_mut().unwrap() = *b"cali-FWD",
            }
            Ok(())
        })
    }

    #[test]
    fn rules_that_change_during_every_attempt_are_an_error_and_not_an_empty_table() {
        assert_eq!(read_while_changing(ATTEMPTS - 1).unwrap(), b"cali-FWD");
        let error = read_while_changing(ATTEMPTS).unwrap_err();
        assert!(error.kind() == io::ErrorKind::WouldBlock && error.to_string().contains("table filter"), "{error}");
    }

    #[test]
    fn a_missing_table_has_no_rules_and_any_other_error_is_returned() {
        let read = |errno| read_by("nat", |_, _| Err(io::Error::from_raw_os_error(errno)));
        assert_eq!(read(libc::ENOENT).unwrap(), b"");
        assert_eq!(read(libc::EPERM).unwrap_err().raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn a_chain_is_found_by_a_prefix_of_its_name() {
        let rules = b"\0\0ERROR\0\0\0\0\x1ecali-FORWARD\0\0/* xcali-tw */\0";
        for (prefix, is_named) in [("cali-", true), ("cali-FORWARD", true), ("cali-tw", false), ("KUBE-", false)] {
            assert_eq!(names(rules, prefix), is_named, "{prefix}");
        }
        assert!(!names(b"", "cali-"));
    }
}
