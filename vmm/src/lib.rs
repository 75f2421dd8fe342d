//! `ks-vmm`: one microVM per process. The run loop, the control socket, the guest channel, the lease watchdog, the
//! qemu engine and its jail. Memory, disk, packs and checkpoints are in ks-vmm-core.

pub mod cgroup;
pub mod channel;
pub mod control;
pub mod jail;
pub mod keeper;
pub mod mailbox;
pub mod nbd;
pub mod phase;
pub mod probe;
pub mod qemu;
pub mod runner;
pub mod shared;
pub mod spawn;
pub mod start;
pub mod starter;
pub mod sys;
pub mod tsc;
pub mod watchdog;
