// SPDX-License-Identifier: Apache-2.0
//! Attaches TC programs of other software to devices. Each program returns the same verdict for every packet; some
//! programs first run a loop that takes time.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use aya::programs::tc::{self, NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle};
use aya::programs::{LinkOrder, ProgramError, SchedClassifier, TcAttachType};
use aya::util::KernelVersion;

use crate::bpf::{self, instruction};
use crate::mounts::BpfFs;
use crate::poll::until_gone;
use crate::process;
use crate::run::Run;
use crate::topology::Device;

/// The verdict `TC_ACT_UNSPEC`, which equals `TCX_NEXT`: the next program runs.
pub const HANDS_ON: i32 = -1;
/// The verdict `TC_ACT_OK`, which equals `TCX_PASS`: the packet is accepted, and the remaining programs of the hook are
/// skipped.
pub const ENDS_THE_CHAIN: i32 = 0;
/// The verdict `TC_ACT_SHOT`, which equals `TCX_DROP`: the packet is dropped.
pub const DROPS: i32 = 2;

/// Both TC hooks of a device.
pub const BOTH: [TcAttachType; 2] = [TcAttachType::Ingress, TcAttachType::Egress];

/// The first kernel with TCX links.
const TCX_SINCE: KernelVersion = KernelVersion::new(6, 6, 0);

const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_LINK_UPDATE: libc::c_int = 29;

/// The leading fields of `union bpf_attr` for [`BPF_OBJ_PIN`].
#[repr(C)]
struct Pin {
    path: u64,
    fd: u32,
    flags: u32,
}

/// The leading fields of `union bpf_attr` for [`BPF_LINK_UPDATE`].
#[repr(C)]
struct LinkUpdate {
    link: u32,
    program: u32,
    flags: u32,
    old_program: u32,
}

/// The position of a program on a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The program runs before all other programs on the hook.
    Ahead,
    /// The program is a TC filter of priority 1, like Cilium's filters, even if the kernel has TCX. The program runs
    /// before all other filters of this priority.
    AheadAsFilter,
    /// The program runs after all other programs on the hook.
    Behind,
}

/// A program of other software on hooks of a device. The program is attached by TCX links; before Linux 6.6, and with
/// [`Place::AheadAsFilter`], it is attached as a TC filter. Dropping this value detaches the program.
#[derive(Debug)]
pub struct Foreign {
    device: Device,
    links: Vec<SchedClassifierLink>,
    program: SchedClassifier,
    bpffs: BpfFs,
}

impl Foreign {
    /// Loads a program and attaches it. `name` distinguishes several programs of one run.
    pub fn attach(
        run: &Run,
        name: &str,
        device: &Device,
        verdict: i32,
        place: Place,
        hooks: &[TcAttachType],
    ) -> Result<Self> {
        Self::attach_slow(run, name, device, verdict, 0, place, hooks)
    }

    /// Loads and attaches a program as [`Self::attach`] does. The program runs a loop with this number of rounds for
    /// each packet; a round takes about 0.1 µs.
    pub fn attach_slow(
        run: &Run,
        name: &str,
        device: &Device,
        verdict: i32,
        rounds: i32,
        place: Place,
        hooks: &[TcAttachType],
    ) -> Result<Self> {
        let bpffs = run.bpffs(name)?;
        let mut program = load(verdict, rounds, &bpffs.path().join("program"))?;
        let attach = || hooks.iter().map(|hook| put(&mut program, device.name(), *hook, place)).collect();
        let links: Result<_, ProgramError> = device.netns().run(attach)?;
        Ok(Self { device: device.clone(), links: links.context("attach a third-party program")?, program, bpffs })
    }

    /// The kernel's id of the program.
    pub fn program_id(&self) -> u32 {
        self.program.info().map(|info| info.id()).unwrap_or_default()
    }

    /// Makes another program of other software, which continues the chain, the program of a pinned link of NPL.
    pub fn replace_program_of(&self, pin: &Path) -> Result<()> {
        let link = bpf::open_pin(pin).with_context(|| format!("open {}", pin.display()))?;
        // The kernel refuses a program that is already attached to the hook, so another program is loaded.
        let program = load(HANDS_ON, 0, &self.bpffs.path().join("replacement"))?;
        let program = program.fd().context("get the descriptor of a third-party program")?;
        let number = |fd: i32| fd.cast_unsigned();
        let (of_link, of_program) = (number(link.as_raw_fd()), number(program.as_fd().as_raw_fd()));
        let mut update = LinkUpdate { link: of_link, program: of_program, flags: 0, old_program: 0 };
        bpf::call(BPF_LINK_UPDATE, &mut update).context("update a link").map(drop)
    }

    /// Replaces the program with one that returns another verdict, at the same position.
    pub fn change(&mut self, verdict: i32) -> Result<()> {
        let mut program = load(verdict, 0, &self.bpffs.path().join("program"))?;
        let links = std::mem::take(&mut self.links);
        let mut replace = |link| {
            let id = program.attach_to_link(link)?;
            program.take_link(id)
        };
        let replaced = || links.into_iter().map(&mut replace).collect();
        let links: Result<_, ProgramError> = self.device.netns().run(replaced)?;
        self.links = links.context("replace a third-party program")?;
        self.program = program;
        Ok(())
    }
}

impl Drop for Foreign {
    /// Detaches the program. Filters must be removed in the network namespace of their device. For a TCX link, the drop
    /// waits until the link has disappeared. The link may stay for a moment, because a child process that another
    /// thread forks holds a copy of the link's descriptor until `exec`.
    fn drop(&mut self) {
        let links = std::mem::take(&mut self.links);
        let id = self.program.info().map(|info| info.id());
        let device = self.device.name();
        let detach = || {
            drop(links);
            let Ok(id) = id else { return Ok(()) };
            until_gone("the detachment of a third-party program", LIMIT, || {
                BOTH.iter().all(|hook| !is_attached(device, *hook, id))
            })
        };
        if let Err(error) = self.device.netns().run(detach).flatten() {
            process::report(&format!("{error:#}"));
        }
    }
}

/// The time limit for the link to disappear, far longer than the time from `fork` to `exec`.
const LIMIT: Duration = Duration::from_secs(10);

/// Whether a TCX link of the program is on a hook; `false` if the kernel has no TCX or the device was removed.
fn is_attached(device: &str, hook: TcAttachType, id: u32) -> bool {
    let programs = SchedClassifier::query_tcx(device, hook);
    programs.is_ok_and(|(_, programs)| programs.iter().any(|program| program.id() == id))
}

fn put(
    program: &mut SchedClassifier,
    device: &str,
    hook: TcAttachType,
    place: Place,
) -> Result<SchedClassifierLink, ProgramError> {
    let has_tcx = KernelVersion::current().is_ok_and(|found| found >= TCX_SINCE);
    let order = match place {
        Place::Ahead => has_tcx.then(LinkOrder::first),
        Place::AheadAsFilter => None,
        Place::Behind => has_tcx.then(LinkOrder::last),
    };
    let options = if let Some(order) = order {
        TcAttachOptions::TcxOrder(order)
    } else {
        // An error means that the qdisc already exists.
        drop(tc::qdisc_add_clsact(device));
        // The kernel runs the newest filter of a priority first, so a new filter of priority 1 runs before all others
        // of this priority.
        TcAttachOptions::Netlink(match place {
            Place::Ahead | Place::AheadAsFilter => {
                NlOptions { priority: 1, handle: TcHandle::new(1, 1), classid: None }
            }
            Place::Behind => NlOptions { priority: 10, ..NlOptions::default() },
        })
    };
    let id = program.attach_with_options(device, hook, options)?;
    program.take_link(id)
}

/// Loads a program that returns a constant verdict, after `rounds` rounds of the loop of [`pause`].
fn load(verdict: i32, rounds: i32, pin: &Path) -> Result<SchedClassifier> {
    load_and_pin(verdict, rounds, pin).context("load a third-party program")?;
    let program = SchedClassifier::from_pin(pin).context("open a third-party program")?;
    fs::remove_file(pin).context("unpin a third-party program")?;
    Ok(program)
}

/// Instructions that compute the checksum of 512 bytes of the stack `rounds` times with `bpf_csum_diff`.
fn pause(rounds: i32) -> Vec<u64> {
    const STACK: i16 = 512;
    const CSUM_DIFF: i32 = 28;
    let (r1, r2, r3, r4, r5, count, frame) = (1, 2, 3, 4, 5, 6, 10);
    let zeros = (1..=STACK / 8).map(|word| instruction(0x7a, frame, 0, -8 * word, 0));
    let round = [
        instruction(0xbf, r1, frame, 0, 0),
        instruction(0x07, r1, 0, 0, -i32::from(STACK)),
        instruction(0xb7, r2, 0, 0, i32::from(STACK)),
        instruction(0xb7, r3, 0, 0, 0),
        instruction(0xb7, r4, 0, 0, 0),
        instruction(0xb7, r5, 0, 0, 0),
        instruction(0x85, 0, 0, 0, CSUM_DIFF),
        instruction(0x07, count, 0, 0, -1),
        instruction(0x55, count, 0, -9, 0),
    ];
    [instruction(0xb7, count, 0, 0, rounds)].into_iter().chain(zeros).chain(round).collect()
}

fn load_and_pin(verdict: i32, rounds: i32, pin: &Path) -> io::Result<()> {
    let mut instructions = if rounds > 0 { pause(rounds) } else { Vec::new() };
    // `r0 = verdict; exit`.
    instructions.extend([instruction(0xb7, 0, 0, 0, verdict), instruction(0x95, 0, 0, 0, 0)]);
    let program = bpf::load_classifier(&instructions)?;
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let fd = program.as_raw_fd().cast_unsigned();
    bpf::call(BPF_OBJ_PIN, &mut Pin { path: path.as_ptr() as u64, fd, flags: 0 }).map(drop)
}
