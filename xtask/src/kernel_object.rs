// SPDX-License-Identifier: Apache-2.0
//! Reads the functions of a kernel object: their names, sections and code.

use anyhow::{Context as _, Result};
use object::read::elf::{ElfFile64, ElfSection64, ElfSymbol64};
use object::{
    LittleEndian, Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SectionFlags, SymbolKind, elf,
};

/// The size of a BPF instruction in bytes.
pub(crate) const INSTRUCTION: usize = 8;
/// The operation code of BPF's call instruction.
pub(crate) const CALL: u8 = 0x85;

/// A program of a kernel object, or a function that programs call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) section: String,
    /// The offset of the function's first byte in its section.
    pub(crate) offset: usize,
    pub(crate) code: Vec<u8>,
}

type Section<'a> = ElfSection64<'a, 'a, LittleEndian>;
type Symbol<'a> = ElfSymbol64<'a, 'a, LittleEndian>;

/// Returns the functions of a 64-bit little-endian ELF file, sorted by name.
///
/// Also resolves calls of global functions, because the linker leaves their relocation to the loader.
pub(crate) fn functions(file: &[u8]) -> Result<Vec<Function>> {
    let file = ElfFile64::<LittleEndian>::parse(file).context("read the object as a 64-bit little-endian ELF file")?;
    let mut functions = Vec::new();
    for symbol in file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text) {
        let Some(index) = symbol.section_index() else { continue };
        let section = file.section_by_index(index).context("find the section of a function")?;
        if is_executable(&section) {
            functions.push(function(&file, &section, &symbol)?);
        }
    }
    functions.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(functions)
}

fn is_executable(section: &Section<'_>) -> bool {
    matches!(section.flags(), SectionFlags::Elf { sh_flags } if sh_flags & u64::from(elf::SHF_EXECINSTR) != 0)
}

fn function(file: &ElfFile64<'_, LittleEndian>, section: &Section<'_>, symbol: &Symbol<'_>) -> Result<Function> {
    let name = symbol.name().context("read the name of a function")?.to_owned();
    let offset = usize::try_from(symbol.address().saturating_sub(section.address()))?;
    let end = offset.saturating_add(usize::try_from(symbol.size())?);
    let content = section.data().with_context(|| format!("read the section of {name}"))?;
    let mut code = content.get(offset..end).with_context(|| format!("{name} reaches beyond its section"))?.to_vec();
    for (at, relocation) in section.relocations() {
        let RelocationTarget::Symbol(index) = relocation.target() else { continue };
        let callee = file.symbol_by_index(index).context("find the symbol of a relocation")?;
        let Some(start) = usize::try_from(at)?.checked_sub(offset) else { continue };
        let Some(call) = code.get_mut(start..).and_then(|it| it.get_mut(..INSTRUCTION)) else { continue };
        if callee.kind() == SymbolKind::Text && call[0] == CALL {
            // The distance counts from the call, if the called function is in the same section; otherwise from the
            // beginning of the called function's section.
            let from = if callee.section_index() == Some(section.index()) { i64::try_from(at)? } else { 0 };
            let distance = (i64::try_from(callee.address())? - from) / i64::try_from(INSTRUCTION)? - 1;
            call[4..].copy_from_slice(&i32::try_from(distance)?.to_le_bytes());
        }
    }
    let section = section.name().with_context(|| format!("read the name of the section of {name}"))?.to_owned();
    Ok(Function { name, section, offset, code })
}

#[cfg(test)]
mod tests {
    use object::write::{Object, Relocation, SectionId, Symbol, SymbolId, SymbolSection};
    use object::{
        Architecture, BinaryFormat, Endianness, RelocationFlags, SectionKind, SymbolFlags, SymbolKind, SymbolScope, elf,
    };

    use super::{CALL, INSTRUCTION, functions};

    #[test]
    fn this_function_is_found_in_the_test_binary() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let functions = functions(&own).unwrap();
        assert!(
            functions.iter().any(|f| f.name.contains("this_function") && f.section == ".text" && !f.code.is_empty())
        );
    }

    const EXIT: [u8; INSTRUCTION] = [0x95, 0, 0, 0, 0, 0, 0, 0];
    const UNRESOLVED: [u8; INSTRUCTION] = [CALL, 0x10, 0, 0, 0xff, 0xff, 0xff, 0xff];

    fn add_function(object: &mut Object<'_>, section: SectionId, name: &str, code: &[u8]) -> SymbolId {
        let value = object.append_section_data(section, code, 8);
        object.add_symbol(Symbol {
            name: name.into(),
            value,
            size: code.len() as u64,
            kind: SymbolKind::Text,
            scope: SymbolScope::Linkage,
            weak: false,
            section: SymbolSection::Section(section),
            flags: SymbolFlags::None,
        })
    }

    fn call(object: &mut Object<'_>, section: SectionId, offset: u64, symbol: SymbolId) {
        let flags = RelocationFlags::Elf { r_type: elf::R_BPF_64_32 };
        object.add_relocation(section, Relocation { offset, symbol, addend: 0, flags }).unwrap();
    }

    #[test]
    fn calls_by_name_are_counted_from_the_call_or_from_the_beginning_of_another_section() {
        let mut object = Object::new(BinaryFormat::Elf, Architecture::Bpf, Endianness::Little);
        let text = object.add_section(Vec::new(), b".text".to_vec(), SectionKind::Text);
        let classifier = object.add_section(Vec::new(), b"classifier".to_vec(), SectionKind::Text);
        add_function(&mut object, text, "before", &[EXIT, EXIT].concat());
        let callee = add_function(&mut object, text, "callee", &[EXIT, EXIT].concat());
        add_function(&mut object, text, "caller", &[EXIT, UNRESOLVED, EXIT].concat());
        add_function(&mut object, classifier, "program", &[EXIT, UNRESOLVED].concat());
        call(&mut object, text, 40, callee);
        call(&mut object, classifier, 8, callee);

        let functions = functions(&object.write().unwrap()).unwrap();
        let found = |name: &str| functions.iter().find(|it| it.name == name).unwrap();
        assert_eq!((found("caller").offset, found("caller").section.as_str()), (32, ".text"));
        assert_eq!((found("program").offset, found("program").section.as_str()), (0, "classifier"));
        for (name, distance) in [("caller", -4_i32), ("program", 1)] {
            assert_eq!(found(name).code[12..16], distance.to_le_bytes(), "{name}");
        }
        // A relocation in the code of one function must not affect another function: here, `callee`.
        assert_eq!(found("callee").code, [EXIT, EXIT].concat());
    }

    #[test]
    fn truncated_files_and_files_other_than_elf_are_refused() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(functions(b"#!/bin/sh").is_err());
        for end in [0, 5, 40, 63, 64, own.len() / 2, own.len() - 60] {
            assert!(functions(&own[..end]).is_err(), "{end}");
        }
    }
}
