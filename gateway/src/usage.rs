//! Usage of one call in buckets that never overlap, from each provider's own way of counting.

use serde::{Deserialize, Serialize};

/// Token counts. `reasoning` is a part of `output`, shown apart and never priced twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Input that no cache served.
    pub input: u64,
    /// Input read from a cache.
    pub cache_read: u64,
    /// Input written to a 5-minute cache.
    pub cache_write_5m: u64,
    /// Input written to a 1-hour cache.
    pub cache_write_1h: u64,
    /// Output, reasoning included.
    pub output: u64,
    /// Of which reasoning.
    pub reasoning: u64,
}

/// Why a provider's figures were refused: they contradict themselves, so nothing is guessed from them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{provider} reports {part} of {whole_name} {whole}, more than the whole")]
pub struct UsageError {
    /// Which provider's rules.
    pub provider: &'static str,
    /// The part that is too large.
    pub part: u64,
    /// The whole that it should be a part of.
    pub whole: u64,
    /// Its name.
    pub whole_name: &'static str,
}

impl Usage {
    /// OpenAI: `prompt_tokens` includes what was read from the cache and, where it is billed apart, what was written to it
    /// (one lifetime, kept in the bucket of the shorter one); `completion_tokens` includes reasoning.
    pub fn openai(prompt: u64, cached: u64, written: u64, completion: u64, reasoning: u64) -> Result<Self, UsageError> {
        let part_of = |part: u64, whole: u64, whole_name| {
            if part > whole { Err(UsageError { provider: "openai", part, whole, whole_name }) } else { Ok(whole - part) }
        };
        part_of(reasoning, completion, "completion_tokens")?;
        Ok(Self {
            input: part_of(cached.saturating_add(written), prompt, "prompt_tokens")?,
            cache_read: cached,
            cache_write_5m: written,
            output: completion,
            reasoning,
            ..Self::default()
        })
    }
    /// Anthropic: `input_tokens` excludes every cache figure.
    pub fn anthropic(input: u64, cache_read: u64, cache_write_5m: u64, cache_write_1h: u64, output: u64) -> Self {
        Self { input, cache_read, cache_write_5m, cache_write_1h, output, reasoning: 0 }
    }
    /// Everything that went in.
    pub fn input_total(&self) -> u64 {
        [self.cache_read, self.cache_write_5m, self.cache_write_1h].into_iter().fold(self.input, u64::saturating_add)
    }
    /// These and `other`, bucket by bucket.
    pub fn plus(&self, other: &Usage) -> Usage {
        Usage {
            input: self.input.saturating_add(other.input),
            cache_read: self.cache_read.saturating_add(other.cache_read),
            cache_write_5m: self.cache_write_5m.saturating_add(other.cache_write_5m),
            cache_write_1h: self.cache_write_1h.saturating_add(other.cache_write_1h),
            output: self.output.saturating_add(other.output),
            reasoning: self.reasoning.saturating_add(other.reasoning),
        }
    }
    /// These so many times.
    pub fn times(&self, n: u64) -> Usage {
        Usage {
            input: self.input.saturating_mul(n),
            cache_read: self.cache_read.saturating_mul(n),
            cache_write_5m: self.cache_write_5m.saturating_mul(n),
            cache_write_1h: self.cache_write_1h.saturating_mul(n),
            output: self.output.saturating_mul(n),
            reasoning: self.reasoning.saturating_mul(n),
        }
    }
    /// Gemini: total = prompt + candidates + thoughts; thoughts are output.
    pub fn gemini(prompt: u64, cached: u64, candidates: u64, thoughts: u64) -> Result<Self, UsageError> {
        if cached > prompt {
            return Err(UsageError { provider: "gemini", part: cached, whole: prompt, whole_name: "promptTokenCount" });
        }
        Ok(Self {
            input: prompt - cached,
            cache_read: cached,
            output: candidates.saturating_add(thoughts),
            reasoning: thoughts,
            ..Self::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_provider_counts_its_own_way() {
        assert_eq!(
            Usage::openai(100, 40, 5, 30, 10),
            Ok(Usage { input: 55, cache_read: 40, cache_write_5m: 5, output: 30, reasoning: 10, ..Usage::default() })
        );
        assert!(Usage::openai(10, 11, 0, 0, 0).is_err() && Usage::openai(10, 0, 0, 3, 4).is_err());
        assert!(Usage::openai(10, 6, 5, 0, 0).is_err());
        let gemini = Usage::gemini(41, 0, 5, 343).unwrap();
        assert_eq!((gemini.input, gemini.output, gemini.input + gemini.output), (41, 348, 389));
    }
}
