//! One session's life: the pure machine that decides, and its words. The acting half is `host/session*.rs`.

mod input;
mod machine;
mod stage;
#[cfg(test)]
mod tests;

pub use input::{Answer, AskId, Checkpointed, Effect, Head, HeadKind, Input, Job, Now, Request};
pub use machine::Machine;
pub use stage::Policy;
