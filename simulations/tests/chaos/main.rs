//! Chaos on real processes: a session is killed, damaged, forked and parked, and must come back as promised.

mod faults;
mod gateway;
mod harness;
mod people;
mod promises;
mod terminal;
