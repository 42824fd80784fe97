// SPDX-License-Identifier: Apache-2.0
//! Determines the number of instructions and the stack size of kernel programs from their bytecode.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail};

use crate::kernel_object::{CALL, Function, INSTRUCTION};

/// The number of the frame pointer register `r10`, which points to the highest address of a function's stack frame.
const FRAME: u8 = 10;
/// The name of the ELF section with the functions that several programs call.
const SHARED: &str = ".text";
/// The largest number of nested stack frames that the kernel accepts, including the program's own frame.
const MAX_FRAMES: usize = 8;

/// The number of instructions and the stack size of a program, including the functions that it calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) name: String,
    pub(crate) section: String,
    pub(crate) instructions: u64,
    /// The bytes of stack that the chain of calls with the largest stack uses.
    pub(crate) stack: u64,
}

/// Returns the number of instructions and the stack size of each program of a kernel object.
pub(crate) fn uses(functions: &[Function]) -> Result<Vec<Use>> {
    functions
        .iter()
        .filter(|function| function.section != SHARED)
        .map(|program| of_program(program, functions))
        .collect()
}

fn of_program(program: &Function, functions: &[Function]) -> Result<Use> {
    let mut called = BTreeSet::new();
    let stack =
        walk(program, functions, &mut called, 0).with_context(|| format!("follow the calls of {}", program.name))?;
    let shared = functions.iter().filter(|function| called.contains(&function.offset) && function.section == SHARED);
    let instructions =
        std::iter::once(program).chain(shared).map(|function| function.code.len() / INSTRUCTION).sum::<usize>();
    let (name, section) = (program.name.clone(), program.section.clone());
    Ok(Use { name, section, instructions: u64::try_from(instructions)?, stack })
}

/// Returns the bytes of stack that a function and its calls use, along the chain of calls that uses most. Adds the
/// offsets of the called functions to `called`.
fn walk(function: &Function, functions: &[Function], called: &mut BTreeSet<usize>, depth: usize) -> Result<u64> {
    if depth == MAX_FRAMES {
        bail!("more than {MAX_FRAMES} stack frames are nested");
    }
    let mut deepest = 0;
    for target in calls(function) {
        let is_there = |it: &&Function| it.section == SHARED && it.offset == target;
        let callee = functions.iter().find(is_there).with_context(|| format!("no function begins at {target:#x}"))?;
        called.insert(target);
        deepest = deepest.max(walk(callee, functions, called, depth + 1)?);
    }
    Ok(frame(&function.code) + deepest)
}

/// Returns the offsets of the functions that a function calls. A call instruction contains a distance: from the call,
/// if the called function is in the same section; otherwise from the beginning of the called function's section.
fn calls(function: &Function) -> Vec<usize> {
    /// The value of a call instruction's source register if the called function is part of the kernel object. A call
    /// instruction with another value calls a helper of the kernel.
    const OWN: u8 = 1;
    let mut targets = Vec::new();
    for (index, instruction) in function.code.chunks_exact(INSTRUCTION).enumerate() {
        if instruction[0] == CALL && instruction[1] >> 4 == OWN {
            let base = if function.section == SHARED { function.offset + index * INSTRUCTION } else { 0 };
            let distance = (i64::from(immediate(instruction)) + 1) * 8;
            targets.extend(base.checked_add_signed(isize::try_from(distance).unwrap_or(isize::MAX)));
        }
    }
    targets
}

/// Returns the bytes of a function's own stack frame: the largest distance from the frame pointer, rounded up to a
/// multiple of 32 bytes. Some kernels round up to a multiple of 32 bytes, and others to a multiple of fewer bytes, so
/// the sum over nested calls is an upper bound for all kernels.
fn frame(code: &[u8]) -> u64 {
    const CLASS: u8 = 0x07;
    const LOAD: u8 = 1;
    const STORE: u8 = 2;
    const STORE_REGISTER: u8 = 3;
    const COPY: u8 = 0xbf;
    const ADD: u8 = 0x07;
    const GRAIN: u64 = 32;
    let mut depth: i64 = 0;
    let mut copies = BTreeSet::new();
    for instruction in code.chunks_exact(INSTRUCTION) {
        let (destination, source) = (instruction[1] & 0xf, instruction[1] >> 4);
        let base = match instruction[0] & CLASS {
            LOAD => Some(source),
            STORE | STORE_REGISTER => Some(destination),
            _ => None,
        };
        if base == Some(FRAME) {
            depth = depth.max(-i64::from(i16::from_le_bytes([instruction[2], instruction[3]])));
        }
        match instruction[0] {
            COPY if source == FRAME => {
                copies.insert(destination);
            }
            ADD if copies.remove(&destination) => depth = depth.max(-i64::from(immediate(instruction))),
            _ => {}
        }
    }
    depth.unsigned_abs().max(1).next_multiple_of(GRAIN)
}

fn immediate(instruction: &[u8]) -> i32 {
    i32::from_le_bytes([instruction[4], instruction[5], instruction[6], instruction[7]])
}

#[cfg(test)]
mod tests {
    use super::{Function, Use, uses};

    /// `*(u64 *)(r10 - 24) = r1`
    const STORE: [u8; 8] = [0x7b, 0x1a, 0xe8, 0xff, 0, 0, 0, 0];
    /// `r2 = r10`, `r2 += -100`
    const ADDRESS: [[u8; 8]; 2] = [[0xbf, 0xa2, 0, 0, 0, 0, 0, 0], [0x07, 0x02, 0, 0, 0x9c, 0xff, 0xff, 0xff]];
    const EXIT: [u8; 8] = [0x95, 0, 0, 0, 0, 0, 0, 0];

    fn call(distance: i32) -> [u8; 8] {
        let [a, b, c, d] = distance.to_le_bytes();
        [0x85, 0x10, 0, 0, a, b, c, d]
    }

    fn function(name: &str, section: &str, offset: usize, code: &[[u8; 8]]) -> Function {
        Function { name: name.to_owned(), section: section.to_owned(), offset, code: code.concat() }
    }

    #[test]
    fn called_functions_count_toward_a_program() {
        let functions = [
            // `program` calls `first` and `second`, by distances from the beginning of the section `.text`.
            function("program", "classifier", 0, &[STORE, call(-1), call(1), EXIT]),
            function("first", ".text", 0, &[STORE, EXIT]),
            // `second` calls `first`, by a distance from the call.
            function("second", ".text", 16, &[ADDRESS[0], ADDRESS[1], call(-5), EXIT]),
            function("not_called", ".text", 48, &[ADDRESS[0], ADDRESS[1], EXIT]),
        ];
        let expected = Use {
            name: "program".to_owned(),
            section: "classifier".to_owned(),
            instructions: 10,
            stack: 32 + 128 + 32,
        };
        assert_eq!(uses(&functions).unwrap(), [expected]);
    }

    #[test]
    fn calls_without_a_target_and_endless_recursion_are_refused() {
        let nowhere = [function("program", "classifier", 0, &[call(7), EXIT])];
        let endless =
            [function("program", "classifier", 0, &[call(-1), EXIT]), function("f", ".text", 0, &[call(-1), EXIT])];
        for (functions, problem) in
            [(&nowhere[..], "no function begins at 0x40"), (&endless[..], "more than 8 stack frames")]
        {
            let error = format!("{:#}", uses(functions).unwrap_err());
            assert!(error.starts_with("follow the calls of program: ") && error.contains(problem), "{error}");
        }
    }

    #[test]
    fn eight_nested_stack_frames_are_accepted_and_nine_are_refused() {
        let chain = |called: usize| {
            let program = function("program", "classifier", 0, &[call(-1), EXIT]);
            // Each function calls the next one, which begins two instructions later.
            let code = |number| if number + 1 < called { [call(1), EXIT] } else { [EXIT, EXIT] };
            let functions = (0..called).map(|number| function("f", ".text", 16 * number, &code(number)));
            std::iter::once(program).chain(functions).collect::<Vec<_>>()
        };
        assert_eq!(uses(&chain(7)).unwrap()[0].stack, 8 * 32);
        assert!(uses(&chain(8)).is_err());
    }
}
