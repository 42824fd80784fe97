// SPDX-License-Identifier: Apache-2.0
//! Reproducible payloads and their digests.

use std::io::{self, Read};

/// A reader of `length` pseudo-random bytes that depend only on the seed (Marsaglia's xorshift64).
#[derive(Clone, Debug)]
pub struct Pattern {
    state: u64,
    left: u64,
}

impl Pattern {
    /// Returns the first `length` bytes of the pattern for `seed`.
    pub fn new(seed: u64, length: u64) -> Self {
        // The highest bit keeps the state from being zero, because xorshift of zero is zero.
        Self { state: seed | 1 << 63, left: length }
    }

    /// The digest of the whole pattern.
    pub fn digest(mut self) -> String {
        let mut digest = Digest::default();
        let mut buffer = [0; 8192];
        loop {
            let filled = self.fill(&mut buffer);
            let Some(bytes) = buffer.get(..filled).filter(|bytes| !bytes.is_empty()) else { return digest.to_string() };
            digest.update(bytes);
        }
    }

    fn fill(&mut self, buffer: &mut [u8]) -> usize {
        let mut filled = 0;
        for chunk in buffer.chunks_mut(8) {
            let length = usize::try_from(self.left).unwrap_or(usize::MAX).min(chunk.len());
            if length == 0 {
                break;
            }
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            for (byte, value) in chunk.iter_mut().zip(self.state.to_le_bytes()).take(length) {
                *byte = value;
            }
            filled += length;
            self.left -= length as u64;
        }
        filled
    }
}

impl Read for Pattern {
    /// Reads a multiple of eight bytes, except at the end, so that the content does not depend on the sizes of reads.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let whole = buffer.len() / 8 * 8;
        let usable = if whole == 0 { buffer } else { buffer.split_at_mut(whole).0 };
        Ok(self.fill(usable))
    }
}

/// A 64-bit FNV-1a hash, which detects accidental corruption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    /// Returns the digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        let mut digest = Self::default();
        digest.update(bytes);
        digest
    }

    /// Adds `bytes` to the digest.
    pub fn update(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_has_the_requested_length_and_depends_on_the_seed() {
        let mut one = Vec::new();
        Pattern::new(1, 1001).read_to_end(&mut one).unwrap();
        let mut two = Vec::new();
        Pattern::new(2, 1001).read_to_end(&mut two).unwrap();
        assert_eq!(one.len(), 1001);
        assert_ne!(one, two);
    }

    #[test]
    fn pattern_does_not_depend_on_the_sizes_of_reads() {
        let mut whole = Vec::new();
        Pattern::new(7, 4099).read_to_end(&mut whole).unwrap();
        let mut reader = Pattern::new(7, 4099);
        let mut parts = Vec::new();
        for size in [8, 17, 1000, 9, 4096].iter().cycle() {
            let mut buffer = vec![0; *size];
            let read = reader.read(&mut buffer).unwrap();
            if read == 0 {
                break;
            }
            parts.extend_from_slice(&buffer[..read]);
        }
        assert_eq!(whole, parts);
        assert_eq!(Pattern::new(7, 4099).digest(), Digest::of(&whole).to_string());
    }

    #[test]
    fn digest_is_fnv_1a() {
        assert_eq!(Digest::of(b"foobar").to_string(), "85944171f73967e8");
    }
}
