//! What the API's verbs do, in terms of records, machines and VMs.

pub mod create;
pub mod describe;
pub mod diff;
pub mod doctor;
pub mod facts;
pub mod fleet;
pub mod fork;
pub mod names;
pub mod place;
pub mod retain;
pub mod scrub;
pub mod verbs;
