//! The node's way to its peers: identity, control plane, gossip, certificates.
