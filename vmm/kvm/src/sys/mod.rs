//! The few places that need `unsafe`: the mapping of guest memory, kicking vCPU threads, ioctls without a safe wrapper.

pub mod attr;
pub mod fd;
pub mod kick;
pub mod ram;
pub mod run;
pub mod xsave;
