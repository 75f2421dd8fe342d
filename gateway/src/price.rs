//! What a model's tokens cost, and the cost of one call's usage.

use crate::money::Money;
use crate::usage::Usage;

/// Prices in micro-dollars per million tokens, so that 3.75 is 3,750,000.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Price {
    /// Uncached input.
    pub input: u64,
    /// Read from a cache.
    pub cache_read: u64,
    /// Written to a 5-minute cache.
    pub cache_write_5m: u64,
    /// Written to a 1-hour cache.
    pub cache_write_1h: u64,
    /// Output.
    pub output: u64,
}

impl Price {
    /// Anthropic's ratios: writes at 1.25 and 2 times the input price, reads at a tenth. `input` must be a multiple of 20
    /// micro-dollars, as all published prices are; other prices are written out bucket by bucket.
    pub fn anthropic(input: u64, output: u64) -> Option<Self> {
        input.is_multiple_of(20).then(|| Self {
            input,
            cache_read: input / 10,
            cache_write_5m: input / 4 * 5,
            cache_write_1h: input * 2,
            output,
        })
    }
    /// The exact cost of `usage`. Reasoning is inside output already.
    pub fn cost(&self, usage: &Usage) -> Money {
        [
            (usage.input, self.input),
            (usage.cache_read, self.cache_read),
            (usage.cache_write_5m, self.cache_write_5m),
            (usage.cache_write_1h, self.cache_write_1h),
            (usage.output, self.output),
        ]
        .into_iter()
        .map(|(tokens, price)| Money::of_tokens(tokens, price))
        .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_prices_hold_to_the_last_digit() {
        let sonnet = Price::anthropic(3_000_000, 15_000_000).unwrap();
        assert_eq!(sonnet.cost(&Usage::anthropic(3, 0, 12_304, 0, 550)).to_string(), "0.054399");
        let opus = Price::anthropic(5_000_000, 25_000_000).unwrap();
        assert_eq!(opus.cost(&Usage::anthropic(0, 0, 600_000, 400_000, 0)).to_string(), "7.75");
        assert_eq!(Price::anthropic(7, 1), None);
    }
}
