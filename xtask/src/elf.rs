// SPDX-License-Identifier: Apache-2.0
//! The little that must be known of an ELF file: the functions of a kernel object and their code.

use anyhow::{Context as _, Result, bail};

const SECTION_HEADER: usize = 64;
const SYMBOL: usize = 24;
const RELOCATION: usize = 16;
const TYPE_SYMBOLS: u32 = 2;
const TYPE_RELOCATIONS: u32 = 9;
const FLAG_EXECUTABLE: u64 = 4;
const KIND_FUNCTION: u8 = 2;
/// Bytes of an instruction of the kernel's virtual machine, and the first of one that calls.
pub(crate) const INSTRUCTION: usize = 8;
pub(crate) const CALL: u8 = 0x85;

/// A program or subprogram of a kernel object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) section: String,
    /// Where it begins in its section.
    pub(crate) offset: usize,
    pub(crate) code: Vec<u8>,
}

struct Section<'a> {
    name: usize,
    kind: u32,
    flags: u64,
    address: u64,
    link: usize,
    /// Of relocations, the section that they are about.
    about: usize,
    content: &'a [u8],
}

/// The functions of a 64-bit little-endian ELF file, in the order of their names. What is left to the loader of their calls
/// of each other is done: of functions that other files might call too, the linker leaves all of it.
pub(crate) fn functions(elf: &[u8]) -> Result<Vec<Function>> {
    if elf.get(..6) != Some(b"\x7fELF\x02\x01") {
        bail!("it is not a 64-bit little-endian ELF file");
    }
    let sections = sections(elf)?;
    let names = sections.get(usize::from(u16_at(elf, 62)?)).context("its section names are missing")?.content;
    let mut functions = Vec::new();
    for table in sections.iter().filter(|section| section.kind == TYPE_SYMBOLS) {
        let strings = sections.get(table.link).context("its symbol names are missing")?.content;
        for symbol in table.content.chunks_exact(SYMBOL) {
            let place = usize::from(u16_at(symbol, 6)?);
            let Some(section) = sections.get(place) else { continue };
            if symbol[4] & 0xf == KIND_FUNCTION && section.flags & FLAG_EXECUTABLE != 0 {
                let (address, size) = (u64_at(symbol, 8)?, usize::try_from(u64_at(symbol, 16)?)?);
                let offset = usize::try_from(address.saturating_sub(section.address))?;
                let code = section.content.get(offset..offset.saturating_add(size));
                let mut code = code.context("a function reaches beyond its section")?.to_vec();
                for relocations in sections.iter().filter(|it| it.kind == TYPE_RELOCATIONS && it.about == place) {
                    link_calls(&mut code, offset, place, relocations, table)?;
                }
                functions.push(Function {
                    name: string_at(strings, u32_at(symbol, 0)? as usize)?,
                    section: string_at(names, section.name)?,
                    offset,
                    code,
                });
            }
        }
    }
    functions.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(functions)
}

/// Makes calls of functions that have a name of those that stand in the code which begins at `offset` of section `place`:
/// counted in instructions, from the call in the same section, and from the section's beginning elsewhere.
fn link_calls(
    code: &mut [u8],
    offset: usize,
    place: usize,
    relocations: &Section<'_>,
    symbols: &Section<'_>,
) -> Result<()> {
    for relocation in relocations.content.chunks_exact(RELOCATION) {
        let at = usize::try_from(u64_at(relocation, 0)?)?;
        let index = u32_at(relocation, 12)? as usize;
        let symbol = symbols.content.get(index * SYMBOL..).context("a relocation names no symbol")?;
        let Some(call) = at.checked_sub(offset).and_then(|at| code.get_mut(at..)?.get_mut(..INSTRUCTION)) else {
            continue;
        };
        if symbol.len() < SYMBOL || symbol[4] & 0xf != KIND_FUNCTION || call[0] != CALL {
            continue;
        }
        let is_beside = usize::from(u16_at(symbol, 6)?) == place;
        let from = if is_beside { i64::try_from(at)? } else { 0 };
        let distance = (i64::try_from(u64_at(symbol, 8)?)? - from) / i64::try_from(INSTRUCTION)? - 1;
        call[4..].copy_from_slice(&i32::try_from(distance)?.to_le_bytes());
    }
    Ok(())
}

fn sections(elf: &[u8]) -> Result<Vec<Section<'_>>> {
    let start = usize::try_from(u64_at(elf, 40)?)?;
    let count = usize::from(u16_at(elf, 60)?);
    (0..count).map(|index| section(elf, start.saturating_add(index * SECTION_HEADER))).collect()
}

fn section(elf: &[u8], header: usize) -> Result<Section<'_>> {
    const NO_CONTENT: u32 = 8;
    let kind = u32_at(elf, header + 4)?;
    let (offset, size) = (usize::try_from(u64_at(elf, header + 24)?)?, usize::try_from(u64_at(elf, header + 32)?)?);
    let content = if kind == NO_CONTENT { Some(&[][..]) } else { elf.get(offset..offset.saturating_add(size)) };
    Ok(Section {
        name: u32_at(elf, header)? as usize,
        kind,
        flags: u64_at(elf, header + 8)?,
        address: u64_at(elf, header + 16)?,
        link: u32_at(elf, header + 40)? as usize,
        about: u32_at(elf, header + 44)? as usize,
        content: content.context("a section reaches beyond its end")?,
    })
}

fn bytes_at<const N: usize>(bytes: &[u8], offset: usize) -> Result<[u8; N]> {
    let slice = bytes.get(offset..offset.saturating_add(N)).context("it is cut short")?;
    Ok(slice.try_into()?)
}

fn u16_at(bytes: &[u8], offset: usize) -> Result<u16> {
    Ok(u16::from_le_bytes(bytes_at(bytes, offset)?))
}

fn u32_at(bytes: &[u8], offset: usize) -> Result<u32> {
    Ok(u32::from_le_bytes(bytes_at(bytes, offset)?))
}

fn u64_at(bytes: &[u8], offset: usize) -> Result<u64> {
    Ok(u64::from_le_bytes(bytes_at(bytes, offset)?))
}

fn string_at(strings: &[u8], offset: usize) -> Result<String> {
    let rest = strings.get(offset..).context("a name lies beyond the names")?;
    let end = rest.iter().position(|byte| *byte == 0).context("a name has no end")?;
    Ok(String::from_utf8_lossy(&rest[..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::{CALL, KIND_FUNCTION, Section, functions, link_calls};

    #[test]
    fn our_own_binary_has_this_function() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let functions = functions(&own).unwrap();
        assert!(
            functions.iter().any(|f| f.name.contains("our_own_binary") && f.section == ".text" && !f.code.is_empty())
        );
    }

    /// The one function of the symbols stands at 16 in section 2.
    #[test]
    fn calls_by_name_are_counted_from_the_call_or_from_the_beginning_of_another_section() {
        let mut symbols = vec![0; 48];
        (symbols[28], symbols[30], symbols[32]) = (KIND_FUNCTION, 2, 16);
        let call = [CALL, 0x10, 0, 0, 0xff, 0xff, 0xff, 0xff];
        let relocation = [40, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 1, 0, 0, 0];
        let section = |content| Section { name: 0, kind: 0, flags: 0, address: 0, link: 0, about: 0, content };
        for (place, distance) in [(2, -4), (3, 1_i32)] {
            let mut code = [[0; 8], call, [0; 8]].concat();
            link_calls(&mut code, 32, place, &section(&relocation), &section(&symbols)).unwrap();
            assert_eq!(code[12..16], distance.to_le_bytes(), "from section {place}");
        }
        // Of another function's code it is none.
        let mut code = call.to_vec();
        link_calls(&mut code, 64, 2, &section(&relocation), &section(&symbols)).unwrap();
        assert_eq!(code, call);
    }

    #[test]
    fn what_is_no_elf_file_or_is_cut_short_is_refused() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(functions(b"#!/bin/sh").is_err());
        for end in [0, 5, 40, 63, 64, own.len() / 2, own.len() - 60] {
            assert!(functions(&own[..end]).is_err(), "{end}");
        }
    }
}
