//! Tests of the bulk plane over real endpoints on loopback.

mod faults;
mod fetch;
mod image;
mod interop;
mod world;
