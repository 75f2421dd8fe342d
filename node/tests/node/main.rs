//! The whole node without a VM: the real `ksd` binary, its API, its chunk store, and a stand-in for `ks-vmm` that speaks
//! the control protocol, stores real packs and manifests, and answers as a guest.

#[cfg(test)]
mod api;
#[cfg(test)]
mod calls;
#[cfg(test)]
mod fake_gateway;
#[cfg(test)]
mod fake_guest;
#[cfg(test)]
mod fake_vmm;
#[cfg(test)]
mod fleet;
#[cfg(test)]
mod gateway;
#[cfg(test)]
mod harness;
#[cfg(test)]
mod lifecycle;
#[cfg(test)]
mod real_gateway;
#[cfg(test)]
mod recovery;
