// SPDX-License-Identifier: Apache-2.0
//! Returns memory to the system that is needed for a short time only, since every Node pays for the agent.
//!
//! glibc keeps a heap for each thread, and freed blocks inside of one. A list of the API server, or the BTF types that
//! loading needs, would stay resident for the life of the agent.

/// Blocks of this size and more, such as the body of a list, are mapped and unmapped individually.
#[cfg(target_env = "gnu")]
const MAPPED_FROM: libc::c_int = 128 * 1024;

/// Makes glibc use one heap for both threads: they rarely allocate at the same time.
pub fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, MAPPED_FROM)] {
        #[expect(unsafe_code, reason = "no library in use wraps it")]
        // SAFETY: the call takes two numbers; one that it refuses changes nothing.
        let _is_taken = unsafe { libc::mallopt(parameter, value) };
    }
}

/// Returns free memory of the heap to the system.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    #[expect(unsafe_code, reason = "no library in use wraps it")]
    // SAFETY: the call takes a number, and touches free blocks only.
    let _was_any = unsafe { libc::malloc_trim(0) };
}
