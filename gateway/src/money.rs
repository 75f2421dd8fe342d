//! Money as whole picodollars (10^-12 dollars): a price in micro-dollars per million tokens times a token count is a
//! whole number of them, so that nothing is ever rounded before it is shown.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::iter::Sum;
use std::ops::Add;

/// An amount. Serialized as a decimal string, so that no reader rounds it through a float.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Money {
    picodollars: u128,
}

/// Picodollars in one dollar.
const DOLLAR: u128 = 1_000_000_000_000;

impl Money {
    /// Nothing.
    pub const ZERO: Money = Money { picodollars: 0 };
    /// `tokens` at `micro_per_million` micro-dollars per million tokens, exactly.
    pub fn of_tokens(tokens: u64, micro_per_million: u64) -> Self {
        Self { picodollars: u128::from(tokens) * u128::from(micro_per_million) }
    }
    /// This less `other`, or nothing.
    pub fn saturating_sub(self, other: Money) -> Money {
        Money { picodollars: self.picodollars.saturating_sub(other.picodollars) }
    }
    /// This times `n`, or the largest amount there is.
    pub fn times(self, n: u64) -> Money {
        Money { picodollars: self.picodollars.saturating_mul(u128::from(n)) }
    }
    /// Parses `0.054399`: digits, at most twelve after the point.
    pub fn parse(text: &str) -> Option<Self> {
        let (whole, frac) = text.split_once('.').unwrap_or((text, ""));
        let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || whole.len() > 20 || frac.len() > 12 || (text.contains('.') && !digits(frac)) {
            return None;
        }
        let whole: u128 = whole.parse().ok()?;
        let frac: u128 = format!("{frac:0<12}").parse().ok()?;
        Some(Self { picodollars: whole * DOLLAR + frac })
    }
}

impl Add for Money {
    type Output = Money;
    fn add(self, other: Money) -> Money {
        Money { picodollars: self.picodollars.saturating_add(other.picodollars) }
    }
}
impl Sum for Money {
    fn sum<I: Iterator<Item = Money>>(iter: I) -> Money {
        iter.fold(Money::ZERO, Add::add)
    }
}
impl fmt::Display for Money {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let frac = format!("{:012}", self.picodollars % DOLLAR);
        let frac = frac.trim_end_matches('0');
        write!(f, "{}.{:0<2}", self.picodollars / DOLLAR, frac)
    }
}
impl Serialize for Money {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&self.to_string())
    }
}
impl<'de> Deserialize<'de> for Money {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        Money::parse(&text).ok_or_else(|| serde::de::Error::custom(format!("{text:?} is not an amount of dollars")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_exact_and_read_back() {
        for text in ["0.00", "7.75", "0.054399", "123.000000000001"] {
            let m = Money::parse(text).unwrap();
            assert_eq!(m.to_string(), text);
            assert_eq!(Money::parse(&m.to_string()), Some(m));
        }
        for bad in ["", ".", "1.", "-1", "1e3", "0.0000000000001", " 1"] {
            assert_eq!(Money::parse(bad), None, "{bad:?}");
        }
        assert_eq!(Money::of_tokens(1, 1).to_string(), "0.000000000001");
    }
}
