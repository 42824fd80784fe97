// SPDX-License-Identifier: Apache-2.0
//! Empties BPF maps of the types that NPL uses, and counts their elements.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;

use anyhow::{Context, Result, bail};
use aya::maps::{MapData, MapType};

use crate::bpf::{self, instruction};
use crate::test_run;

const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_DELETE_ELEM: libc::c_int = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_int = 4;

/// The leading fields of `union bpf_attr` for the commands on one element.
#[repr(C)]
struct Element {
    map: u32,
    pad: u32,
    key: u64,
    next_key_or_value: u64,
    flags: u64,
}

/// The maximum number of elements to remove or count, far more than maps of tests contain. Without this limit, the loop
/// would never end while another process changes the map.
const MOST_ELEMENTS: usize = 1 << 20;

/// The number of array elements that one run of the program clears. The verifier checks every iteration, so loading the
/// program would take long with a larger number.
const ELEMENTS_A_RUN: u32 = 32;

/// The frame of the program's test run; its content is irrelevant.
const FRAME: [u8; 64] = [0; 64];

/// Removes all elements of a pinned map, or sets them to zero in maps whose elements cannot be removed. Program arrays
/// and ring buffers stay unchanged: the reader of a ring buffer discards earlier records.
///
/// # Errors
///
/// Returns an error if no map is pinned at `pin`, or if the map has an unsupported type.
pub fn empty(pin: &Path) -> Result<()> {
    let map = MapData::from_pin(pin).with_context(|| format!("open {}", pin.display()))?;
    let info = map.info().context("read the map's properties")?;
    let fd = map.fd().as_fd().as_raw_fd();
    let kind = info.map_type().context("read the map's type")?;
    let emptied = if matches!(kind, MapType::Hash | MapType::LruHash | MapType::LpmTrie) {
        remove_all(fd, usize::try_from(info.key_size())?)
    } else if matches!(kind, MapType::Array) {
        set_to_zero(fd, info.max_entries(), i16::try_from(info.value_size())?)
    } else if matches!(kind, MapType::PerCpuArray) {
        set_to_zero_everywhere(fd, info.max_entries(), usize::try_from(info.value_size())?)
    } else if matches!(kind, MapType::ProgramArray | MapType::RingBuf) {
        Ok(())
    } else {
        bail!("{} has the unsupported map type {kind:?}", pin.display())
    };
    emptied.with_context(|| format!("empty {}", pin.display()))
}

/// Removes all elements. Reads the key of the next element before it removes an element. For the successor of a removed
/// key, the kernel would return the first key of the table. To find the first key, the kernel searches all empty
/// buckets before this key, which would take quadratic time for a large table.
fn remove_all(map: i32, key_size: usize) -> io::Result<()> {
    let map = map.cast_unsigned();
    let (mut first, mut second) = (vec![0_u8; key_size], vec![0_u8; key_size]);
    // The addresses of two keys: an element, and its successor.
    let (mut current, mut next) = (first.as_mut_ptr() as u64, second.as_mut_ptr() as u64);
    let has_successor = |key: u64, next_key_or_value: u64| {
        let mut element = Element { map, pad: 0, key, next_key_or_value, flags: 0 };
        match bpf::call(BPF_MAP_GET_NEXT_KEY, &mut element) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            found => found.map(|_| true),
        }
    };
    // Without a key, the kernel returns the key of the first element.
    let mut is_element = has_successor(0, current)?;
    for _ in 0..MOST_ELEMENTS {
        if !is_element {
            return Ok(());
        }
        is_element = has_successor(current, next)?;
        bpf::call(BPF_MAP_DELETE_ELEM, &mut Element { map, pad: 0, key: current, next_key_or_value: 0, flags: 0 })?;
        std::mem::swap(&mut current, &mut next);
    }
    Err(io::Error::other("another process is filling the map"))
}

/// Returns the number of elements in use of a pinned map: all elements of a hash map or trie, and the elements of an
/// array that are not zero on every processor.
///
/// # Errors
///
/// Returns an error if no map is pinned at `pin`, or if the map has an unsupported type.
pub fn used_elements(pin: &Path) -> Result<usize> {
    let map = MapData::from_pin(pin).with_context(|| format!("open {}", pin.display()))?;
    let info = map.info().context("read the map's properties")?;
    let fd = map.fd().as_fd().as_raw_fd();
    let kind = info.map_type().context("read the map's type")?;
    let value_size = usize::try_from(info.value_size())?;
    let counted = if matches!(kind, MapType::Hash | MapType::LruHash | MapType::LpmTrie) {
        count_keys(fd, usize::try_from(info.key_size())?)
    } else if matches!(kind, MapType::Array) {
        count_non_zero(fd, info.max_entries(), value_size)
    } else if matches!(kind, MapType::PerCpuArray) {
        let processors = aya::util::nr_cpus().map_err(|(_, error)| error).context("count the processors")?;
        count_non_zero(fd, info.max_entries(), value_size.next_multiple_of(8) * processors)
    } else {
        bail!("{} has the unsupported map type {kind:?}", pin.display())
    };
    counted.with_context(|| format!("count the elements of {}", pin.display()))
}

fn count_keys(map: i32, key_size: usize) -> io::Result<usize> {
    let map = map.cast_unsigned();
    let (mut key, mut next) = (vec![0_u8; key_size], vec![0_u8; key_size]);
    // Without a key, the kernel returns the key of the first element.
    let mut current = 0;
    for count in 0..MOST_ELEMENTS {
        let mut element = Element { map, pad: 0, key: current, next_key_or_value: next.as_mut_ptr() as u64, flags: 0 };
        match bpf::call(BPF_MAP_GET_NEXT_KEY, &mut element) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(count),
            found => found.map(drop)?,
        }
        std::mem::swap(&mut key, &mut next);
        current = key.as_mut_ptr() as u64;
    }
    Err(io::Error::other("another process is changing the map"))
}

fn count_non_zero(map: i32, elements: u32, value_size: usize) -> io::Result<usize> {
    let mut value = vec![0_u8; value_size];
    let (map, next_key_or_value) = (map.cast_unsigned(), value.as_mut_ptr() as u64);
    let mut count = 0;
    for mut index in 0..elements {
        let key = std::ptr::from_mut(&mut index) as u64;
        bpf::call(BPF_MAP_LOOKUP_ELEM, &mut Element { map, pad: 0, key, next_key_or_value, flags: 0 })?;
        count += usize::from(value.iter().any(|byte| *byte != 0));
    }
    Ok(count)
}

fn set_to_zero_everywhere(map: i32, elements: u32, value_size: usize) -> io::Result<()> {
    let processors = aya::util::nr_cpus().map_err(|(_, error)| error)?;
    let mut values = vec![0_u8; value_size.next_multiple_of(8) * processors];
    let (map, value) = (map.cast_unsigned(), values.as_mut_ptr() as u64);
    (0..elements).try_for_each(|mut index| {
        let key = std::ptr::from_mut(&mut index) as u64;
        bpf::call(BPF_MAP_UPDATE_ELEM, &mut Element { map, pad: 0, key, next_key_or_value: value, flags: 0 }).map(drop)
    })
}

/// Clears the elements with a BPF program. One system call per element, or the batch command, would be about 100 times
/// slower.
fn set_to_zero(map: i32, elements: u32, value_size: i16) -> io::Result<()> {
    let instructions = program_that_zeroes(map, value_size);
    let program = bpf::load_classifier(&instructions)?;
    let options = test_run::Options { repeat: elements.div_ceil(ELEMENTS_A_RUN), ..test_run::Options::default() };
    test_run::run(program.as_fd(), &FRAME, &options).map(drop)
}

/// Returns a TC program that sets some consecutive elements to zero each time it runs. The packet's mark is the index
/// of the first of these elements; the program advances the mark for its next run.
fn program_that_zeroes(map: i32, value_size: i16) -> Vec<u64> {
    const MARK: i16 = 8;
    const LOOKUP: i32 = 1;
    /// The value of a 64-bit load instruction's source register that marks the constant as a map's descriptor
    /// (`BPF_PSEUDO_MAP_FD`).
    const MAP: u8 = 1;
    let (r0, r1, r2, packet, element, count, frame) = (0, 1, 2, 9, 6, 7, 10);
    let mut program = vec![
        instruction(0xbf, packet, r1, 0, 0),
        instruction(0x61, element, r1, MARK, 0),
        instruction(0xb7, count, 0, 0, 0),
    ];
    let start_of_loop = program.len();
    program.extend([
        instruction(0x63, frame, element, -4, 0),
        instruction(0xbf, r2, frame, 0, 0),
        instruction(0x07, r2, 0, 0, -4),
        instruction(0x18, r1, MAP, 0, map),
        instruction(0, 0, 0, 0, 0),
        instruction(0x85, 0, 0, 0, LOOKUP),
    ]);
    let stores: Vec<u64> = (0..value_size / 8)
        .map(|word| instruction(0x7a, r0, 0, word * 8, 0))
        .chain((value_size / 8 * 8..value_size).map(|byte| instruction(0x72, r0, 0, byte, 0)))
        .collect();
    let end_of_loop = i16::try_from(stores.len()).unwrap_or(i16::MAX) + 3;
    // If the lookup fails, the index is beyond the last element, so the program ends.
    program.push(instruction(0x15, r0, 0, end_of_loop, 0));
    program.extend(stores);
    program.extend([instruction(0x07, element, 0, 0, 1), instruction(0x07, count, 0, 0, 1)]);
    let back = i16::try_from(program.len() + 1 - start_of_loop).unwrap_or(i16::MAX);
    program.extend([
        instruction(0xa5, count, 0, -back, ELEMENTS_A_RUN.cast_signed()),
        instruction(0x63, packet, element, MARK, 0),
        instruction(0xb7, r0, 0, 0, 0),
        instruction(0x95, 0, 0, 0, 0),
    ]);
    program
}
