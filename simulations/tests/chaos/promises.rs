//! The promises that one node can keep, each under its name.

use crate::harness::{node, show};
use std::process::Stdio;

/// Keeps a number in a process's memory and shows it on request through a file: only memory that survives answers right.
const COUNTER: &str = "n=$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); echo $$ > /workspace/pid; \
    while :; do if [ -e /workspace/ask ]; then echo $n > /workspace/answer.tmp; mv /workspace/answer.tmp /workspace/answer; rm -f /workspace/ask; fi; sleep 0.05; done";

const ASK: &str = "rm -f /workspace/answer; touch /workspace/ask; i=0; while [ ! -e /workspace/answer ] && [ $i -lt 400 ]; do i=$((i+1)); sleep 0.05; done; cat /workspace/answer";

#[test]
fn recovers_a_killed_vm_with_the_same_process_memory() {
    let Some(n) = node() else { return };
    n.run("r1", &["sh", "-c", COUNTER]);
    let (secret, pid) = (n.sh("r1", ASK), n.sh("r1", "cat /workspace/pid"));
    assert!(!secret.is_empty());
    n.sh("r1", "echo kept > /workspace/kept");
    n.ok(&["checkpoint", "r1", "-m", "before the crash"]);
    n.sh("r1", "echo lost > /workspace/lost");
    n.ok(&["kill", "r1"]);
    let s =
        n.wait_until("r1", "running after its interruption", |s| s["state"] == "running" && !s["last_interruption"].is_null());
    assert!(s["last_interruption"]["ready_ms"].as_u64().is_some_and(|ms| ms > 0), "{s}");
    assert_eq!(n.sh("r1", ASK), secret, "the process's memory is the one of before");
    assert_eq!(n.sh("r1", "cat /workspace/pid"), pid);
    assert_eq!(n.sh("r1", "cat /workspace/kept"), "kept");
    assert_eq!(n.sh("r1", "cat /workspace/lost 2>/dev/null || echo gone"), "gone", "memory and disk are of one instant");
    n.remove("r1");
}

#[test]
fn recovers_when_vm_and_daemon_die_together() {
    let Some(n) = node() else { return };
    n.run("r2", &["sh", "-c", COUNTER]);
    let secret = n.sh("r2", ASK);
    n.ok(&["checkpoint", "r2"]);
    let ksd = n.ksd_pid();
    n.ks(&["kill", "r2", "--with-daemon"]);
    n.wait_for_new_ksd(ksd);
    n.wait_for("r2", "running");
    assert_eq!(n.sh("r2", ASK), secret);
    n.remove("r2");
}

#[test]
fn a_daemon_killed_alone_interrupts_nothing() {
    let Some(n) = node() else { return };
    n.run("r3", &["sh", "-c", COUNTER]);
    let (secret, before) = (n.sh("r3", ASK), n.session("r3"));
    let ksd = n.ksd_pid();
    n.sigkill(ksd);
    n.wait_for_new_ksd(ksd);
    let after = n.wait_for("r3", "running");
    assert_eq!(after["vmm_pid"], before["vmm_pid"], "the same VM goes on");
    assert_eq!(after["token"], before["token"], "and the same run");
    assert!(after["last_interruption"].is_null(), "{after}");
    assert_eq!(n.sh("r3", ASK), secret);
    n.remove("r3");
}

#[test]
fn one_instant_for_memory_and_disk() {
    let Some(n) = node() else { return };
    // The process counts in memory and on the raw disk at once; after any restore both must agree to within one step.
    let line = "i=0; while :; do i=$((i+1)); echo $i > /workspace/disk.tmp; mv /workspace/disk.tmp /workspace/disk; echo $i > /dev/shm/memory; done";
    n.run("one", &["sh", "-c", line]);
    for round in 0..4 {
        n.ok(&["checkpoint", "one"]);
        n.ok(&["kill", "one"]);
        n.wait_until("one", "running again", |s| s["state"] == "running");
        let both = n.sh("one", "kill -STOP $(pgrep -f /workspace/disk.tmp | head -1); echo $(cat /workspace/disk) $(cat /dev/shm/memory); kill -CONT $(pgrep -f /workspace/disk.tmp | head -1)");
        let v: Vec<i64> = both.split_whitespace().map(|x| x.parse().unwrap_or(-9)).collect();
        assert!(v.len() == 2 && (v[0] - v[1]).abs() <= 1 && v[1] > 0, "round {round}: disk and memory say {both}");
    }
    n.remove("one");
}

#[test]
fn every_file_of_every_cycle_is_there() {
    let Some(n) = node() else { return };
    n.run("cyc", &["sleep", "infinity"]);
    for i in 0..6 {
        n.sh("cyc", &format!("head -c 300000 /dev/urandom > /workspace/f{i}; sha256sum /workspace/f{i} >> /workspace/sums"));
        n.ok(&["checkpoint", "cyc"]);
        n.ok(&["kill", "cyc"]);
        n.wait_until("cyc", "running", |s| s["state"] == "running");
    }
    assert_eq!(n.sh("cyc", "sha256sum -c /workspace/sums | grep -c OK"), "6");
    n.remove("cyc");
}

#[test]
fn forks_differ_and_share_only_the_past() {
    let Some(n) = node() else { return };
    n.run("par", &["sleep", "infinity"]);
    n.sh("par", "echo past > /workspace/past");
    n.ok(&["fork", "par", "-n", "3"]);
    let kids = ["par.1", "par.2", "par.3"];
    let mut seen = std::collections::BTreeMap::<&str, std::collections::BTreeSet<String>>::new();
    for k in kids {
        n.wait_for(k, "running");
        assert_eq!(n.sh(k, "cat /workspace/past"), "past");
        for (what, line) in [
            ("entropy", "head -c 16 /dev/urandom | od -An -tx1"),
            ("uuid", "cat /proc/sys/kernel/random/uuid"),
            ("machine-id", "cat /etc/machine-id"),
            ("hostname", "hostname"),
        ] {
            let v = n.sh(k, line);
            assert!(!v.is_empty(), "{k} has no {what}");
            assert!(seen.entry(what).or_default().insert(v.clone()), "{what} {v} appears twice among the children");
        }
    }
    n.sh("par.1", "echo a > /workspace/only-in-a");
    for k in ["par", "par.2", "par.3"] {
        assert_eq!(n.sh(k, "ls /workspace/only-in-a 2>/dev/null || echo absent"), "absent", "{k}");
    }
    let child = n.session("par.1");
    assert_eq!(child["forked_from"]["name"], "par", "lineage is recorded: {child}");
    for k in kids {
        n.remove(k);
    }
    n.remove("par");
}

#[test]
fn a_fork_outlives_its_source() {
    let Some(n) = node() else { return };
    n.run("src", &["sleep", "infinity"]);
    n.sh("src", "head -c 2000000 /dev/urandom > /workspace/data; sha256sum /workspace/data > /workspace/sum");
    n.ok(&["fork", "src", "-n", "1"]);
    n.wait_for("src.1", "running");
    n.ok(&["checkpoint", "src.1"]);
    n.remove("src");
    n.ok(&["kill", "src.1"]);
    n.wait_until("src.1", "running", |s| s["state"] == "running" && !s["last_interruption"].is_null());
    assert!(n.sh("src.1", "sha256sum -c /workspace/sum").contains("OK"));
    n.remove("src.1");
}

/// Longer than the 21 s after which a Linux kernel reports a stalled processor.
const ABSENCE: std::time::Duration = std::time::Duration::from_secs(24);

/// A guest that never idles is parked for longer than its kernel's watchdogs allow, and none of them has seen it.
#[test]
fn clocks_are_right_and_no_watchdog_barks_after_a_busy_guests_absence() {
    let Some(n) = node() else { return };
    n.run("clk", &["sh", "-c", "while :; do sleep 1; date +%s > /workspace/tick; done & while :; do :; done"]);
    let mono = |n: &crate::harness::Node| n.sh("clk", "cut -d' ' -f1 /proc/uptime").parse::<f64>().expect("uptime is a number");
    let wall = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs_f64();
    let begun = std::time::Instant::now();
    let before = mono(&n);
    n.ok(&["park", "clk"]);
    let away = std::time::Instant::now();
    while away.elapsed() < ABSENCE {
        std::thread::park_timeout(ABSENCE - away.elapsed().min(ABSENCE));
    }
    n.ok(&["wake", "clk"]);
    n.wait_for("clk", "running");
    let asked = wall();
    let guest: f64 = n.sh("clk", "date +%s.%N").parse().expect("seconds");
    let answered = wall();
    assert!((asked - 0.5..answered + 0.5).contains(&guest), "wall clock: {guest} between {asked} and {answered}");
    let gone = mono(&n) - before;
    let here = (begun.elapsed() - ABSENCE).as_secs_f64();
    assert!(gone <= here + 0.5, "the monotonic clock jumped: {gone} s in {here} s of running");
    assert_eq!(n.sh("clk", "old=$(cat /workspace/tick); i=0; while [ \"$old\" = \"$(cat /workspace/tick)\" ] && [ $i -lt 100 ]; do i=$((i+1)); sleep 0.1; done; [ $i -lt 100 ] && echo fires"), "fires");
    let report = n.json(&["doctor", "clk"]);
    assert_eq!(report["ok"], true, "{report:#}");
    n.remove("clk");
}

#[test]
fn a_restored_guest_passes_doctor() {
    let Some(n) = node() else { return };
    n.run("doc", &["bash"]);
    n.ok(&["checkpoint", "doc"]);
    n.ok(&["kill", "doc"]);
    n.wait_until("doc", "running", |s| s["state"] == "running" && !s["last_interruption"].is_null());
    let report = n.json(&["doctor", "doc"]);
    assert_eq!(report["ok"], true, "{report:#}");
    n.remove("doc");
}

#[test]
fn exec_survives_nothing_silently() {
    let Some(n) = node() else { return };
    n.run("cut", &["sleep", "infinity"]);
    n.ok(&["checkpoint", "cut"]);
    let mut child = n
        .command()
        .args(["exec", "cut", "--", "sleep", "100"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("ks starts");
    n.sh("cut", "i=0; while ! pgrep -x sleep >/dev/null && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done");
    n.ok(&["kill", "cut"]);
    let status = child.wait().expect("ks ends");
    assert_eq!(status.code(), Some(255), "a cut link is 255, never 0");
    n.wait_until("cut", "running", |s| s["state"] == "running");
    let o = n.ks(&["exec", "cut", "--", "true"]);
    assert!(o.status.success(), "{}", show(&o));
    n.remove("cut");
}

/// A program in the guest dirties memory and appends to a file all the while, and a client writes through `ks exec`: what either was
/// told is done is there when the session is back from parking or stopping, however long storing takes.
#[test]
fn a_park_or_stop_keeps_everything_that_was_answered() {
    let Some(n) = node() else { return };
    let writer = "import os\nb=bytearray(96<<20)\nf=open('/workspace/log','a')\nk=0\nwhile True:\n  k+=1\n  for o in range(0,len(b),4096): b[o]=(k+o//4096)%251\n  f.write(str(k)+'\\n'); f.flush(); os.fsync(f.fileno())\n";
    n.run("keep", &["python3", "-c", writer]);
    n.sh("keep", "while [ ! -s /workspace/log ]; do sleep 0.1; done");
    for (round, verb) in ["park", "stop", "park"].iter().enumerate() {
        let mut answered = Vec::new();
        let mut rest = n.command().args([verb, "keep"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("ks starts");
        let mut i = 0;
        while rest.try_wait().expect("ks can be waited for").is_none() {
            i += 1;
            let word = format!("r{round}-{i}");
            let line = format!("echo {word} >>/workspace/said; sync /workspace/said; tail -n 1 /workspace/log");
            let o = n.ks(&["exec", "keep", "--", "sh", "-c", &line]);
            if o.status.success() {
                answered.push((word, String::from_utf8_lossy(&o.stdout).trim().parse::<u64>().expect("a count")));
            }
        }
        n.ok(&["wake", "keep"]);
        n.wait_for("keep", "running");
        let said = n.sh("keep", "cat /workspace/said 2>/dev/null || true");
        let count: u64 = n.sh("keep", "tail -n 1 /workspace/log").parse().expect("a count");
        for (word, seen) in &answered {
            assert!(said.lines().any(|l| l == word), "{verb}: {word} was answered and is gone: {said}");
            assert!(*seen <= count, "{verb}: the log was seen at {seen} and is at {count}");
        }
    }
    n.remove("keep");
}
