// SPDX-License-Identifier: Apache-2.0
//! The two types of programs that run in system calls on sockets: `CgroupSockAddr` programs translate addresses, and
//! the `CgroupSock` program runs when a socket is closed.

use std::os::fd::AsFd;

use aya::programs::{
    CgroupAttachMode, CgroupSock, CgroupSockAddr, ProgramError, ProgramFd, ProgramInfo,
    links::{FdLink, LinkError},
};
use npl_common::names::{RELEASE_HOOK, SocketProgram};

use super::{error::DatapathError, programs::Programs};

/// A loaded program that can be attached to a cgroup.
#[derive(Debug)]
pub(super) enum LoadedSocketProgram {
    Address(CgroupSockAddr),
    Release(CgroupSock),
}

impl LoadedSocketProgram {
    /// Reuses the pinned program if its type, name and maps match; otherwise loads and pins the program.
    pub(super) fn open(programs: &mut Programs, which: &SocketProgram) -> Result<Self, DatapathError> {
        if which.hook == RELEASE_HOOK {
            programs.adopt_or_load(which.name).map(Self::Release)
        } else {
            programs.adopt_or_load(which.name).map(Self::Address)
        }
    }

    pub(super) fn fd(&self) -> Result<&ProgramFd, ProgramError> {
        match self {
            Self::Address(program) => program.fd(),
            Self::Release(program) => program.fd(),
        }
    }

    pub(super) fn info(&self) -> Result<ProgramInfo, ProgramError> {
        match self {
            Self::Address(program) => program.info(),
            Self::Release(program) => program.info(),
        }
    }

    /// Attaches the program by a BPF link. The attach mode has no effect on a link: programs of other software on the
    /// same hook also run.
    pub(super) fn attach(&mut self, cgroup: impl AsFd) -> Result<Result<FdLink, LinkError>, ProgramError> {
        let mode = CgroupAttachMode::Single;
        match self {
            Self::Address(program) => {
                let id = program.attach(cgroup, mode)?;
                program.take_link(id).map(FdLink::try_from)
            }
            Self::Release(program) => {
                let id = program.attach(cgroup, mode)?;
                program.take_link(id).map(FdLink::try_from)
            }
        }
    }
}
