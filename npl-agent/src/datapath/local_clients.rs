// SPDX-License-Identifier: Apache-2.0
//! Attaches the socket programs, which serve clients on the Node itself and in its Pods, to a cgroup.
//!
//! Each program has a pinned BPF link, in which the program of a later build replaces the program of an earlier build.
//! Programs of other software on the same hooks also run.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
};

use aya::programs::ProgramError;
use npl_common::{
    config::Config,
    names::{SOCKET_PROGRAMS, SocketProgram},
};

use super::{
    attach::{Hooks, Replaced, failed},
    cgroup::{self, CgroupSelection, ClientScope},
    error::DatapathError,
    load::Datapath,
    pins::{pin_error, unpin},
    socket_program::LoadedSocketProgram,
    sys,
};
use crate::core::repairs::RepairedObject;

/// The local clients that are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedClients {
    /// The directory of the selected cgroup. Processes in this cgroup and its descendants are served.
    pub cgroup: PathBuf,
    /// Whether local clients can also reach node ports by loopback addresses, which requires Linux 5.14.
    pub has_loopback: bool,
}

/// The open directory of a cgroup.
struct Cgroup<'a> {
    path: &'a Path,
    folder: File,
    id: u64,
}

impl Datapath {
    /// Attaches the socket programs to the selected cgroup and detaches them from all other cgroups. Returns `None` if
    /// no local clients are selected.
    ///
    /// The caller must be in the Node's network namespace, because the programs translate loopback addresses only in
    /// the network namespace of the caller.
    ///
    /// # Errors
    ///
    /// If the cgroup does not exist, the kernel rejects an attachment, or the kernel has no network namespace cookies
    /// and `scope` is [`ClientScope::Host`]. After an error, the programs that an earlier agent attached stay attached.
    pub fn serve_local_clients(
        &mut self,
        selection: &CgroupSelection,
        scope: ClientScope,
    ) -> Result<Option<ServedClients>, DatapathError> {
        let Some(path) = cgroup::locate(selection)? else {
            return self.hooks.leave_cgroups(None).map(|()| None);
        };
        let netns_cookie = sys::netns_cookie();
        let is_restricted = scope == ClientScope::Host;
        if is_restricted && netns_cookie.is_none() {
            return Err(DatapathError::NoNetnsCookie);
        }
        self.tables.change_config(|old| Config {
            netns_cookie: netns_cookie.unwrap_or_default(),
            ..old.with_host_clients_only(is_restricted)
        })?;
        let attached = self.hooks.attach_cgroup(&path);
        // This call frees the memory of the loader, but unpins no program, because programs of other builds may still
        // be attached to devices.
        self.hooks.programs.release_unused(true)?;
        attached?;
        Ok(Some(ServedClients { cgroup: path, has_loopback: netns_cookie.is_some() }))
    }
}

/// Makes `program` the program of the link, if the link has a different program.
fn replace(link: &OwnedFd, program: &LoadedSocketProgram, cgroup: u64) -> Result<Replaced, ProgramError> {
    let facts = sys::link_facts(link.as_fd()).map_err(failed("bpf_link_get_info"))?;
    if !facts.is_of_cgroup(cgroup) {
        return Ok(Replaced::No);
    }
    // The link is updated only if its program differs, because each update takes the kernel's global cgroup lock.
    if facts.program == program.info()?.id() {
        return Ok(Replaced::Unchanged);
    }
    let is_updated = sys::replace_program(link.as_fd(), program.fd()?.as_fd()).is_ok();
    Ok(if is_updated { Replaced::Updated } else { Replaced::No })
}

impl Hooks {
    /// Attaches the programs to a cgroup, and detaches them from all other cgroups.
    fn attach_cgroup(&mut self, path: &Path) -> Result<(), DatapathError> {
        let open = |source| DatapathError::OpenCgroup { path: path.to_owned(), source };
        let folder = File::open(path).map_err(open)?;
        let id = folder.metadata().map_err(open)?.ino();
        let cgroup = Cgroup { path, folder, id };
        for which in SOCKET_PROGRAMS {
            self.attach_to_sockets(which, &cgroup)?;
        }
        self.leave_cgroups(Some(id))
    }

    fn attach_to_sockets(&mut self, which: &SocketProgram, cgroup: &Cgroup<'_>) -> Result<(), DatapathError> {
        let name = which.name;
        let refused = |source| {
            let (cgroup, source) = (cgroup.path.to_owned(), Box::new(source));
            DatapathError::AttachCgroup { program: name, cgroup, source }
        };
        let program = self.programs.load_socket_program(which)?;
        let pin = self.pins.socket_link(cgroup.id, which.hook);
        match sys::open_pin(&pin) {
            Ok(link) => {
                let replaced = replace(&link, program, cgroup.id).map_err(refused)?;
                if replaced != Replaced::No {
                    self.record_socket_program(which, cgroup, replaced == Replaced::Unchanged);
                    return Ok(());
                }
                // A link that `replace` does not accept, for example because its cgroup was removed, is replaced by a
                // new link.
                unpin(&pin)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(pin_error("open", &pin, error)),
        }
        let interface = cgroup.path.display().to_string();
        let link = program.attach(&cgroup.folder).map_err(refused)?.map_err(|source| DatapathError::Link {
            operation: "take",
            program: name,
            interface,
            source,
        })?;
        link.pin(&pin).map(drop).map_err(|error| pin_error("pin link", &pin, io::Error::other(error)))?;
        self.record_socket_program(which, cgroup, false);
        Ok(())
    }

    fn record_socket_program(&mut self, which: &SocketProgram, cgroup: &Cgroup<'_>, was_intact: bool) {
        let is_known = !self.own.sockets.insert((cgroup.id, which.hook));
        if is_known && !was_intact {
            self.repairs
                .record(RepairedObject::CgroupLink, format_args!("{} of {}", which.name, cgroup.path.display()));
        }
    }

    /// Detaches the socket programs from every cgroup except the one with the inode number `keep`.
    fn leave_cgroups(&mut self, keep: Option<u64>) -> Result<(), DatapathError> {
        self.own.sockets.retain(|(cgroup, _)| Some(*cgroup) == keep);
        let others = self.pins.socket_links()?.into_iter().filter(|(cgroup, _)| Some(*cgroup) != keep);
        // Programs are detached in the reverse order of attaching. A program for replies shows clients the address to
        // which they connected, so this program must stay attached as long as programs that translate requests.
        others.rev().try_for_each(|(cgroup, hook)| unpin(&self.pins.socket_link(cgroup, hook)))
    }
}
