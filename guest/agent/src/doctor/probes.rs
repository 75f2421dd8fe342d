//! The probes themselves.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    path::Path,
    time::{Duration, Instant},
};

use rustix::time::{ClockId, clock_gettime};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{Finding, Wrong};

const CLOCK_OFF_MAX: Duration = Duration::from_millis(500);
const PATTERN_BYTES: usize = 4 * 1024 * 1024;
const DISK_BYTES: usize = 64 * 1024;
const MEMORY_MIN_KIB: u64 = 16 * 1024;
const NETWORK_LIMIT: Duration = Duration::from_secs(10);
const FIX_CLOCK: &str = "run `ks restore` on the latest checkpoint: the restore hook sets the clock";
const FIX_DISK: &str = "restore an earlier checkpoint with `ks restore`; run `ks doctor` on the node";

/// Wall clock against the host's; monotonic clocks against each other; the clock source.
pub(super) fn clock(wall_unix_ns: u64, in_vm: bool) -> Finding {
    let guest = crate::hook::unix_ns(clock_gettime(ClockId::Realtime));
    let off = (guest - i128::from(wall_unix_ns)).unsigned_abs();
    let source = std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    let source = source.unwrap_or_default().trim().to_owned();
    let boot = crate::hook::unix_ns(clock_gettime(ClockId::Boottime));
    let mono = crate::hook::unix_ns(clock_gettime(ClockId::Monotonic));
    let off_ms = off / 1_000_000;
    if off > CLOCK_OFF_MAX.as_nanos() {
        return Err(Wrong::new(format!("{off_ms} ms away from the host's clock"), FIX_CLOCK));
    }
    if in_vm && source != "tsc" {
        let why = format!("the clock source is {source}, not tsc");
        return Err(Wrong::new(why, "make the image's golden checkpoint anew with `ks image build`"));
    }
    // The guest never sleeps in its own sight: both count the same time.
    if in_vm && (boot - mono).unsigned_abs() > CLOCK_OFF_MAX.as_nanos() {
        return Err(Wrong::new("the boot-time and monotonic clocks differ", FIX_CLOCK));
    }
    Ok(format!("{off_ms} ms away from the host's clock, clock source {source}"))
}

/// Writes, flushes and reads back; the root mounted writable; no errors counted by ext4.
pub(super) fn disk(scratch: &Path) -> Finding {
    let began = Instant::now();
    write_and_read_back(&scratch.join(".ks-doctor")).map_err(|e| Wrong::new(format!("write and read back: {e}"), FIX_DISK))?;
    let took = began.elapsed().as_millis();
    let flags = rustix::fs::statvfs("/").map_err(|e| Wrong::new(format!("look at /: {e}"), FIX_DISK))?;
    if flags.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY) {
        return Err(Wrong::new("/ is mounted read-only", FIX_DISK));
    }
    let errors = ext4_errors(Path::new("/sys/fs/ext4"));
    if errors > 0 {
        return Err(Wrong::new(format!("ext4 counted {errors} errors"), FIX_DISK));
    }
    let free_mib = flags.f_bavail * flags.f_frsize / (1024 * 1024);
    if free_mib == 0 {
        return Err(Wrong::new("the root disk is full", "remove files in the session"));
    }
    Ok(format!("written, flushed and read back in {took} ms; {free_mib} MiB free; no errors counted"))
}

fn write_and_read_back(path: &Path) -> io::Result<()> {
    let mut pattern = vec![0; DISK_BYTES];
    getrandom::fill(&mut pattern).map_err(|e| io::Error::other(e.to_string()))?;
    let result = (|| {
        let mut file = File::create(path)?;
        file.write_all(&pattern)?;
        file.sync_all()?;
        // From the disk, not from the page cache.
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        let mut back = Vec::with_capacity(DISK_BYTES);
        File::open(path)?.read_to_end(&mut back)?;
        if back == pattern { Ok(()) } else { Err(io::Error::other("other bytes came back than were written")) }
    })();
    let _ = std::fs::remove_file(path);
    result
}

fn ext4_errors(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let counts = entries.filter_map(|e| std::fs::read_to_string(e.path().join("errors_count")).ok());
    counts.filter_map(|text| text.trim().parse::<u64>().ok()).sum()
}

/// A pattern in fresh memory, and how much is left.
pub(super) fn memory() -> Finding {
    let pattern = |i: usize| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words: Vec<u64> = (0..PATTERN_BYTES / 8).map(pattern).collect();
    if let Some(at) = std::hint::black_box(&words).iter().enumerate().position(|(i, w)| *w != pattern(i)) {
        let why = format!("word {at} of the test pattern changed");
        return Err(Wrong::new(why, "restore an earlier checkpoint and report this"));
    }
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |name: &str| {
        let line = info.lines().find_map(|l| l.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
    };
    let (Some(free), Some(total)) = (kib("MemAvailable"), kib("MemTotal")) else {
        return Err(Wrong::new("/proc/meminfo is not as expected", "report this"));
    };
    if free < MEMORY_MIN_KIB {
        let why = format!("only {} MiB of {} MiB available", free / 1024, total / 1024);
        return Err(Wrong::new(why, "end programs in the session, or give it more memory: ks run --memory"));
    }
    let killed = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let killed = killed.lines().find_map(|l| l.strip_prefix("oom_kill ")).and_then(|n| n.parse().ok()).unwrap_or(0_u64);
    if killed > 0 {
        let why = format!("{killed} processes were killed for lack of memory");
        return Err(Wrong::new(why, "give the session more memory: ks run --memory"));
    }
    Ok(format!("pattern held; {} MiB of {} MiB available", free / 1024, total / 1024))
}

/// Random bytes without waiting, different each time.
pub(super) fn entropy() -> Finding {
    const FIX: &str = "run `ks restore` on the latest checkpoint: the restore hook brings entropy";
    let read = || {
        let mut bytes = [0; 32];
        let n = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK)?;
        if n == bytes.len() { Ok(bytes) } else { Err(rustix::io::Errno::AGAIN) }
    };
    let wrong = |e: rustix::io::Errno| Wrong::new(format!("no random bytes: {e}"), FIX);
    let (one, two) = (read().map_err(wrong)?, read().map_err(wrong)?);
    if one == two { Err(Wrong::new("the same random bytes twice", FIX)) } else { Ok("ready".into()) }
}

/// A TCP connection over loopback that carries a byte.
pub(super) async fn network() -> Finding {
    const FIX: &str = "restore an earlier checkpoint; `ks exec SESSION --user root -- ip link` shows the interface";
    let talk = async {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let (client, server) = tokio::join!(tokio::net::TcpStream::connect(address), listener.accept());
        let (mut client, (mut server, _)) = (client?, server?);
        client.write_all(b"k").await?;
        server.read_u8().await
    };
    match tokio::time::timeout(NETWORK_LIMIT, talk).await {
        Ok(Ok(b'k')) => Ok("loopback carries TCP".into()),
        Ok(Ok(_)) => Err(Wrong::new("loopback changed a byte", FIX)),
        Ok(Err(why)) => Err(Wrong::new(format!("loopback: {why}"), FIX)),
        Err(_) => Err(Wrong::new("loopback does not answer", FIX)),
    }
}

/// No ended programs that nobody collected.
pub(super) fn processes() -> Finding {
    let own = std::process::id().to_string();
    let (mut all, mut zombies) = (0, 0);
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((state, parent)) = state_and_parent(&stat) else { continue };
        all += 1;
        zombies += u32::from(state == "Z" && parent == own);
    }
    if zombies > 0 {
        return Err(Wrong::new(format!("{zombies} ended programs were not collected"), "report this: ks-guest is at fault"));
    }
    Ok(format!("{all} processes, none left uncollected"))
}

/// From `pid (name) state parent …`; the name may hold anything.
fn state_and_parent(stat: &str) -> Option<(&str, &str)> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?, fields.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_may_hold_parentheses() {
        assert_eq!(state_and_parent("12 (a) Z 1 (b)) S 7 1 2"), Some(("S", "7")));
        assert_eq!(state_and_parent("nonsense"), None);
    }

    #[test]
    fn a_clock_far_away_fails() {
        let now = u64::try_from(crate::hook::unix_ns(clock_gettime(ClockId::Realtime))).unwrap();
        assert!(clock(now, false).is_ok());
        let wrong = clock(now - 2_000_000_000, false).unwrap_err();
        assert!(wrong.detail.contains("ms away"), "{}", wrong.detail);
    }

    #[test]
    fn counted_errors_fail_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        for (disk, count) in [("vda", "2\n"), ("vdb", "1\n")] {
            std::fs::create_dir(dir.path().join(disk)).unwrap();
            std::fs::write(dir.path().join(disk).join("errors_count"), count).unwrap();
        }
        assert_eq!(ext4_errors(dir.path()), 3);
        assert_eq!(ext4_errors(Path::new("/nonexistent")), 0);
    }
}
