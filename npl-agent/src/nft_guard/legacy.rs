// SPDX-License-Identifier: Apache-2.0
//! Reads the rules of legacy iptables by the socket options of `linux/netfilter_ipv4/ip_tables.h`, which no library
//! offers. `CAP_NET_ADMIN` is enough.

#![expect(unsafe_code, reason = "a system call takes pointers")]

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, UdpSocket},
    os::fd::AsRawFd as _,
};

/// `IPT_SO_GET_INFO` and `IP6T_SO_GET_INFO`.
const GET_INFO: libc::c_int = 64;
/// `IPT_SO_GET_ENTRIES` and `IP6T_SO_GET_ENTRIES`.
const GET_ENTRIES: libc::c_int = 65;
/// The size of a table's name, in bytes.
const NAME: usize = 32;
/// The size of `struct ipt_getinfo`, in bytes. Its last field is the size of the rules.
const INFO: usize = 84;
/// The offset of the rules in `struct ipt_get_entries`. The field before the rules is their size.
const RULES: usize = 40;
/// The maximum number of attempts to read rules that change during the reading.
const ATTEMPTS: usize = 5;

/// The IP family whose rules are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    V4,
    V6,
}

impl Family {
    pub(super) const ALL: [Self; 2] = [Self::V4, Self::V6];
}

/// The rules of a table, in the kernel's layout; empty if the table does not exist.
pub(super) fn read(family: Family, table: &str) -> io::Result<Vec<u8>> {
    if table.len() >= NAME {
        return Ok(Vec::new());
    }
    for _attempt in 0..ATTEMPTS {
        let mut info = with_name(table, INFO);
        match ask(family, GET_INFO, &mut info) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            answer => answer?,
        }
        let size = info.last_chunk().copied().map(u32::from_ne_bytes).unwrap_or_default();
        let length = usize::try_from(size).map_err(io::Error::other)?;
        let mut entries = with_name(table, RULES + length);
        entries[NAME..NAME + size_of::<u32>()].copy_from_slice(&size.to_ne_bytes());
        match ask(family, GET_ENTRIES, &mut entries) {
            // The rules have changed since their size was read.
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
            answer => return answer.map(|()| entries.split_off(RULES)),
        }
    }
    Ok(Vec::new())
}

/// Whether the rules contain a chain whose name begins with this text, or a jump to such a chain. The kernel stores the
/// name at the beginning of a field, so the byte before the name is smaller than a space character.
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
    use super::names;

    #[test]
    fn a_chain_is_found_by_the_begin_of_its_name_alone() {
        let rules = b"\0\0ERROR\0\0\0\0\x1ecali-FORWARD\0\0/* xcali-tw */\0";
        for (prefix, is_named) in [("cali-", true), ("cali-FORWARD", true), ("cali-tw", false), ("KUBE-", false)] {
            assert_eq!(names(rules, prefix), is_named, "{prefix}");
        }
        assert!(!names(b"", "cali-"));
    }
}
