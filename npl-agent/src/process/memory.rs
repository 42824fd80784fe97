// SPDX-License-Identifier: Apache-2.0
//! Memory that is needed for a moment goes back to the system: a DaemonSet's agent is paid for on every Node.
//!
//! glibc keeps a heap for each thread, and what is freed in the middle of one. A list of the API server, or the types
//! of the kernel that programs are loaded by, would stay resident for as long as the agent runs.

/// Larger blocks, such as the body of a list, are mapped and unmapped on their own.
#[cfg(target_env = "gnu")]
const MAPPED_FROM: libc::c_int = 128 * 1024;

/// Makes glibc use one heap for both threads. They wait for the API server, and not for each other.
pub fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, MAPPED_FROM)] {
        #[expect(unsafe_code, reason = "no library in use wraps it")]
        // SAFETY: the call takes two numbers; one that it refuses changes nothing.
        let _is_taken = unsafe { libc::mallopt(parameter, value) };
    }
}

/// Gives back whatever the heap does not need now.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    #[expect(unsafe_code, reason = "no library in use wraps it")]
    // SAFETY: the call takes a number, and touches free blocks only.
    let _was_any = unsafe { libc::malloc_trim(0) };
}
