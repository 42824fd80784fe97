// SPDX-License-Identifier: Apache-2.0
//! System calls that aya, nix and rtnetlink do not offer. The kernel structures for these calls come from aya-obj.

#![expect(unsafe_code, reason = "a system call takes pointers")]

use std::{
    ffi::CString,
    io, mem,
    num::NonZero,
    os::{
        fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::{ffi::OsStrExt as _, net::UnixDatagram},
    },
    path::Path,
    ptr, slice,
    sync::atomic::AtomicU64,
    thread,
    time::Duration,
};

use aya_obj::generated::{
    BPF_F_AFTER, BPF_F_BEFORE, XDP_FLAGS_DRV_MODE, bpf_attach_type, bpf_attr, bpf_cmd, bpf_link_info, bpf_link_type,
    bpf_prog_info,
};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// The size of the buffer for the map ids of one program. No program of NPL uses more maps.
const MOST_MAPS: usize = 64;
/// The kernel's limit on the number of programs on a hook.
const MOST_PROGRAMS: usize = 64;

/// The time that [`wait_for_packets_in_hooks`] waits on a kernel without `membarrier`: far longer than a packet stays
/// in a hook.
const LONGEST_STAY: Duration = Duration::from_millis(100);

/// The fields of `bpf_prog_info` that identify a program.
#[derive(Debug)]
pub(super) struct ProgramFacts {
    /// The program's type, as the number that the kernel uses.
    pub(super) kind: u32,
    pub(super) id: u32,
    pub(super) name: Vec<u8>,
    /// The ids of the maps that the program uses.
    pub(super) maps: Vec<u32>,
}

/// The program of a BPF link, and the device or cgroup to which the link is attached.
pub(super) struct LinkFacts {
    /// The id of the link's program.
    pub(super) program: u32,
    info: bpf_link_info,
}

impl LinkFacts {
    /// Whether this is an XDP link on the device with the index `ifindex`.
    pub(super) const fn is_of_driver(&self, ifindex: u32) -> bool {
        // SAFETY: the union has only integers, for which all bit patterns are valid.
        let target = unsafe { self.info.__bindgen_anon_1.xdp };
        self.is(bpf_link_type::BPF_LINK_TYPE_XDP) && target.ifindex == ifindex
    }

    /// Whether this is a TCX link on the hook `hook` of the device with the index `ifindex`.
    pub(super) const fn is_of_hook(&self, ifindex: u32, hook: bpf_attach_type) -> bool {
        // SAFETY: the union has only integers, for which all bit patterns are valid.
        let target = unsafe { self.info.__bindgen_anon_1.tcx };
        self.is(bpf_link_type::BPF_LINK_TYPE_TCX) && target.ifindex == ifindex && target.attach_type == hook as u32
    }

    /// Whether this is a link on the cgroup with the inode number `cgroup`.
    pub(super) const fn is_of_cgroup(&self, cgroup: u64) -> bool {
        // SAFETY: the union has only integers, for which all bit patterns are valid.
        let target = unsafe { self.info.__bindgen_anon_1.cgroup };
        self.is(bpf_link_type::BPF_LINK_TYPE_CGROUP) && target.cgroup_id == cgroup
    }

    const fn is(&self, kind: bpf_link_type) -> bool {
        self.info.type_ == kind as u32
    }
}

/// Reads a value from bytes that kernel programs have written; `None` if the bytes do not have the size of the value.
pub(super) fn value_of<T: aya::Pod>(bytes: &[u8]) -> Option<T> {
    // SAFETY: the bytes have the size of `T`, for which all byte values are valid; no alignment is assumed.
    (bytes.len() == size_of::<T>()).then(|| unsafe { ptr::read_unaligned(bytes.as_ptr().cast()) })
}

/// Opens a pinned map, program or link. aya is not used, because it has only separate functions for maps, programs and
/// links.
pub(super) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = no_attributes();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    bpf(bpf_cmd::BPF_OBJ_GET, &mut attr).map(owned)
}

/// Opens a program by its id.
pub(super) fn open_program(id: u32) -> io::Result<OwnedFd> {
    let mut attr = no_attributes();
    attr.__bindgen_anon_6.__bindgen_anon_1.prog_id = id;
    bpf(bpf_cmd::BPF_PROG_GET_FD_BY_ID, &mut attr).map(owned)
}

/// Pins a BPF object, such as a link, at a path of the BPF file system. aya is not used, because it can pin only links
/// that it has created.
pub(super) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = no_attributes();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    attr.__bindgen_anon_4.bpf_fd = number(object);
    bpf(bpf_cmd::BPF_OBJ_PIN, &mut attr).map(drop)
}

/// The id of the program in an element of a program array. aya is not used, because it cannot read program arrays.
pub(super) fn program_in(array: BorrowedFd<'_>, index: u32) -> io::Result<u32> {
    let (key, mut id) = (index, 0_u32);
    let mut attr = no_attributes();
    attr.__bindgen_anon_2.map_fd = number(array);
    attr.__bindgen_anon_2.key = ptr::from_ref(&key) as u64;
    attr.__bindgen_anon_2.__bindgen_anon_1.value = (&raw mut id) as u64;
    bpf(bpf_cmd::BPF_MAP_LOOKUP_ELEM, &mut attr).map(|_| id)
}

/// Writes elements of a map in one system call. aya is not used, because it has no batch operations. After an error,
/// some of the elements may have been written.
pub(super) fn update_all<K: aya::Pod, V: aya::Pod>(map: BorrowedFd<'_>, elements: &[(K, V)]) -> io::Result<()> {
    let (keys, values): (Vec<K>, Vec<V>) = elements.iter().copied().unzip();
    let mut attr = no_attributes();
    attr.batch.keys = keys.as_ptr() as u64;
    attr.batch.values = values.as_ptr() as u64;
    attr.batch.count = length(elements)?;
    attr.batch.map_fd = number(map);
    bpf(bpf_cmd::BPF_MAP_UPDATE_BATCH, &mut attr).map(drop)
}

/// Reads a hash map in batches and passes each batch to `look`. No element is read twice, and the loop ends even if
/// elements are added and removed. aya is not used, because it iterates by key, and would begin again from the start
/// whenever the current key is removed.
pub(super) fn read_parts<K: aya::Pod, V: aya::Pod>(
    map: BorrowedFd<'_>,
    mut look: impl FnMut(&[K], &[V]),
) -> io::Result<()> {
    // The kernel returns only whole hash buckets, so a batch must have room for the fullest bucket.
    const PART: usize = 1024;
    let (mut keys, mut values): (Vec<K>, Vec<V>) = (Vec::with_capacity(PART), Vec::with_capacity(PART));
    let mut place: Option<u32> = None;
    loop {
        let (from, mut to) = (place, 0_u32);
        let mut attr = no_attributes();
        attr.batch.in_batch = from.as_ref().map_or(0, |from| ptr::from_ref(from) as u64);
        attr.batch.out_batch = (&raw mut to) as u64;
        attr.batch.keys = keys.as_mut_ptr() as u64;
        attr.batch.values = values.as_mut_ptr() as u64;
        attr.batch.count = u32::try_from(PART).map_err(io::Error::other)?;
        attr.batch.map_fd = number(map);
        let read = bpf(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr);
        let is_last = match &read {
            Ok(_) => false,
            Err(error) if error.kind() == io::ErrorKind::NotFound => true,
            Err(_) => return read.map(drop),
        };
        // SAFETY: the union has only integers, for which all bit patterns are valid.
        let count = usize::try_from(unsafe { attr.batch.count }).map_err(io::Error::other)?.min(PART);
        // SAFETY: the kernel has written `count` keys and values, `count` is within the capacity, and all bit patterns
        // are valid for an `aya::Pod`.
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

/// Maps an array map with `BPF_F_MMAPABLE`, whose elements are `count` 64-bit words, into memory while `work` runs.
/// Kernel programs may change the words while `work` runs, so the words are atomics. The array is unmapped afterwards,
/// because mapped pages count as resident memory of the process.
pub(super) fn with_words<T>(map: BorrowedFd<'_>, count: usize, work: impl FnOnce(&[AtomicU64]) -> T) -> io::Result<T> {
    let length = NonZero::new(count * size_of::<u64>()).ok_or(io::ErrorKind::InvalidInput)?;
    let (rights, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED);
    // SAFETY: the kernel chooses a free address, and returns an error for a map shorter than `length`.
    let start = unsafe { mmap(None, length, rights, flags, map, 0) }?;
    // SAFETY: `count` words are mapped from the start of a page until `work` returns, and programs change them
    // atomically.
    let done = work(unsafe { slice::from_raw_parts(start.cast().as_ptr(), count) });
    // SAFETY: the range was mapped above, and `work` cannot keep a reference to the words.
    unsafe { munmap(start, length.get()) }?;
    Ok(done)
}

/// Attaches an XDP program in the device's driver by a BPF link, and fails if the driver does not support XDP. aya is
/// not used: if the driver does not support XDP, aya attaches the program by netlink, without a link.
pub(super) fn create_xdp_link(program: BorrowedFd<'_>, ifindex: u32) -> io::Result<OwnedFd> {
    create_link(program, ifindex, bpf_attach_type::BPF_XDP, XDP_FLAGS_DRV_MODE)
}

/// Attaches a program before or after all other programs on a device's hook. aya is not used, because it identifies the
/// device by name, and another device may have received this name.
pub(super) fn create_tcx_link(
    program: BorrowedFd<'_>,
    ifindex: u32,
    hook: bpf_attach_type,
    is_last: bool,
) -> io::Result<OwnedFd> {
    create_link(program, ifindex, hook, if is_last { BPF_F_AFTER } else { BPF_F_BEFORE })
}

fn create_link(program: BorrowedFd<'_>, ifindex: u32, hook: bpf_attach_type, flags: u32) -> io::Result<OwnedFd> {
    let mut attr = no_attributes();
    attr.link_create.__bindgen_anon_1.prog_fd = number(program);
    attr.link_create.__bindgen_anon_2.target_ifindex = ifindex;
    attr.link_create.attach_type = hook as u32;
    attr.link_create.flags = flags;
    bpf(bpf_cmd::BPF_LINK_CREATE, &mut attr).map(owned)
}

/// Reads a program's `bpf_prog_info`. aya's function is not used, because it opens the program's maps by their ids,
/// which requires `CAP_SYS_ADMIN`.
pub(super) fn program_facts(program: BorrowedFd<'_>) -> io::Result<ProgramFacts> {
    let mut maps = vec![0_u32; MOST_MAPS];
    // SAFETY: the structure has only integers, which may be zero.
    let mut info: bpf_prog_info = unsafe { mem::zeroed() };
    info.nr_map_ids = length(&maps)?;
    info.map_ids = maps.as_mut_ptr() as u64;
    read_info(program, &mut info)?;
    let map_count = usize::try_from(info.nr_map_ids).map_err(io::Error::other)?;
    if map_count > maps.len() {
        return Err(io::Error::other(format!("the program uses {map_count} maps")));
    }
    maps.truncate(map_count);
    let name = info.name.iter().flat_map(|byte| byte.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
    Ok(ProgramFacts { kind: info.type_, id: info.id, name, maps })
}

/// The ids of the programs on a hook of the device with this ifindex, in the order in which they run. aya's function is
/// not used, because it opens each program, which requires `CAP_SYS_ADMIN`.
pub(super) fn programs_on(ifindex: u32, hook: bpf_attach_type) -> io::Result<Vec<u32>> {
    let mut programs = vec![0_u32; MOST_PROGRAMS];
    let mut attr = no_attributes();
    attr.query.__bindgen_anon_1.target_ifindex = ifindex;
    attr.query.attach_type = hook as u32;
    attr.query.prog_ids = programs.as_mut_ptr() as u64;
    attr.query.__bindgen_anon_2.prog_cnt = length(&programs)?;
    bpf(bpf_cmd::BPF_PROG_QUERY, &mut attr)?;
    // SAFETY: the union has only integers, for which all bit patterns are valid.
    let count = unsafe { attr.query.__bindgen_anon_2.prog_cnt };
    programs.truncate(usize::try_from(count).map_err(io::Error::other)?);
    Ok(programs)
}

/// Reads a link's `bpf_link_info`, because aya does not return the link's target.
pub(super) fn link_facts(link: BorrowedFd<'_>) -> io::Result<LinkFacts> {
    // SAFETY: the structure has only integers, which may be zero.
    let mut info: bpf_link_info = unsafe { mem::zeroed() };
    read_info(link, &mut info)?;
    Ok(LinkFacts { program: info.prog_id, info })
}

/// Replaces the program of a BPF link atomically. aya's function is not used, because it supports only links on
/// devices.
pub(super) fn replace_program(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = no_attributes();
    attr.link_update.link_fd = number(link);
    attr.link_update.__bindgen_anon_1.new_prog_fd = number(program);
    bpf(bpf_cmd::BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// The monotonic clock, which kernel programs read by `bpf_ktime_get_ns`.
pub(crate) fn now() -> Duration {
    // Reading this clock cannot fail.
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}

/// The cookie of this network namespace; `None` before Linux 5.14. The library nix does not offer the socket option
/// that returns the cookie.
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

/// Fills `info`, a `bpf_prog_info` or `bpf_link_info`, with the kernel's information about the BPF object. Fields that
/// the running kernel does not know stay unchanged.
fn read_info<T>(object: BorrowedFd<'_>, info: &mut T) -> io::Result<()> {
    let mut attr = no_attributes();
    attr.info.bpf_fd = number(object);
    attr.info.info_len = u32::try_from(size_of_val(info)).map_err(io::Error::other)?;
    attr.info.info = ptr::from_mut(info) as u64;
    bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr).map(drop)
}

/// Waits until every packet that is in a TC hook now has left the hook (an RCU grace period). Packets that reach a hook
/// later pass through the filters that were added before this call. A kernel with `nohz_full` CPUs has no global
/// `membarrier`; there, the function waits for a fixed time.
pub(super) fn wait_for_packets_in_hooks() {
    // SAFETY: the command takes no pointers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if result != 0 {
        thread::sleep(LONGEST_STAY);
    }
}

/// Attributes of the `bpf` system call with all bytes zero, because the kernel returns an error if a field that a
/// command does not use is nonzero.
const fn no_attributes() -> bpf_attr {
    // SAFETY: the union has only integers, which may be zero.
    unsafe { mem::zeroed() }
}

fn number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

fn length<T>(elements: &[T]) -> io::Result<u32> {
    u32::try_from(elements.len()).map_err(io::Error::other)
}

/// Takes ownership of a file descriptor that the kernel has just returned.
fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: the descriptor is new, so no other object owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// The `bpf` system call. aya's function for this call is private.
fn bpf(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<RawFd> {
    // SAFETY: the attributes have the given size, and the memory that they point to outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command as u32, ptr::from_mut(attr), size_of::<bpf_attr>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { RawFd::try_from(result).map_err(io::Error::other) }
}
