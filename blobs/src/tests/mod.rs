//! Tests of the whole store: a small writer that plays the VMM's part, a modelled disk, and the cases.

mod basics;
mod collect;
mod crash;
mod disk;
mod receive;
mod rot;
mod vmm;
