// SPDX-License-Identifier: Apache-2.0
//! The little that must be known of an ELF file: the functions of a kernel object and their code.

use anyhow::{Context as _, Result, bail};

const SECTION_HEADER: usize = 64;
const SYMBOL: usize = 24;
const TYPE_SYMBOLS: u32 = 2;
const FLAG_EXECUTABLE: u64 = 4;
const KIND_FUNCTION: u8 = 2;

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
    content: &'a [u8],
}

/// The functions of a 64-bit little-endian ELF file, in the order of their names.
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
            let Some(section) = sections.get(usize::from(u16_at(symbol, 6)?)) else { continue };
            if symbol[4] & 0xf == KIND_FUNCTION && section.flags & FLAG_EXECUTABLE != 0 {
                let (address, size) = (u64_at(symbol, 8)?, usize::try_from(u64_at(symbol, 16)?)?);
                let offset = usize::try_from(address.saturating_sub(section.address))?;
                let code = section.content.get(offset..offset.saturating_add(size));
                functions.push(Function {
                    name: string_at(strings, u32_at(symbol, 0)? as usize)?,
                    section: string_at(names, section.name)?,
                    offset,
                    code: code.context("a function reaches beyond its section")?.to_vec(),
                });
            }
        }
    }
    functions.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(functions)
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
    use super::functions;

    #[test]
    fn our_own_binary_has_this_function() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let functions = functions(&own).unwrap();
        assert!(
            functions.iter().any(|f| f.name.contains("our_own_binary") && f.section == ".text" && !f.code.is_empty())
        );
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
