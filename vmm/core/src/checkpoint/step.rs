//! The named steps of a checkpoint: tests fail each one in turn, and faults say where they came from.

use ks_proto::control::Fault;

/// A step, in order. Only `Pause` to `Freeze` happen while the vCPUs are stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// Before the pause: the dirty set is estimated and the copy pool prefaulted.
    Prescan,
    /// The engine stops the vCPUs.
    Pause,
    /// Device and vCPU state.
    SaveState,
    /// The dirty set of memory.
    Collect,
    /// Dirty chunks are copied aside.
    Copy,
    /// The disk's layers are frozen.
    Freeze,
    /// The vCPUs run again.
    Run,
    /// A batch of chunks is named.
    Hash,
    /// The node is asked what it has.
    Known,
    /// New objects are compressed and sealed.
    Seal,
    /// A pack is begun.
    NewPack,
    /// Objects are appended to it.
    WritePack,
    /// It is finished.
    PackDone,
    /// Changed segments.
    Segments,
    /// State objects.
    State,
    /// The manifest goes to the node.
    Commit,
}

impl Step {
    /// All of them, in order.
    pub const ALL: [Step; 16] = [
        Step::Prescan,
        Step::Pause,
        Step::SaveState,
        Step::Collect,
        Step::Copy,
        Step::Freeze,
        Step::Run,
        Step::Hash,
        Step::Known,
        Step::Seal,
        Step::NewPack,
        Step::WritePack,
        Step::PackDone,
        Step::Segments,
        Step::State,
        Step::Commit,
    ];
}

/// Called as each step begins (`Run`: once the vCPUs run again); an error fails the checkpoint there.
pub type Probe = Box<dyn Fn(Step) -> Result<(), Fault> + Send + Sync>;
