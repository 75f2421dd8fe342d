//! Tests of the gateway process over its socket, against the test provider.

mod calls;
mod disk;
mod egress;
mod faults;
mod harness;
mod process;
mod replicas;
