// SPDX-License-Identifier: Apache-2.0
//! System calls that no library in use makes.

#![expect(unsafe_code, reason = "a system call takes pointers")]

use std::{
    ffi::CString,
    io,
    num::NonZero,
    os::{
        fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::{ffi::OsStrExt as _, net::UnixDatagram},
    },
    path::Path,
    slice,
    sync::atomic::AtomicU64,
    time::Duration,
};

use aya_obj::generated::{XDP_FLAGS_DRV_MODE, bpf_attach_type, bpf_link_type};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_PROG_QUERY: libc::c_int = 16;
const BPF_MAP_LOOKUP_BATCH: libc::c_int = 24;
const BPF_MAP_UPDATE_BATCH: libc::c_int = 26;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_UPDATE: libc::c_int = 29;
/// Ahead of all programs of a hook, and behind them, where no other one is named.
const BPF_F_BEFORE: u32 = 1 << 3;
const BPF_F_AFTER: u32 = 1 << 4;
/// More than any program of ours can use.
const MOST_MAPS: usize = 64;
/// As many as the kernel puts on a hook.
const MOST_PROGRAMS: usize = 64;

/// What [`BPF_OBJ_GET`] and [`BPF_OBJ_PIN`] read.
#[repr(C)]
struct ObjPath {
    path: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// What [`BPF_MAP_LOOKUP_BATCH`] and [`BPF_MAP_UPDATE_BATCH`] read, and the count that they write back.
#[repr(C)]
struct Batch {
    from: u64,
    to: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

/// What [`BPF_OBJ_GET_INFO_BY_FD`] reads.
#[repr(C)]
struct GetInfo {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// The beginning of what the kernel tells of a program: it writes no more than there is room for.
#[repr(C)]
#[derive(Default)]
struct ProgramInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    machine_code_len: u32,
    code_len: u32,
    machine_code: u64,
    code: u64,
    load_time: u64,
    created_by: u32,
    map_count: u32,
    map_ids: u64,
    name: [u8; 16],
}

/// What tells whether a program is the one that it should be.
#[derive(Debug)]
pub(super) struct ProgramFacts {
    /// The kernel's number of its type.
    pub(super) kind: u32,
    pub(super) id: u32,
    pub(super) name: Vec<u8>,
    /// The ids of the maps that it uses.
    pub(super) maps: Vec<u32>,
}

/// What [`BPF_PROG_QUERY`] reads, and the count that it writes back.
#[repr(C)]
struct Query {
    ifindex: u32,
    attach_type: u32,
    flags: u32,
    attach_flags: u32,
    programs: u64,
    count: u32,
    pad: u32,
    program_flags: u64,
    links: u64,
    link_flags: u64,
    revision: u64,
}

/// What [`BPF_LINK_CREATE`] reads.
#[repr(C)]
struct LinkCreate {
    program: u32,
    ifindex: u32,
    attach_type: u32,
    flags: u32,
}

/// What [`BPF_LINK_UPDATE`] reads.
#[repr(C)]
struct LinkUpdate {
    link: u32,
    new_program: u32,
    flags: u32,
    old_program: u32,
}

/// The beginning of what the kernel tells of a link.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    pad: u32,
    /// What it is on, or zero once that is gone: of a link of a device the device's index, and of TCX the hook behind it; of a
    /// cgroup its number.
    target: [u32; 2],
}

/// What a link holds.
pub(super) struct LinkFacts {
    /// The program's id.
    pub(super) program: u32,
    kind: u32,
    target: [u32; 2],
}

impl LinkFacts {
    /// Whether it is one of XDP, on this device.
    pub(super) const fn is_of_driver(&self, ifindex: u32) -> bool {
        self.kind == bpf_link_type::BPF_LINK_TYPE_XDP as u32 && self.target[0] == ifindex
    }

    /// Whether it is one of TCX, on this hook of a device.
    pub(super) const fn is_of_hook(&self, ifindex: u32, hook: bpf_attach_type) -> bool {
        let [device, its_hook] = self.target;
        self.kind == bpf_link_type::BPF_LINK_TYPE_TCX as u32 && device == ifindex && its_hook == hook as u32
    }

    /// Whether it is on this cgroup.
    pub(super) fn is_of_cgroup(&self, cgroup: u64) -> bool {
        let mut number = [0; 8];
        for (to, from) in number.iter_mut().zip(self.target.into_iter().flat_map(u32::to_ne_bytes)) {
            *to = from;
        }
        self.kind == bpf_link_type::BPF_LINK_TYPE_CGROUP as u32 && u64::from_ne_bytes(number) == cgroup
    }
}

/// Opens what is pinned.
pub(super) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let fd = bpf(BPF_OBJ_GET, &mut ObjPath { path: path.as_ptr() as u64, bpf_fd: 0, file_flags: 0 })?;
    Ok(owned(fd))
}

/// Pins what is open.
pub(super) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let bpf_fd = object.as_raw_fd().cast_unsigned();
    bpf(BPF_OBJ_PIN, &mut ObjPath { path: path.as_ptr() as u64, bpf_fd, file_flags: 0 }).map(drop)
}

/// Writes elements of a hash map in one call, which aya has not. After an error some may have been written: the first
/// ones.
pub(super) fn update_all<K: aya::Pod, V: aya::Pod>(map: BorrowedFd<'_>, elements: &[(K, V)]) -> io::Result<()> {
    let (keys, values): (Vec<K>, Vec<V>) = elements.iter().copied().unzip();
    let mut batch = Batch {
        from: 0,
        to: 0,
        keys: keys.as_ptr() as u64,
        values: values.as_ptr() as u64,
        count: u32::try_from(elements.len()).map_err(io::Error::other)?,
        map: map.as_raw_fd().cast_unsigned(),
        element_flags: 0,
        flags: 0,
    };
    bpf(BPF_MAP_UPDATE_BATCH, &mut batch).map(drop)
}

/// Reads a hash map part by part, which aya has not: `look` is given some elements at a time. What changes meanwhile is read
/// or not; nothing is read twice, and the end is reached, where to go from key to key begins again at one that went.
pub(super) fn read_parts<K: aya::Pod, V: aya::Pod>(
    map: BorrowedFd<'_>,
    mut look: impl FnMut(&[K], &[V]),
) -> io::Result<()> {
    // More than there are in any of the kernel's own parts.
    const PART: usize = 1024;
    let (mut keys, mut values): (Vec<K>, Vec<V>) = (Vec::with_capacity(PART), Vec::with_capacity(PART));
    let mut place: Option<u32> = None;
    loop {
        let (from, mut to) = (place, 0_u32);
        let mut batch = Batch {
            from: from.as_ref().map_or(0, |from| std::ptr::from_ref(from) as u64),
            to: (&raw mut to) as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: u32::try_from(PART).map_err(io::Error::other)?,
            map: map.as_raw_fd().cast_unsigned(),
            element_flags: 0,
            flags: 0,
        };
        let read = bpf(BPF_MAP_LOOKUP_BATCH, &mut batch);
        let is_last = match &read {
            Ok(_) => false,
            Err(error) if error.kind() == io::ErrorKind::NotFound => true,
            Err(_) => return read.map(drop),
        };
        let count = usize::try_from(batch.count).map_err(io::Error::other)?.min(PART);
        // SAFETY: the kernel has written as many of each, for which there is room, and any bytes are an `aya::Pod`.
        unsafe {
            keys.set_len(count);
            values.set_len(count);
        }
        look(&keys, &values);
        if is_last {
            return Ok(());
        }
        place = Some(to);
    }
}

/// Lets `work` see and change an array of so many words where the kernel has it, of a map with `BPF_F_MMAPABLE`: programs do the
/// same meanwhile. Not for longer, since the whole array counts as the process's memory.
pub(super) fn with_words<T>(map: BorrowedFd<'_>, count: usize, work: impl FnOnce(&[AtomicU64]) -> T) -> io::Result<T> {
    let length = NonZero::new(count * size_of::<u64>()).ok_or(io::ErrorKind::InvalidInput)?;
    let (rights, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED);
    // SAFETY: at an address that is free; the kernel refuses a map that is shorter.
    let start = unsafe { mmap(None, length, rights, flags, map, 0) }?;
    // SAFETY: elements of eight bytes, one behind the other from the beginning of a page on, for as long as they are mapped; whoever
    // changes them changes whole words.
    let done = work(unsafe { slice::from_raw_parts(start.cast().as_ptr(), count) });
    // SAFETY: as mapped above; nothing points there any more.
    unsafe { munmap(start, length.get()) }?;
    Ok(done)
}

/// Has a device's driver run a program, and nobody in the driver's place. aya asks once more by netlink, which gives no
/// link.
pub(super) fn create_xdp_link(program: BorrowedFd<'_>, ifindex: u32) -> io::Result<OwnedFd> {
    create_link(program, ifindex, bpf_attach_type::BPF_XDP, XDP_FLAGS_DRV_MODE)
}

/// Puts a program on a hook of a device, ahead of all others there or behind them. aya asks for the device by its name, which
/// another one may have by now.
pub(super) fn create_tcx_link(
    program: BorrowedFd<'_>,
    ifindex: u32,
    hook: bpf_attach_type,
    is_last: bool,
) -> io::Result<OwnedFd> {
    create_link(program, ifindex, hook, if is_last { BPF_F_AFTER } else { BPF_F_BEFORE })
}

fn create_link(program: BorrowedFd<'_>, ifindex: u32, hook: bpf_attach_type, flags: u32) -> io::Result<OwnedFd> {
    let program = program.as_raw_fd().cast_unsigned();
    bpf(BPF_LINK_CREATE, &mut LinkCreate { program, ifindex, attach_type: hook as u32, flags }).map(owned)
}

/// What the kernel has just made, so that nobody else knows it.
fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: see above.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// What the kernel tells of a program. aya asks for the maps by the program's id, which takes `CAP_SYS_ADMIN`.
pub(super) fn program_facts(program: BorrowedFd<'_>) -> io::Result<ProgramFacts> {
    let mut maps = vec![0_u32; MOST_MAPS];
    let map_count = u32::try_from(maps.len()).map_err(io::Error::other)?;
    let mut info = ProgramInfo { map_count, map_ids: maps.as_mut_ptr() as u64, ..ProgramInfo::default() };
    let info_len = u32::try_from(size_of_val(&info)).map_err(io::Error::other)?;
    let bpf_fd = program.as_raw_fd().cast_unsigned();
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut GetInfo { bpf_fd, info_len, info: (&raw mut info) as u64 })?;
    let map_count = usize::try_from(info.map_count).map_err(io::Error::other)?;
    if map_count > maps.len() {
        return Err(io::Error::other(format!("the program uses {map_count} maps")));
    }
    maps.truncate(map_count);
    let name = info.name.iter().copied().take_while(|byte| *byte != 0).collect();
    Ok(ProgramFacts { kind: info.kind, id: info.id, name, maps })
}

/// The ids of the programs on a hook of a device, in the order in which packets meet them. aya opens each of them too, which
/// takes `CAP_SYS_ADMIN`.
pub(super) fn programs_on(ifindex: u32, hook: bpf_attach_type) -> io::Result<Vec<u32>> {
    let mut programs = vec![0_u32; MOST_PROGRAMS];
    let mut query = Query {
        ifindex,
        attach_type: hook as u32,
        flags: 0,
        attach_flags: 0,
        programs: programs.as_mut_ptr() as u64,
        count: u32::try_from(programs.len()).map_err(io::Error::other)?,
        pad: 0,
        program_flags: 0,
        links: 0,
        link_flags: 0,
        revision: 0,
    };
    bpf(BPF_PROG_QUERY, &mut query)?;
    programs.truncate(usize::try_from(query.count).map_err(io::Error::other)?);
    Ok(programs)
}

/// What the kernel tells of a link; aya does not tell what it is on.
pub(super) fn link_facts(link: BorrowedFd<'_>) -> io::Result<LinkFacts> {
    let mut info = LinkInfo::default();
    let info_len = u32::try_from(size_of_val(&info)).map_err(io::Error::other)?;
    let bpf_fd = link.as_raw_fd().cast_unsigned();
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut GetInfo { bpf_fd, info_len, info: (&raw mut info) as u64 })?;
    Ok(LinkFacts { program: info.program, kind: info.kind, target: info.target })
}

/// Puts another program in a link's place at once; aya does so for devices only.
pub(super) fn replace_program(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let number = |fd: BorrowedFd<'_>| fd.as_raw_fd().cast_unsigned();
    bpf(BPF_LINK_UPDATE, &mut LinkUpdate { link: number(link), new_program: number(program), flags: 0, old_program: 0 })
        .map(drop)
}

/// The kernel's clock for programs.
pub(crate) fn now() -> Duration {
    // That clock cannot fail.
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}

/// The kernel's name of this network namespace; nothing before Linux 5.14, which does not tell.
pub(super) fn netns_cookie() -> Option<u64> {
    let socket = UnixDatagram::unbound().ok()?;
    let mut cookie = 0_u64;
    let mut length = libc::socklen_t::try_from(size_of_val(&cookie)).ok()?;
    let value = (&raw mut cookie).cast();
    // SAFETY: the socket is open, and the value and its length outlive the call.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_NETNS_COOKIE, value, &raw mut length)
    };
    (result == 0).then_some(cookie)
}

fn bpf<T>(command: libc::c_int, attributes: &mut T) -> io::Result<RawFd> {
    let at = std::ptr::from_mut(attributes);
    // SAFETY: the attributes are what the command reads and writes, with their own size, and their pointers outlive it.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, at, size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { RawFd::try_from(result).map_err(io::Error::other) }
}
