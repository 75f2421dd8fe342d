//! The types that openraft works with here. Only the runtime is open: the simulation brings a deterministic one.

use crate::{Proposal, Response};
use openraft::impls::leader_id_adv::LeaderId as AdvLeaderId;
use openraft::impls::{BoxedErrorSource, InlineBatch, OneshotResponder};
use openraft::{AsyncRuntime, EmptyNode, EntryPayload, OptionalSend, RaftTypeConfig};
use std::cmp::Ordering;
use std::fmt;
use std::marker::PhantomData;

/// Who led when an entry was written.
pub type LeaderId = AdvLeaderId<u64, u64>;
/// Position of an entry: its leader and its index.
pub type LogId = openraft::LogId<LeaderId>;
/// A vote, saved before it is sent.
pub type Vote = openraft::impls::Vote<LeaderId>;
/// What an entry carries.
pub type Payload = EntryPayload<Proposal, u64, EmptyNode>;
/// An entry of the log.
pub type Entry = openraft::impls::Entry<LeaderId, Payload>;
/// Voters and learners, with the entry that set them.
pub type StoredMembership = openraft::StoredMembership<LeaderId, u64, EmptyNode>;
/// What a snapshot covers.
pub type SnapshotMeta = openraft::SnapshotMeta<LeaderId, u64, EmptyNode>;
/// Bytes of a snapshot: the state as JSON.
pub type SnapshotBytes = std::sync::Arc<Vec<u8>>;
/// A snapshot with its bytes.
pub type Snapshot = openraft::Snapshot<LeaderId, u64, EmptyNode, SnapshotBytes>;

/// The type configuration over a runtime.
pub struct Types<R>(PhantomData<fn() -> R>);

// Derived implementations would ask the runtime for the same traits, which it need not have.
impl<R> fmt::Debug for Types<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Types")
    }
}
impl<R> Clone for Types<R> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<R> Copy for Types<R> {}
impl<R> Default for Types<R> {
    fn default() -> Self {
        Self(PhantomData)
    }
}
impl<R> PartialEq for Types<R> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl<R> Eq for Types<R> {}
impl<R> PartialOrd for Types<R> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<R> Ord for Types<R> {
    fn cmp(&self, _: &Self) -> Ordering {
        Ordering::Equal
    }
}

impl<R: AsyncRuntime> RaftTypeConfig for Types<R> {
    type D = Proposal;
    type R = Response;
    type NodeId = u64;
    type Node = EmptyNode;
    type Term = u64;
    type LeaderId = LeaderId;
    type Vote = Vote;
    type Payload = Payload;
    type Entry = Entry;
    type AsyncRuntime = R;
    type Responder<T>
        = OneshotResponder<Self, T>
    where
        T: OptionalSend + 'static;
    type Batch<T>
        = InlineBatch<T>
    where
        T: OptionalSend + 'static;
    type ErrorSource = BoxedErrorSource;
}
