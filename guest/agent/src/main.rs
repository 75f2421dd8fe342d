//! Placeholder until this program lands.
fn main() {}
