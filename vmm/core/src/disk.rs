//! Being written.
pub struct Disk;
