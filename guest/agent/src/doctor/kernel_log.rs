//! The kernel's log, searched for what a healthy guest never says.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use super::{Finding, Wrong};

/// Parts of lines that tell of trouble, with what to do.
const BAD: [(&str, &str); 12] = [
    ("self-detected stall", STALLED),
    ("detected stalls", STALLED),
    ("soft lockup", STALLED),
    ("hard LOCKUP", STALLED),
    ("blocked for more than", STALLED),
    ("Marking clocksource", "restore a checkpoint; make the image anew if it comes back (its clock is not the TSC)"),
    ("Out of memory: Killed", "give the session more memory: ks run --memory"),
    ("Memory cgroup out of memory", "give the session more memory: ks run --memory"),
    ("BUG:", BROKEN),
    ("Oops", BROKEN),
    ("EXT4-fs error", BROKEN),
    ("I/O error", BROKEN),
];
const STALLED: &str = "the host is overloaded: move the session with `ks node drain`, or restore a checkpoint";
const BROKEN: &str = "restore an earlier checkpoint with `ks restore`; run `ks doctor` on the node";

/// Reads the whole log and reports the last bad line.
pub(super) fn probe(path: &Path) -> Finding {
    let read = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = read.map_err(|e| Wrong::new(format!("cannot read {}: {e}", path.display()), BROKEN))?;
    let mut lines = 0;
    let mut bad: Option<(String, &'static str)> = None;
    for_each_record(file, |text| {
        lines += 1;
        if let Some(found) = judge(text) {
            bad = Some(found);
        }
    });
    match bad {
        None => Ok(format!("{lines} lines, no stalls, lockups, killed processes or disk errors")),
        Some((line, fix)) => Err(Wrong::new(line, fix)),
    }
}

fn for_each_record(mut log: impl Read, mut f: impl FnMut(&str)) {
    let mut record = vec![0; 8192];
    loop {
        // One record a read; EPIPE means that old ones were overwritten meanwhile.
        match log.read(&mut record) {
            Ok(0) => return,
            Ok(n) => f(&String::from_utf8_lossy(&record[..n])),
            Err(e) if e.raw_os_error() == Some(libc::EPIPE) || e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// A record is `priority,sequence,time,flags;text` and lines of details.
fn judge(record: &str) -> Option<(String, &'static str)> {
    let (head, text) = record.split_once(';')?;
    // Facilities other than the kernel's (0) are written by programs.
    let priority: u32 = head.split(',').next()?.parse().ok()?;
    if priority >> 3 != 0 {
        return None;
    }
    let text = text.lines().next()?;
    BAD.iter().find(|(part, _)| text.contains(part)).map(|(_, fix)| (text.to_owned(), *fix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_is_found_and_the_rest_is_not() {
        let stall = "3,412,99,-;rcu: INFO: rcu_sched self-detected stall on CPU\n SUBSYSTEM=x\n";
        assert!(judge(stall).unwrap().0.starts_with("rcu: INFO"));
        assert!(judge("3,1,2,-;Out of memory: Killed process 7 (node)\n").unwrap().1.contains("memory"));
        assert_eq!(judge("6,1,2,-;EXT4-fs (vda): mounted filesystem\n"), None);
        assert_eq!(judge("12,1,2,-;a program said BUG: here\n"), None, "not the kernel's words");
        assert_eq!(judge("garbage"), None);
    }

    #[test]
    fn the_last_bad_line_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kmsg");
        std::fs::write(&path, "6,1,2,-;fine\n").unwrap();
        assert!(probe(&path).unwrap().starts_with("1 lines"));
        std::fs::write(&path, "4,1,2,-;watchdog: BUG: soft lockup - CPU#0 stuck\n").unwrap();
        assert!(probe(&path).unwrap_err().detail.contains("soft lockup"));
    }
}
