//! Seeded fleets on fake hosts, and chaos on real processes (tests/). Links nothing of the product but its machines.
//!
//! The structure test (tests/tidy.rs) lives here because this crate sees the whole tree and nobody depends on it.
