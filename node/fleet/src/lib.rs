//! The fleet's decisions as pure machines: leases, placement, replication and repair.
