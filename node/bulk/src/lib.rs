//! The bulk plane: verified transfer of packs and manifests between peers.
