// SPDX-License-Identifier: Apache-2.0
//! Programs of others that end the chain of their hook, or hand packets on, ahead of ours and behind.

#![expect(unsafe_code, reason = "no library in use loads a program that is in no file")]

use std::ffi::CString;
use std::io::{self, ErrorKind};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use aya::programs::tc::{self, NlOptions, TcAttachOptions, TcHandle};
use aya::programs::{LinkOrder, SchedClassifier, TcAttachType};
use npl_agent::datapath::inspect::Inspection;
use npl_agent::datapath::pins::Direction;
use npl_testkit::mounts::BpfFs;
use npl_testkit::topology::Options;
use npl_testkit::traffic::{UdpOptions, tcp_connect, udp_ask, udp_request, udp_socket};

use crate::world::World;

/// `TC_ACT_UNSPEC`, which is also `TCX_NEXT`: the next program decides.
const HANDS_ON: i32 = -1;
/// `TC_ACT_OK`, which is also `TCX_PASS`: the packet goes on its way, past all other programs of the hook.
const ENDS_THE_CHAIN: i32 = 0;

const BOTH: [TcAttachType; 2] = [TcAttachType::Ingress, TcAttachType::Egress];

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;

/// What [`BPF_PROG_LOAD`] reads, as far as a program has it.
#[repr(C)]
struct Load {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
}

/// What [`BPF_OBJ_PIN`] reads.
#[repr(C)]
struct Pin {
    path: u64,
    fd: u32,
    flags: u32,
}

/// Where a program stands on a hook.
#[derive(Clone, Copy)]
enum Place {
    /// Of all that is there already.
    Ahead,
    Behind,
}

/// Somebody else's program of two instructions, on both of the uplink's hooks or one of them; gone when dropped.
struct Foreign {
    _program: SchedClassifier,
    _bpffs: BpfFs,
}

impl Foreign {
    fn attach(world: &World, name: &str, verdict: i32, place: Place, hooks: &[TcAttachType]) -> Self {
        let bpffs = world.run.bpffs(name).unwrap();
        let pin = bpffs.path().join("program");
        load(verdict, &pin).unwrap();
        let mut program = SchedClassifier::from_pin(&pin).unwrap();
        for hook in hooks {
            let options = if is_tcx() {
                TcAttachOptions::TcxOrder(match place {
                    Place::Ahead => LinkOrder::first(),
                    Place::Behind => LinkOrder::last(),
                })
            } else {
                // Of one priority, the filter that came last is the first.
                TcAttachOptions::Netlink(match place {
                    Place::Ahead => NlOptions { priority: 1, handle: TcHandle::new(1, 1), classid: None },
                    Place::Behind => NlOptions { priority: 10, ..NlOptions::default() },
                })
            };
            let attach = || {
                drop(tc::qdisc_add_clsact("eth0"));
                program.attach_with_options("eth0", *hook, options)
            };
            world.node().run(attach).unwrap().unwrap();
        }
        Self { _program: program, _bpffs: bpffs }
    }

    /// A filter is taken away in the namespace of its device.
    fn take_away(self, world: &World) {
        world.node().run(|| drop(self)).unwrap();
    }
}

fn is_tcx() -> bool {
    npl_agent::datapath::preflight::has_tcx()
}

/// Loads a program that returns a constant, and pins it.
fn load(verdict: i32, pin: &Path) -> io::Result<()> {
    let [a, b, c, d] = verdict.to_le_bytes();
    // `r0 = verdict; exit`.
    let instructions = [u64::from_le_bytes([0xb7, 0, 0, 0, a, b, c, d]), 0x95];
    let program = Load {
        kind: BPF_PROG_TYPE_SCHED_CLS,
        instruction_count: 2,
        instructions: instructions.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
    };
    let fd = bpf(BPF_PROG_LOAD, &program)?;
    // SAFETY: the kernel has just opened it for nobody else.
    let _open = unsafe { OwnedFd::from_raw_fd(fd) };
    let path = CString::new(pin.as_os_str().as_bytes())?;
    bpf(BPF_OBJ_PIN, &Pin { path: path.as_ptr() as u64, fd: fd.cast_unsigned(), flags: 0 }).map(drop)
}

fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<i32> {
    // SAFETY: the attributes are what the command reads, with their own size; what they point to outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { i32::try_from(result).map_err(io::Error::other) }
}

/// Requests and replies that the mappings have counted.
fn counted(world: &World) -> (u64, u64) {
    let records = world.datapath.as_ref().unwrap().tables.records().unwrap();
    let sum = |of: fn(&npl_common::stats::MappingStats) -> u64| records.iter().map(|it| of(&it.stats)).sum();
    (sum(|stats| stats.request_packets), sum(|stats| stats.reply_packets))
}

/// What `npl-agent status` goes by: our programs are where they belong, whatever others have done.
#[track_caller]
fn assert_seems_attached(world: &World) {
    let links = Inspection::read(world.bpffs.path()).unwrap().links;
    let mut sides: Vec<_> = links.into_values().flatten().map(Direction::as_str).collect();
    sides.sort_unstable();
    assert_eq!(sides, ["egress", "ingress"]);
}

#[track_caller]
fn kind_of<T: std::fmt::Debug>(result: anyhow::Result<T>) -> Option<ErrorKind> {
    result.unwrap_err().downcast_ref::<io::Error>().map(io::Error::kind)
}

#[test]
fn programs_behind_ours_may_end_the_chain_or_not() {
    for verdict in [ENDS_THE_CHAIN, HANDS_ON] {
        let mut world = World::bare(1, Options::default());
        let _before_us = Foreign::attach(&world, "before", verdict, Place::Behind, &BOTH);
        world.install();
        world.assert_answers();
        let _after_us = Foreign::attach(&world, "after", verdict, Place::Behind, &BOTH);
        world.assert_answers();
    }
}

#[test]
fn programs_ahead_of_ours_that_hand_on_change_nothing() {
    let world = World::new(1);
    let _ahead = Foreign::attach(&world, "ahead", HANDS_ON, Place::Ahead, &BOTH);
    world.assert_answers();
}

/// Our programs are not reached, and the host answers as it would without us. Neither `status` nor the log tells: our own
/// programs are where they were, and the kernel lets nobody ask whether a program has run. Mappings that count no requests
/// do.
#[test]
fn program_ahead_of_ours_that_ends_the_chain_keeps_requests_from_us() {
    let world = World::new(1);
    let ahead = Foreign::attach(&world, "ahead", ENDS_THE_CHAIN, Place::Ahead, &[TcAttachType::Ingress]);
    for frontend in world.frontends() {
        assert_eq!(kind_of(tcp_connect(world.client(), frontend)), Some(ErrorKind::ConnectionRefused));
        let socket = udp_socket(world.client(), frontend, true).unwrap();
        assert_eq!(kind_of(udp_ask(&socket, "anybody?")), Some(ErrorKind::ConnectionRefused));
    }
    assert_eq!(counted(&world), (0, 0));
    assert_seems_attached(&world);
    ahead.take_away(&world);
    world.assert_answers();
}

/// Requests reach the Pod, and its replies are its own, which no client takes. Mappings that count requests and no replies
/// tell.
#[test]
fn program_ahead_of_ours_that_ends_the_chain_keeps_replies_from_us() {
    let world = World::new(1);
    let ahead = Foreign::attach(&world, "ahead", ENDS_THE_CHAIN, Place::Ahead, &[TcAttachType::Egress]);
    for frontend in world.frontends() {
        assert_eq!(kind_of(tcp_connect(world.client(), frontend)), Some(ErrorKind::TimedOut));
        let few = UdpOptions { attempts: 3, ..UdpOptions::default() };
        udp_request(world.client(), frontend, b"anybody?", few).unwrap_err();
    }
    let (requests, replies) = counted(&world);
    assert!(requests >= 8 && replies == 0, "{requests} requests, {replies} replies");
    assert_seems_attached(&world);
    ahead.take_away(&world);
    world.assert_answers();
}
