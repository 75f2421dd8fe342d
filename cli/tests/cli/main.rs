//! `ks` as a program: what people type, against a node made of canned answers, on real pipes and real terminals.

mod exec;
mod fake;
mod plain;
mod pty;
mod run;
mod terminal;
