// SPDX-License-Identifier: Apache-2.0
//! Takes over from earlier agents whose maps this agent cannot use: maps of another ABI version, or maps with a
//! different maximum number of elements or with different flags.
//!
//! The agent first copies mappings, allowed sources, conntrack entries and socket reverse NAT entries into its own
//! maps, then attaches its programs. With TCX, this agent's programs are attached ahead of the earlier programs.
//! Without TCX, this agent's filters were added last, so the kernel runs them first. The earlier programs keep
//! translating packets of flows that are only in the earlier maps. [`Datapath::remove_predecessors`] completes the
//! takeover, after this agent has written all mappings and has attached its programs to all devices of the predecessors.
//! That function first detaches the earlier programs that translate requests, among them the XDP programs, and copies
//! the conntrack and socket reverse NAT entries that are new since the first copy. [`REPLY_WAIT`] later, the function
//! detaches the earlier programs that translate replies, and removes the earlier pins.
//!
//! [`Datapath::remove_predecessors`]: super::load::Datapath::remove_predecessors

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
    path::PathBuf,
    time::{Duration, Instant},
};

use aya::maps::{Array, HashMap, IterableMap as _, LpmTrie, Map, MapData, MapError};
use aya_obj::generated::BPF_NOEXIST;
use npl_common::{
    conntrack::REQUESTED_NS,
    flow::FlowState,
    former_names, host_connection,
    names::{ABI_VERSION, FLOW_TABLES_V4, FLOW_TABLES_V6, MAP_HOST_CONNECTION_V4, MAP_HOST_CONNECTION_V6},
};
use tracing::{info, warn};

use super::{
    attach::{detach_filter, hook, is_last},
    error::DatapathError,
    family::{FlowTable, Maps},
    layout::Layout,
    pins::{Direction, Pins, pin_error, remove_folder, unpin},
    sys,
    tables::{Tables, open},
};

use crate::core::{model::Protocol, pages};

/// The time for which the predecessors' programs keep translating replies after their programs for requests are
/// detached. Only the predecessors have half-open entries of requests that their programs have translated and that a
/// Pod has not answered yet. After this time, these entries have timed out.
const REPLY_WAIT: Duration = Duration::from_nanos(REQUESTED_NS);

/// The progress of a takeover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Takeover {
    /// Only this agent's programs translate requests. The predecessors' programs still translate replies until this
    /// time.
    AwaitsReplies {
        /// The time at which the predecessors can be removed.
        until: Instant,
    },
    /// The programs and pins of these ABI versions were removed.
    Complete(Vec<u32>),
}

/// A predecessor: an earlier agent's pinned maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Predecessor {
    abi: u32,
    /// The directory of the BPF file system in which the maps are pinned.
    maps: PathBuf,
}

/// Which entries of a predecessor's maps are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entries {
    /// Mappings, their allowed sources, conntrack entries and socket reverse NAT entries.
    All,
    /// Conntrack entries and socket reverse NAT entries.
    Flows,
}

impl Predecessor {
    /// All predecessors with pins on this Node: first the replaced maps of this ABI version, then the other ABI
    /// versions in descending order.
    pub(super) fn all(pins: &Pins) -> Result<Vec<Self>, DatapathError> {
        let same = Self { abi: ABI_VERSION, maps: pins.replaced_maps() };
        let mut found = Vec::new();
        if same.maps.is_dir() {
            found.push(same);
        }
        for other in pins.other_versions()? {
            found.push(Self { abi: other.abi(), maps: other.version().to_owned() });
        }
        Ok(found)
    }

    /// The path of the predecessor's map that corresponds to this agent's map `name`; `None` if the layout of the
    /// predecessor's map is unknown.
    fn map(&self, name: &str) -> Option<PathBuf> {
        match self.abi {
            ABI_VERSION => Some(self.maps.join(name)),
            1 => Some(self.maps.join(name_in_abi_1(name)?)),
            _ => None,
        }
    }

    /// Opens the predecessor's map that corresponds to this agent's map `name`. Returns `None` if the predecessor has
    /// no such map, or if the map's keys or values have different sizes than this agent's.
    fn open<T: TryFrom<Map, Error = MapError>>(&self, name: &'static str) -> Option<T> {
        let path = self.map(name).filter(|path| path.exists())?;
        let opened = MapData::from_pin(&path).and_then(Map::from_map_data).and_then(T::try_from);
        let warn = |error: &MapError| {
            warn!(
                see = pages::url(pages::ABI_UPGRADE),
                map = name,
                %error,
                "cannot open a map of an earlier agent, so the map's entries are not copied: open connections may \
                 have to reconnect"
            );
        };
        opened.inspect_err(warn).ok()
    }

    /// Converts the state in a predecessor's conntrack entry to the layout of this agent's programs.
    const fn state(&self, state: FlowState) -> FlowState {
        match self.abi {
            // In ABI 1, the bytes of this field contain an interface index, which must not become an acknowledgement
            // number.
            1 => FlowState { pod_acknowledgement: 0, ..state },
            _ => state,
        }
    }
}

/// The name that a map has in ABI 1, if the map's keys and values have the same layout in ABI 1 as in this ABI version;
/// `None` for other maps.
fn name_in_abi_1(name: &str) -> Option<&'static str> {
    former_names::ABI_1.iter().find(|(today, _)| *today == name).map(|(_, former)| *former)
}

/// Whether the elements of a map are copied from predecessors. A map whose elements are not copied begins empty.
pub(super) fn is_copied(name: &str) -> bool {
    // In ABI 1, one flow table contains the flows of all protocols, so the tables of UDP and SCTP have no name there.
    name_in_abi_1(name).is_some() || [FLOW_TABLES_V4, FLOW_TABLES_V6].as_flattened().contains(&name)
}

impl Tables {
    /// Copies those entries of all predecessors whose keys this agent's maps do not contain yet. Mappings are copied
    /// only if this agent's map of mappings is empty. Mappings in a map that is not empty are from an agent of this
    /// version, and are more current than those of predecessors.
    pub(super) fn copy_from_predecessors(&mut self, pins: &Pins, entries: Entries) -> Result<(), DatapathError> {
        if !pins.other_versions()?.is_empty() {
            forget_host_connections(pins)?;
        }
        for predecessor in Predecessor::all(pins)? {
            let mut copied = [0; 2];
            for family in crate::core::model::Family::ALL {
                let of_family = self.family_mut(family).copy_from(&predecessor, entries)?;
                copied = [0, 1].map(|kind: usize| copied[kind] + of_family[kind]);
            }
            let [mappings, flows] = copied;
            info!(abi = predecessor.abi, mappings, flows, "copied the entries of an earlier agent's maps");
        }
        Ok(())
    }
}

impl<L: Layout> Maps<L> {
    /// Copies those entries of a predecessor whose keys this agent's maps do not contain. Returns the numbers of copied
    /// mappings and conntrack entries.
    pub(super) fn copy_entries(&mut self, from: &Predecessor, entries: Entries) -> Result<[usize; 2], DatapathError> {
        let mut mappings = 0;
        if entries == Entries::All && self.mapping.keys().next().is_none() {
            // Allowed sources are copied first: a restricted mapping without allowed sources would drop all packets.
            if let Some(old) = from.open::<LpmTrie<_, L::Source, u32>>(L::ALLOW) {
                for (key, value) in old.iter().filter_map(Result::ok) {
                    self.allow.insert(&key, value, 0).map_err(DatapathError::map("write", L::ALLOW))?;
                }
            }
            mappings = copy(from.open(L::MAPPING).as_ref(), &mut self.mapping, L::MAPPING)?;
        }
        let flows = self.copy_flows(from)?;
        copy(from.open(L::SOCKET_RNAT).as_ref(), &mut self.socket_rnat, L::SOCKET_RNAT)?;
        Ok([mappings, flows])
    }

    /// Copies the conntrack entries of a predecessor to the tables of their protocols. In ABI 1, and in earlier builds
    /// of this ABI version, one table contains the flows of all protocols. Returns the number of copied entries.
    fn copy_flows(&mut self, from: &Predecessor) -> Result<usize, DatapathError> {
        let mut copied = 0;
        for old in L::FLOWS.into_iter().filter_map(|name| from.open::<HashMap<_, L::FlowKey, L::Flow>>(name)) {
            for (key, flow) in old.iter().filter_map(Result::ok) {
                let protocol = L::pod_endpoint(&key).protocol;
                let Some(index) = Protocol::ALL.iter().position(|it| it.number() == protocol) else { continue };
                let FlowTable { map, name, .. } = &mut self.flow_tables[index];
                let flow = L::with_state(&flow, from.state(*L::state(&flow)));
                copied += usize::from(insert_missing(map, name, key, flow)?);
            }
        }
        Ok(copied)
    }
}

/// Copies the elements of `from` whose keys are not in `to`. Elements for which `to` has no room are not copied.
/// Returns the number of copied elements.
fn copy<K: aya::Pod, V: aya::Pod>(
    from: Option<&HashMap<MapData, K, V>>,
    to: &mut HashMap<MapData, K, V>,
    name: &'static str,
) -> Result<usize, DatapathError> {
    let mut copied = 0;
    // Read errors are ignored, because the predecessor's programs may remove elements during the copy.
    for (key, value) in from.into_iter().flat_map(HashMap::iter).filter_map(Result::ok) {
        copied += usize::from(insert_missing(to, name, key, value)?);
    }
    Ok(copied)
}

/// Inserts an element unless the map has an element with this key, or has no room. Returns whether the element was
/// inserted.
fn insert_missing<K: aya::Pod, V: aya::Pod>(
    to: &mut HashMap<MapData, K, V>,
    name: &'static str,
    key: K,
    value: V,
) -> Result<bool, DatapathError> {
    match to.insert(key, value, BPF_NOEXIST.into()) {
        Ok(()) => Ok(true),
        Err(error) if is_present_or_full(&error) => Ok(false),
        Err(error) => Err(DatapathError::map("write", name)(error)),
    }
}

/// Clears the maps of host connections. If programs of another version ran ahead of this version's programs at egress,
/// this version's programs received translated replies, and wrongly recorded these replies as packets of the Node
/// itself.
fn forget_host_connections(pins: &Pins) -> Result<(), DatapathError> {
    let empty: Vec<(u32, u64)> = (0..host_connection::SLOTS).map(|slot| (slot, 0)).collect();
    for name in [MAP_HOST_CONNECTION_V4, MAP_HOST_CONNECTION_V6] {
        let map: Array<MapData, u64> = open(pins, name)?;
        let cleared = sys::update_all(map.map().fd().as_fd(), &empty);
        cleared.map_err(MapError::from).map_err(DatapathError::map("write", name))?;
    }
    Ok(())
}

fn is_present_or_full(error: &MapError) -> bool {
    let MapError::SyscallError(error) = error else { return false };
    matches!(error.io_error.raw_os_error(), Some(libc::EEXIST | libc::E2BIG | libc::ENOMEM))
}

/// Moves the pin of a map to [`Pins::replaced_maps`], so that this agent can create its own map of the same name, and
/// copy the elements.
pub(super) fn keep_for_copying(pins: &Pins, name: &str) -> Result<(), DatapathError> {
    let folder = pins.replaced_maps();
    fs::create_dir_all(&folder).map_err(|source| pin_error("create", &folder, source))?;
    let (from, to) = (pins.map(name), folder.join(name));
    // If an earlier agent was killed after it had moved a map, but before it had copied the elements, the moved map is
    // still at this path.
    unpin(&to)?;
    fs::rename(&from, &to).map_err(|source| pin_error("move", &from, source))
}

/// Renames the pins of maps for which earlier builds of this ABI version used a different name. The maps keep their
/// contents. Until this agent has replaced the programs of the earlier build, the programs of both builds use the same
/// maps.
pub(super) fn rename_pins(pins: &Pins) -> Result<(), DatapathError> {
    for (name, former) in former_names::ABI_2 {
        let from = pins.map(former);
        // After a rollback to an earlier build, the map with the former name and the map with the present name both
        // exist. The attached programs use the map with the former name, so this map replaces the map with the present
        // name.
        match fs::rename(&from, pins.map(name)) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(pin_error("rename", &from, source)),
            _ => {}
        }
    }
    Ok(())
}

/// The ifindex of every device with programs that use a predecessor's maps. Programs of this ABI version are included
/// if this agent has moved their maps to copy the elements: until this agent replaces these programs, they use the
/// moved maps.
pub(super) fn devices(pins: &Pins) -> Result<BTreeSet<u32>, DatapathError> {
    let mut devices = BTreeSet::new();
    let mut add = |pins: &Pins| -> Result<(), DatapathError> {
        devices.extend(pins.links()?.into_iter().map(|(ifindex, _)| ifindex));
        devices.extend(pins.xdp_links()?);
        Ok(())
    };
    for other in pins.other_versions()? {
        add(&other)?;
    }
    if pins.replaced_maps().is_dir() {
        add(pins)?;
    }
    Ok(devices)
}

/// Detaches the predecessors' programs that translate requests, and then copies the predecessors' conntrack and socket
/// reverse NAT entries for the last time: from now on, the predecessors add no entries. Returns when the predecessors'
/// other programs can be detached.
pub(super) fn take_requests(pins: &Pins, tables: &mut Tables, now: Instant) -> Result<Instant, DatapathError> {
    let others = pins.other_versions()?;
    for other in &others {
        for ifindex in other.xdp_links()? {
            unpin(&other.xdp_link(ifindex))?;
        }
        for (ifindex, direction) in of_requests(&other.links()?) {
            detach_hook(other, ifindex, direction)?;
        }
    }
    tables.copy_from_predecessors(pins, Entries::Flows)?;
    Ok(if others.is_empty() { now } else { now + REPLY_WAIT })
}

/// The hooks of those programs in `links` that translate requests: the ingress hooks of uplinks. Only an uplink has a
/// program at egress. The ingress program of any other device, which leads to Pods, translates replies.
fn of_requests(links: &[(u32, Direction)]) -> Vec<(u32, Direction)> {
    let is_uplink = |ifindex| links.contains(&(ifindex, Direction::Egress));
    let is_of_requests =
        |(ifindex, direction): &&(u32, Direction)| *direction == Direction::Ingress && is_uplink(*ifindex);
    links.iter().filter(is_of_requests).copied().collect()
}

/// Detaches the predecessors' programs and removes their pins. Returns the ABI versions that were removed.
pub(super) fn remove(pins: &Pins) -> Result<Vec<u32>, DatapathError> {
    let others = pins.other_versions()?;
    for other in &others {
        detach(pins, other)?;
        remove_folder(other.version())?;
    }
    remove_folder(&pins.replaced_maps())?;
    Ok(others.iter().map(Pins::abi).collect())
}

/// Returns whether a program of another ABI version runs ahead of this agent's program on a hook, for example after a
/// rollback. If a program of another version runs ahead, the caller must create this agent's link again. Otherwise,
/// this agent's program at egress would receive replies that the other version has already translated. The program
/// would take these replies for packets of the Node itself, and would record host connections.
pub(super) fn is_ahead_of(
    pins: &Pins,
    own: &OwnedFd,
    (ifindex, direction): (u32, Direction),
) -> Result<bool, DatapathError> {
    let others = pins.other_versions()?;
    if others.is_empty() || is_last(direction) {
        return Ok(false);
    }
    let program = |link: &OwnedFd| sys::link_facts(link.as_fd()).map(|facts| facts.program).ok();
    let of_others = others.iter().filter_map(|other| sys::open_pin(&other.link(ifindex, direction)).ok());
    let of_others: Vec<u32> = of_others.filter_map(|link| program(&link)).collect();
    // If the kernel cannot list the programs, the function returns false, and the order of the programs does not
    // change.
    let order = sys::programs_on(ifindex, hook(direction)).unwrap_or_default();
    let own = program(own);
    let before_own = order.iter().take_while(|id| Some(**id) != own);
    Ok(before_own.into_iter().any(|id| of_others.contains(id)))
}

/// Removes the links and filters of another ABI version.
fn detach(pins: &Pins, other: &Pins) -> Result<(), DatapathError> {
    for (ifindex, direction) in other.links()? {
        detach_hook(other, ifindex, direction)?;
    }
    for ifindex in other.clsact_marks()? {
        // The clsact qdisc now contains this agent's filters. This agent records that NPL created the qdisc, so that
        // `npl-agent cleanup` removes the qdisc.
        let mark = pins.clsact_mark(ifindex);
        fs::create_dir_all(&mark).map_err(|source| pin_error("create", &mark, source))?;
    }
    Ok(())
}

/// Removes the link or the filter of another ABI version on one hook.
fn detach_hook(other: &Pins, ifindex: u32, direction: Direction) -> Result<(), DatapathError> {
    let pin = other.link(ifindex, direction);
    if pin.is_dir()
        && let Ok(name) = nix::net::if_::if_indextoname(ifindex)
    {
        detach_filter(&name.to_string_lossy(), direction, other.abi());
    }
    unpin(&pin)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use npl_common::{
        flow::FlowState,
        former_names,
        names::{ABI_VERSION, MAP_FLOW_V4, MAP_HALF_OPEN_V4, MAP_MAPPING_V6},
    };

    use super::{Direction, Predecessor, of_requests};

    fn predecessor(abi: u32) -> Predecessor {
        Predecessor { abi, maps: "/maps".into() }
    }

    #[test]
    fn maps_of_known_layouts_are_found_by_their_names() {
        let path = |abi, name| predecessor(abi).map(name);
        let former = former_names::ABI_1.iter().find(|(today, _)| *today == MAP_MAPPING_V6).unwrap().1;
        assert_ne!(former, MAP_MAPPING_V6);
        assert_eq!(path(1, MAP_MAPPING_V6), Some(Path::new("/maps").join(former)));
        assert_eq!(path(1, MAP_HALF_OPEN_V4), None, "the half-open cache of ABI 1 has another layout");
        assert_eq!(path(ABI_VERSION, MAP_FLOW_V4), Some(Path::new("/maps").join(MAP_FLOW_V4)));
        assert_eq!(path(ABI_VERSION + 1, MAP_FLOW_V4), None, "a later version may have changed the layout");
    }

    #[test]
    fn ingress_programs_of_uplinks_translate_requests_and_those_of_pods_replies() {
        let uplink = [(2, Direction::Ingress), (2, Direction::Egress)];
        let pod = [(7, Direction::Ingress), (7, Direction::ToPods)];
        assert_eq!(of_requests(&[uplink, pod].concat()), [(2, Direction::Ingress)]);
    }

    /// The log must not say that a map's elements are copied unless [`super::Maps::copy_entries`] copies them.
    #[test]
    fn only_maps_that_are_copied_are_logged_as_copied() {
        use crate::datapath::layout::{Layout, V4, V6};
        fn copied<L: Layout>() -> Vec<&'static str> {
            [&[L::ALLOW, L::MAPPING, L::SOCKET_RNAT][..], &L::FLOWS].concat()
        }
        let expected = [copied::<V4>(), copied::<V6>()].concat();
        for name in npl_common::names::PINNED_MAPS {
            assert_eq!(super::is_copied(name), expected.contains(name), "{name}");
        }
    }

    #[test]
    fn an_interface_index_of_abi_1_does_not_become_an_acknowledgement_number() {
        let state = FlowState {
            last_seen_ns: 1,
            generation: 2,
            refreshed: 3,
            pod_acknowledgement: 4,
            node_port: 5,
            client_tcp_flags: 6,
            pod_tcp_flags: 7,
        };
        assert_eq!(predecessor(1).state(state), FlowState { pod_acknowledgement: 0, ..state });
        assert_eq!(predecessor(ABI_VERSION).state(state), state);
    }
}
