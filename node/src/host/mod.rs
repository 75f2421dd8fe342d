//! Code that acts: sockets, processes, disk and clocks. It holds no policy.

pub mod channel;
pub mod clock;
pub mod control;
pub mod engine;
pub mod events;
pub mod files;
pub mod gateway;
pub mod golden;
pub mod guest;
pub mod heartbeat;
pub mod image;
pub mod launch;
pub mod measure;
pub mod membership;
pub mod process;
pub mod session;
pub mod state;
pub mod tar;
pub mod upload;
pub mod vm;
