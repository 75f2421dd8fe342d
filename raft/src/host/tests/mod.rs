//! Real groups: real redb files, real openraft, an in-memory wire that can be cut.

mod crash;
mod disk;
mod group;
mod harness;
mod repair;
