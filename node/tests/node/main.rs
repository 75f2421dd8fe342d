//! The whole node without a VM: the real `ksd` binary, its API, its chunk store, and a stand-in for `ks-vmm` that speaks
//! the control protocol, stores real packs and manifests, and answers as a guest.

mod api;
mod fake_guest;
mod fake_vmm;
mod harness;
mod lifecycle;
mod recovery;
