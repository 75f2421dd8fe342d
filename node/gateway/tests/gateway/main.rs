//! Tests of the gateway process over its socket, against the test provider.

#![allow(clippy::unwrap_used, clippy::wrong_self_convention, reason = "helpers of tests: they fail where they panic")]

mod calls;
mod disk;
mod egress;
mod faults;
mod harness;
mod hostile;
mod process;
mod replicas;
mod takeover;
