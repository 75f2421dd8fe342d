mod faults;
mod fetch;
mod image;
mod interop;
mod world;
