// SPDX-License-Identifier: Apache-2.0
//! Returns freed memory to the operating system. The agent runs on every Node, so memory that the agent keeps but does
//! not use is unavailable to Pods on every Node.
//!
//! glibc uses up to one heap per thread, and does not return freed memory in the middle of a heap. Without this module,
//! the memory of a decoded list from the API server, or of the kernel's BTF, would stay resident until the agent exits.

/// Allocations of at least this size in bytes, such as the body of a list, are mapped outside the heap. Once such an
/// allocation is freed, glibc unmaps it.
#[cfg(target_env = "gnu")]
const MAPPED_FROM: libc::c_int = 128 * 1024;

/// Makes glibc use one heap for all threads, and map large allocations outside the heap. The threads can share one
/// heap, because they mostly wait for I/O and rarely compete for the lock of the heap.
pub fn use_one_heap() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, MAPPED_FROM)] {
        #[expect(unsafe_code, reason = "no library in use offers this function")]
        // SAFETY: `mallopt` has two integer arguments, and changes nothing if one of them is invalid.
        let _is_taken = unsafe { libc::mallopt(parameter, value) };
    }
}

/// Returns the free pages of the heap to the operating system.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    #[expect(unsafe_code, reason = "no library in use offers this function")]
    // SAFETY: `malloc_trim` has an integer argument, and releases only free blocks.
    let _was_any = unsafe { libc::malloc_trim(0) };
}
