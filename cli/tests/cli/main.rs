//! `ks` as a program: what people type, against a node made of canned answers, on real pipes and real terminals.

#![expect(clippy::unwrap_used, reason = "a test fails where it panics; helpers count as tests here")]

mod exec;
mod fake;
mod fleet;
mod plain;
mod pty;
mod run;
mod secure;
mod terminal;
