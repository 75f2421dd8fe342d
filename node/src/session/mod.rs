//! One session's life: the pure machine that decides, and its words. The acting half is `host/session*.rs`.

mod fallback;
mod input;
mod machine;
mod stage;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_fallback;
#[cfg(test)]
mod tests_moving;

pub use fallback::{Link, next_older};
pub use input::{Answer, AskId, Checkpointed, Effect, Head, HeadKind, Input, Job, Now, Request};
pub use machine::Machine;
pub use stage::Policy;
