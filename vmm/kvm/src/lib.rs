//! The kvm engine: being written.
