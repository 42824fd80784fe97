// SPDX-License-Identifier: Apache-2.0
//! Holds the kernel's RTNL lock for as long as a test needs.
//!
//! The ethtool ioctl reads its argument while it holds the lock. The argument lies in a page of memory that is absent
//! until the test provides the page by userfaultfd(2), so the ioctl waits for the page, with the lock.

#![expect(unsafe_code, reason = "no library in use offers userfaultfd and the ethtool ioctl")]

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::net::UdpSocket;
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{mem, ptr};

use anyhow::{Context as _, Result, ensure};

use crate::{poll, process};

/// The time limit for the ioctl to acquire the lock.
const LIMIT: Duration = Duration::from_mins(1);
/// `ETHTOOL_GFEATURES` of `linux/ethtool.h`. After the number of the command, the kernel reads the size of the caller's
/// array, and holds the lock for this read.
const GET_FEATURES: u32 = 0x3a;
/// The features bit and the version of userfaultfd's interface (`UFFD_API` of `linux/userfaultfd.h`).
const UFFD_API: u64 = 0xaa;
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00;
const UFFDIO_UNREGISTER: libc::Ioctl = 0x8010_aa01;
/// `UFFDIO_REGISTER_MODE_MISSING`: the file reports accesses to absent pages.
const MISSING: u64 = 1;

/// The kernel's RTNL lock, which is released when this value is dropped.
///
/// The kernel has one lock for all network namespaces. A process that lists, adds or removes devices or addresses waits
/// for the lock and cannot be killed meanwhile, so the test must not do this itself while it holds the lock.
#[derive(Debug)]
pub struct RtnlLock {
    memory: Memory,
    faults: File,
    holder: Option<JoinHandle<io::Result<()>>>,
}

impl RtnlLock {
    /// Acquires the lock.
    pub fn hold() -> Result<Self> {
        let memory = Memory::new().context("map two pages of memory")?;
        let faults = report_accesses(&memory).context("stop accesses to a page by userfaultfd")?;
        let command = memory.second_page() - size_of::<u32>();
        // SAFETY: the address is aligned, belongs to the first page, and no other reference to the page exists.
        unsafe { ptr::with_exposed_provenance_mut::<u32>(command).write(GET_FEATURES) };
        let holder = thread::spawn(move || read_features(command));
        let mut lock = Self { memory, faults, holder: Some(holder) };
        // The message about the access has 32 bytes. The file is not read again.
        let (mut message, mut ended) = ([0; 32], false);
        poll::until("the ioctl to hold the RTNL lock", LIMIT, || {
            ended = lock.holder.as_ref().is_some_and(JoinHandle::is_finished);
            (ended || lock.faults.read(&mut message).is_ok()).then_some(())
        })?;
        ensure!(!ended, "the ethtool ioctl did not read its argument");
        Ok(lock)
    }
}

impl Drop for RtnlLock {
    fn drop(&mut self) {
        let range = [self.memory.second_page() as u64, self.memory.page as u64];
        // SAFETY: the range has the layout of `struct uffdio_range`.
        let unregistered = check(unsafe { libc::ioctl(self.faults.as_raw_fd(), UFFDIO_UNREGISTER, range.as_ptr()) });
        let ended = self.holder.take().map_or(Ok(()), |holder| match unregistered {
            Ok(_) => holder.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked"))),
            Err(error) => Err(error),
        });
        if let Err(error) = ended {
            process::report(&format!("release the RTNL lock: {error}"));
        }
    }
}

/// Returns the ids of the threads of a process that wait for the RTNL lock: threads in an uninterruptible sleep in the
/// kernel's code of rtnetlink or ethtool.
pub fn waiting_threads(process: u32) -> Result<Vec<String>> {
    let tasks = format!("/proc/{process}/task");
    let tasks = fs::read_dir(&tasks).with_context(|| format!("list {tasks}"))?.flatten();
    Ok(tasks.filter(|task| waits(&task.path())).map(|task| task.file_name().to_string_lossy().into_owned()).collect())
}

/// Whether a thread, given by its folder in `/proc`, waits for the RTNL lock.
fn waits(task: &Path) -> bool {
    let read = |file: &str| fs::read_to_string(task.join(file)).unwrap_or_default();
    let sleeps = read("stat").rsplit_once(") ").is_some_and(|(_, after)| after.starts_with('D'));
    let stack = read("stack");
    sleeps && ["rtnl", "netlink", "ethtool"].iter().any(|name| stack.contains(name))
}

/// Two adjacent pages of zeroes, which are absent until they are accessed.
#[derive(Debug)]
struct Memory {
    start: usize,
    page: usize,
}

impl Memory {
    fn new() -> io::Result<Self> {
        // SAFETY: the argument is a number.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).map_err(io::Error::other)?;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the kernel chooses the address.
        let start = unsafe { libc::mmap(ptr::null_mut(), page * 2, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start: start.expose_provenance(), page })
    }

    fn second_page(&self) -> usize {
        self.start + self.page
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the value owns the pages, and the thread that uses them has ended or waits in the kernel, which then
        // reports an error to the thread.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(self.start), self.page * 2) };
    }
}

/// Returns a file that stops each access to the second page, and reports it.
fn report_accesses(memory: &Memory) -> io::Result<File> {
    // SAFETY: the argument is a number.
    let opened = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    let opened = check(libc::c_int::try_from(opened).map_err(io::Error::other)?)?;
    // SAFETY: the kernel has just opened the file.
    let file = unsafe { File::from_raw_fd(opened) };
    let mut api = [UFFD_API, 0, 0];
    // SAFETY: the value has the layout of `struct uffdio_api`.
    check(unsafe { libc::ioctl(file.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()) })?;
    let mut area = [memory.second_page() as u64, memory.page as u64, MISSING, 0];
    // SAFETY: the value has the layout of `struct uffdio_register`.
    check(unsafe { libc::ioctl(file.as_raw_fd(), UFFDIO_REGISTER, area.as_mut_ptr()) })?;
    Ok(file)
}

/// Reads the features of the loopback device into memory at this address.
fn read_features(command: usize) -> io::Result<()> {
    let socket = UdpSocket::bind(("127.0.0.1", 0))?;
    // SAFETY: zeroes are a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    request.ifr_ifru.ifru_data = ptr::with_exposed_provenance_mut(command);
    // SAFETY: the argument of the command lies in memory that outlives the call, and says that the caller's array is
    // empty.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) }).map(drop)
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
