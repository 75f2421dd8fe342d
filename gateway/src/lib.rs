//! Metering of model calls: usage in disjoint buckets and what it costs, in exact integer amounts.
//!
//! Thin so far: the proxy, the journal, replay and keys are not here yet, and nothing in the product claims them.
//! What is here is pure. Source: DESIGN section 8, REPLAY wire facts.

pub mod money;
pub mod price;
pub mod usage;
