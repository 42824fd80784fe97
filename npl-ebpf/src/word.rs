// SPDX-License-Identifier: GPL-2.0-only
//! Words of the arrays that programs share with each other: each is read and written as one, so that no reader sees half of
//! one. `word` is a pointer into an element of such an array, as [`crate::family::Family`] gives them.

/// Reads a word.
#[inline(always)]
pub fn load(word: *mut u64) -> u64 {
    // SAFETY: a pointer into a map element of this type, aligned.
    unsafe { word.read_volatile() }
}

/// Writes a word.
#[inline(always)]
pub fn store(word: *mut u64, value: u64) {
    // SAFETY: as above.
    unsafe { word.write_volatile(value) };
}
