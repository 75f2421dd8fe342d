//! Processes that speak for each node: tells a restart from a copied data folder, and from one that was lost or put back.
//!
//! A node counts its starts in its database. A new process with a higher count is a restart; the old one falls silent.
//! If the old one speaks again, two processes run on copies of one folder. A new process whose count did not rise runs on
//! an older copy, or on nothing: what it acknowledged and voted before is not known to it, so its votes and
//! acknowledgements must not count, and openraft must not see its log.

use super::frame::{No, Process};
use std::collections::{BTreeMap, VecDeque};

/// Processes of one node that are remembered.
const PROCESSES_MAX: usize = 8;

/// What speaks against a node. A single late message of a process that ended looks like a twin, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Suspect {
    /// Messages of a process that another one had taken the place of.
    pub twin: u64,
    /// Messages of a process whose database had fallen behind.
    pub rolled_back: u64,
}

/// Processes that spoke for each node, the present one last.
#[derive(Default)]
pub(super) struct Peers {
    seen: BTreeMap<u64, VecDeque<Process>>,
    suspects: BTreeMap<u64, Suspect>,
}

impl Peers {
    /// Refuses what a process says that must not speak for the node any more. `boot_floor` is what the state knows of its
    /// starts.
    pub fn admit(&mut self, number: u64, process: Process, boot_floor: u64) -> Result<(), No> {
        let seen = self.seen.entry(number).or_default();
        if seen.back() == Some(&process) {
            return Ok(());
        }
        let suspect = self.suspects.entry(number).or_default();
        if seen.iter().any(|p| p.incarnation == process.incarnation) {
            suspect.twin += 1;
            return Err(No::Twin { number });
        }
        if process.boot < boot_floor || seen.back().is_some_and(|p| process.boot <= p.boot) {
            suspect.rolled_back += 1;
            return Err(No::RolledBack { number });
        }
        seen.push_back(process);
        if seen.len() > PROCESSES_MAX {
            seen.pop_front();
        }
        Ok(())
    }

    /// Nodes that something speaks against.
    pub fn suspects(&self) -> BTreeMap<u64, Suspect> {
        self.suspects.iter().filter(|(_, s)| **s != Suspect::default()).map(|(n, s)| (*n, *s)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_is_admitted_but_not_a_copy_nor_an_older_database() {
        let mut peers = Peers::default();
        let mut say = |number, incarnation, boot, floor| peers.admit(number, Process { incarnation, boot }, floor);
        assert_eq!(say(1, 10, 1, 0), Ok(()));
        assert_eq!(say(1, 10, 1, 0), Ok(()));
        assert_eq!(say(2, 10, 1, 0), Ok(()));
        assert_eq!(say(1, 11, 2, 0), Ok(()), "it was started again");
        assert_eq!(say(1, 10, 1, 0), Err(No::Twin { number: 1 }), "the old process is still there");
        assert_eq!(say(1, 12, 2, 0), Err(No::RolledBack { number: 1 }), "a copy of the folder was started");
        assert_eq!(say(1, 11, 2, 0), Ok(()));
        assert_eq!(say(3, 13, 4, 5), Err(No::RolledBack { number: 3 }), "the fleet knows of later starts");
        for n in 0..100 {
            assert_eq!(say(4, 100 + n, 1 + n, 0), Ok(()));
        }
        assert_eq!(peers.seen[&4].len(), PROCESSES_MAX);
        let wanted = [(1, Suspect { twin: 1, rolled_back: 1 }), (3, Suspect { twin: 0, rolled_back: 1 })];
        assert_eq!(peers.suspects(), wanted.into());
    }
}
