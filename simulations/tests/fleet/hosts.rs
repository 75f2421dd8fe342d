//! What hosts do beside dying: a disk that is full, a clock that is set to another time.

use crate::harness::{AWAY, SPARE, begin, checkpoint, counted, durable, long_fleet, remove, session, sh};
use crate::lab::{Lab, Part, json, ok};
use anyhow::{Context, Result, bail, ensure};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The spare machine's disk.
const SMALL_MIB: u32 = 1536;

/// The spare machine as a member with a disk of its own; taken down when dropped.
struct SmallDisk<'a> {
    lab: &'a Lab,
    name: String,
}

impl<'a> SmallDisk<'a> {
    fn join(lab: &'a Lab) -> Result<Self> {
        lab.kill(SPARE, Part::All);
        let home = &lab.machines[SPARE].home;
        std::fs::remove_dir_all(home)?;
        std::fs::create_dir_all(home)?;
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={SMALL_MIB}m,mode=700"), "ks-small"])
            .arg(home)
            .status()
            .context("mount")?;
        ensure!(mounted.success(), "a small disk cannot be mounted: {mounted}");
        let mut small = Self { lab, name: String::new() };
        lab.up(SPARE)?;
        let token = lab.token("5m")?;
        let joined = json(lab.on(SPARE), &["node", "join", &token, "--name", "small"])?;
        small.name = joined["name"].as_str().context("a name")?.to_owned();
        Ok(small)
    }

    fn ballast(&self) -> PathBuf {
        self.lab.machines[SPARE].home.join("ballast")
    }

    /// Writes until the disk has no byte left.
    fn fill(&self) -> Result<()> {
        let mut file = std::fs::File::create(self.ballast())?;
        for size in [1 << 20, 1 << 12, 1] {
            let block = vec![7u8; size];
            loop {
                match file.write(&block) {
                    Ok(_) => {}
                    Err(e) if e.kind() == std::io::ErrorKind::StorageFull => break,
                    Err(e) => return Err(e).context("filling the disk"),
                }
            }
        }
        Ok(())
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        self.lab.kill(SPARE, Part::All);
        let home = &self.lab.machines[SPARE].home;
        let _ = Command::new("umount").args(["-q", "-l"]).arg(home).status();
        if !self.name.is_empty() {
            // Refused for as long as it may be alive.
            let gone = || Ok(ok(self.lab.anywhere(), &["node", "rm", "--force", &self.name]).ok());
            let _ = self.lab.wait("the small node is removed", Duration::from_secs(60), gone);
        }
    }
}

/// Holders of a checkpoint, and what it is called.
fn held(lab: &Lab, name: &str, number: u64) -> Result<(usize, String)> {
    let c = checkpoint(lab, name, number)?;
    let word = c["durability"].as_str().unwrap_or_default().to_owned();
    Ok((c["holders"].as_array().map_or(0, Vec::len), word))
}

#[test]
fn v13_a_full_disk_on_a_holder_holds_nobody_up() {
    let Some(lab) = long_fleet() else { return };
    let full = || -> Result<()> {
        let small = SmallDisk::join(&lab)?;
        let copies = (lab.members + 1).to_string();
        let count = "i=0; while :; do i=$((i+1)); echo $i > /workspace/n.new; mv /workspace/n.new /workspace/n; sleep 0.1; done";
        let node = lab.machines[0].name.as_str();
        let run =
            ["run", "--name", "full", "--memory", "512", "--cadence", "0", "--copies", &copies, "--node", node, "--detach", "--"];
        ok(lab.anywhere(), &[run.as_slice(), &["sh", "-c", count]].concat())?;
        let first = json(lab.anywhere(), &["checkpoint", "full"])?["number"].as_u64().context("a number")?;
        let all = |number: u64, want: usize, word: &str| {
            lab.wait(&format!("c{number} has {want} holders and is {word}"), Duration::from_secs(120), || {
                let (n, w) = held(&lab, "full", number)?;
                if n == want && w == word { Ok(Some(())) } else { bail!("{n} holders, {w}") }
            })
        };
        all(first, lab.members + 1, "durable")?;
        small.fill()?;
        sh(&lab, "full", "head -c 40000000 /dev/urandom > /workspace/big; sync")?;
        let second = json(lab.anywhere(), &["checkpoint", "full"])?["number"].as_u64().context("a number")?;
        all(second, lab.members, "replicating")?;
        // Nobody waits for it: the session counts on, the fleet decides, and the full node answers.
        let before = counted(&lab, "full")?;
        lab.wait("the session counts on", AWAY, || Ok((counted(&lab, "full")? > before + 10).then_some(())))?;
        ensure!(lab.fleet()?["quorum"] == true);
        ensure!(lab.seen_by(SPARE)?["me"].as_u64().is_some(), "the full node answers");
        ensure!(held(&lab, "full", second)?.1 == "replicating", "it is not called durable without its copies");
        std::fs::remove_file(small.ballast())?;
        all(second, lab.members + 1, "durable")?;
        remove(&lab, "full")
    };
    full().unwrap_or_else(|e| panic!("{e:#}"));
}

/// Adds the seconds in a file to the wall clock, and to no other, of the program that it is loaded into.
const SHIM: &str = r#"#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
static int (*real)(clockid_t, struct timespec *);
__attribute__((constructor)) static void find(void) { real = dlsym(RTLD_NEXT, "clock_gettime"); }
int clock_gettime(clockid_t id, struct timespec *t) {
  if (!real) find();
  int r = real(id, t);
  const char *path = id == CLOCK_REALTIME && r == 0 ? getenv("KS_TEST_CLOCK") : 0;
  if (!path) return r;
  char text[32] = {0};
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return r;
  if (read(fd, text, sizeof text - 1) > 0) t->tv_sec += atol(text);
  close(fd);
  return r;
}
"#;

/// A library that steps the wall clock by what stands in the file beside it.
fn clock(dir: &Path) -> Result<(PathBuf, PathBuf)> {
    let (source, library, offset) = (dir.join("clock.c"), dir.join("clock.so"), dir.join("offset"));
    std::fs::write(&source, SHIM)?;
    std::fs::write(&offset, "0")?;
    let made = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).arg("-ldl").output();
    let made = made.context("cc")?;
    ensure!(made.status.success(), "cc: {}", String::from_utf8_lossy(&made.stderr));
    Ok((library, offset))
}

#[test]
fn a_wall_clock_that_is_set_to_another_time_moves_no_session() {
    let Some(lab) = long_fleet() else { return };
    if Command::new("cc").arg("--version").output().is_err() {
        println!("skipped: no C compiler to step a node's clock with");
        return;
    }
    let stepped = || -> Result<()> {
        let dir = tempfile::tempdir()?;
        let (library, offset) = clock(dir.path())?;
        let leader = lab.leader()?;
        let owner = lab.others(&[leader])[0];
        // The owner's daemon and the leader's get a clock that can be set.
        for i in [owner, leader] {
            lab.kill(i, Part::All);
            lab.up_with(i, &[("LD_PRELOAD", &library.display().to_string()), ("KS_TEST_CLOCK", &offset.display().to_string())])?;
            lab.settled(Duration::from_secs(120))?;
        }
        begin(&lab, "clock", owner)?;
        durable(&lab, "clock")?;
        let before = session(&lab, "clock")?["token"]["epoch"].as_u64();
        let mut last = counted(&lab, "clock")?;
        for seconds in ["3600", "-3600", "86400", "0"] {
            std::fs::write(&offset, seconds)?;
            let begun = Instant::now();
            // Longer than two leases.
            while begun.elapsed() < Duration::from_secs(8) {
                let s = session(&lab, "clock")?;
                ensure!(s["token"]["epoch"].as_u64() == before, "at {seconds} s it was taken away: {s}");
                ensure!(s["paused"] != true, "at {seconds} s it stands still: {s}");
            }
            let now = counted(&lab, "clock")?;
            ensure!(now > last, "at {seconds} s it does not count: {last}, then {now}");
            last = now;
            let f = lab.fleet()?;
            let live = f["nodes"].as_array().into_iter().flatten().filter(|n| n["live"] == true).count();
            ensure!(live >= lab.members, "at {seconds} s a node is called dead: {f}");
            durable(&lab, "clock")?;
        }
        // The clock did move: what the node says of times tells.
        std::fs::write(&offset, "86400")?;
        let token = json(lab.on(owner), &["node", "token", "--ttl", "1m"])?;
        let ends = token["expires_unix_ms"].as_u64().context("a time")? / 1000;
        let real = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
        ensure!(ends > real + 80_000, "the clock of the node was not set: {ends} against {real}");
        std::fs::write(&offset, "0")?;
        for i in [owner, leader] {
            lab.kill(i, Part::All);
            lab.up(i)?;
            lab.settled(Duration::from_secs(120))?;
        }
        remove(&lab, "clock")
    };
    stepped().unwrap_or_else(|e| panic!("{e:#}"));
}
