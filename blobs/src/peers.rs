//! Where a damaged or missing object comes from when not from here: other nodes, once there are any.

use ks_proto::chunk::{Codec, ObjectKind};
use ks_proto::ids::{CheckpointId, ChunkId, PackId};

/// An object as a peer stores it. Nothing in it is trusted until it opens under its name.
#[derive(Debug, Clone)]
pub struct FetchedObject {
    /// Key domain it is sealed under.
    pub domain: u32,
    /// Kind.
    pub kind: ObjectKind,
    /// Codec.
    pub codec: Codec,
    /// Length of the plain bytes.
    pub plain_len: u32,
    /// Sealed bytes.
    pub stored: Vec<u8>,
}

/// Other holders. Calls may block on the network.
pub trait PeerSource: Send + Sync {
    /// The object from some peer, if one has it.
    fn fetch_object(&self, id: &ChunkId) -> Option<FetchedObject>;
    /// Many objects from peers: those that one has, in any order. Whoever asks bounds how many.
    fn fetch_objects(&self, ids: &[ChunkId]) -> Vec<(ChunkId, FetchedObject)> {
        ids.iter().filter_map(|id| Some((*id, self.fetch_object(id)?))).collect()
    }
    /// The manifest's bytes from some peer, if one has it.
    fn fetch_manifest(&self, id: &CheckpointId) -> Option<Vec<u8>>;
    /// A whole pack's bytes from some peer, if one has it under this name. Asked when a pack is gone or damaged as a whole.
    fn fetch_pack(&self, _: &PackId) -> Option<Vec<u8>> {
        None
    }
}

/// A lone node.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoPeers;

impl PeerSource for NoPeers {
    fn fetch_object(&self, _: &ChunkId) -> Option<FetchedObject> {
        None
    }
    fn fetch_manifest(&self, _: &CheckpointId) -> Option<Vec<u8>> {
        None
    }
}
