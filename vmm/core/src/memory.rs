//! Being written.
pub struct Memory;
