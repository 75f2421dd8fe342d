//! A fleet of real nodes, each in a network namespace of its own: hosts are killed, cut off, stopped and damaged, and
//! every session with a durable checkpoint must go on at a peer, once.

mod damage;
mod failover;
mod harness;
mod hosts;
#[expect(dead_code, reason = "demonstrations and benchmarks use the rest of it")]
#[path = "../../../cli/src/lab/mod.rs"]
mod lab;
mod membership;
#[path = "../../../cli/src/bench/observe.rs"]
mod observe;
mod partitions;
mod selftest;
