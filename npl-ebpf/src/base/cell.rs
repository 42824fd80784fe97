// SPDX-License-Identifier: GPL-2.0-only
//! Reads and writes map memory that other processors may write concurrently.
//!
//! A Rust reference to the memory of a map would assert that no other processor writes this memory. A [`Cell`] reads
//! and writes one aligned integer with a single volatile access, so that a reader sees either the old or the new value,
//! never a mixture.

/// A pointer to one integer in a map element: one word or one field.
pub struct Cell<T>(*mut T);

impl<T> Clone for Cell<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Cell<T> {}

impl<T: Copy> Cell<T> {
    /// `pointer` must be aligned and must point into a map element. The element's memory must keep the type `T` while
    /// the program runs.
    #[inline(always)]
    pub const fn new(pointer: *mut T) -> Self {
        Self(pointer)
    }

    #[inline(always)]
    pub fn load(self) -> T {
        // SAFETY: see `new`.
        unsafe { self.0.read_volatile() }
    }

    #[inline(always)]
    pub fn store(self, value: T) {
        // SAFETY: see `new`.
        unsafe { self.0.write_volatile(value) };
    }

    /// Sets the value and returns the previous value. The two steps are not atomic, so this function is only for
    /// elements of per-CPU maps.
    #[inline(always)]
    pub fn replace(self, value: T) -> T {
        let previous = self.load();
        self.store(value);
        previous
    }
}

impl Cell<u64> {
    /// Returns the word `index` words after this one, in the same map element.
    #[inline(always)]
    pub const fn at(self, index: usize) -> Self {
        Self(self.0.wrapping_add(index))
    }
}

/// A [`Cell`] for a field of the map element that a raw pointer points to.
macro_rules! field {
    ($element:expr, $($field:tt)+) => {
        // SAFETY: `$element` points to a map element of the pointer's type, and no Rust reference is made.
        $crate::base::cell::Cell::new(unsafe { &raw mut (*$element).$($field)+ })
    };
}

pub(crate) use field;
