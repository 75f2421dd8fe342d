//! What both engines share: guest memory with its pager and dirty tracker, the layered disk, verified reading of
//! packs, the checkpoint pipeline, the lease gate, and the engine seam. Links only proto.

pub mod checkpoint;
pub mod confine;
pub mod disk;
pub mod engine;
pub mod host_link;
pub mod lease;
pub mod memory;
pub mod source;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
