//! The VMM as its node sees it, over a real engine. Skipped, loudly, where there is no image.
//!
//! The guest boots once: every test that can begins as a restore of the same golden checkpoint.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use common::guest::Lines;
use common::node::{Connection, Store};
use common::{BOUND, Shape, TOKEN, Vm, image, until};
use ks_proto::control::{PROTOCOL, VmPhase, VmmEvent, VmmReply, VmmRequest};
use ks_proto::manifest::EngineKind;
use ks_proto::{CheckpointId, Manifest, RunToken};
use ks_vmm_core::host_link::HostLink;
use ks_vmm_core::lease::boottime_ms;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// The golden checkpoint, its store, and the hashes of what its guest holds in memory and on disk.
struct Golden {
    store: Store,
    id: CheckpointId,
    memory: String,
    disk: String,
    boot: Duration,
}

fn shape() -> Shape {
    Shape::new(EngineKind::Qemu)
}

fn golden() -> Option<&'static Golden> {
    static GOLDEN: OnceLock<Option<Golden>> = OnceLock::new();
    GOLDEN
        .get_or_init(|| {
            image::get()?;
            image::shim();
            let store = Store::new();
            let began = Instant::now();
            let vm = Vm::boot(&store, &shape());
            let mut guest = vm.guest();
            assert_eq!(guest.say("ping"), "pong connects=1 hang_ups=0");
            let boot = began.elapsed();
            // A kernel that boots quickly runs on tsc-early for its first second.
            until("the guest's clock source to be tsc", || guest.say("clock").starts_with("source=tsc ").then_some(()));
            assert_eq!(guest.say("fill 20000000 5"), "ok");
            assert_eq!(guest.say("write 3000000 500000 9"), "ok");
            let (memory, disk) = (guest.say("hash"), guest.say("read 0 8000000"));
            let (id, stats) = vm.checkpoint(None);
            assert_eq!(stats.tracker, "wp-async");
            assert_eq!(guest.say("hash"), memory, "the guest goes on, on the same connection");
            Some(Golden { store, id, memory, disk, boot })
        })
        .as_ref()
}

fn pidfd(pid: i32) -> OwnedFd {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap()
}
fn signal(fd: &OwnedFd, s: rustix::process::Signal) {
    rustix::process::pidfd_send_signal(fd, s).unwrap();
}
/// Waits until the process is gone.
fn gone(fd: &OwnedFd) -> bool {
    let mut fds = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
    let bound = rustix::event::Timespec { tv_sec: BOUND.as_secs() as i64, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&bound)).unwrap() == 1
}
fn state_of(pid: i32) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
}

#[test]
fn a_killed_vm_is_restored_lazily_with_memory_and_disk_as_they_were() {
    let Some(g) = golden() else { return };
    let began = Instant::now();
    let vm = Vm::launch(&g.store, &shape());
    let launched = began.elapsed();
    let Ok(VmmReply::Started { first_run_us, engine_version }) = vm.try_restore(g.id) else { panic!("{}", vm.logs()) };
    let mut guest = vm.guest();
    assert!(guest.say("ping").starts_with("pong connects=2 "));
    let answered = began.elapsed();
    println!("boot {:?}; launch {launched:?}, restore to running {first_run_us} us, answered {answered:?}", g.boot);
    println!("{engine_version}; state {} bytes", g.store.manifest(&g.id).state_bytes);
    assert_eq!(guest.say("hash"), g.memory);
    assert_eq!(guest.say("read 0 8000000"), g.disk);
    assert!(vm.stats().chunks_faulted > 0, "memory came lazily: {:?}", vm.stats());
    assert!(vm.node.events().is_empty(), "{:?}", vm.node.events());
}

#[test]
fn eight_checkpoints_of_one_process_each_restore_to_their_own_instant() {
    let Some(g) = golden() else { return };
    let vm = Vm::restore(&g.store, &shape(), g.id);
    let mut guest = vm.guest();
    let (mut parent, mut kept, mut pauses) = (g.id, Vec::new(), Vec::new());
    for n in 0..8u64 {
        assert_eq!(guest.say("poke 8192"), "ok");
        assert_eq!(guest.say(&format!("write {} 300000 {n}", 10 * MIB + n * MIB)), "ok");
        let (memory, disk) = (guest.say("hash"), guest.say(&format!("read 0 {}", 24 * MIB)));
        let (id, stats) = vm.checkpoint(Some(parent));
        assert_eq!(g.store.manifest(&id).parent, Some(parent));
        pauses.push((stats.pause_us, stats.dirty_memory_bytes, stats.dirty_disk_bytes));
        kept.push((id, memory, disk));
        parent = id;
    }
    println!("(pause us, dirty memory, dirty disk): {pauses:?}");
    drop(vm);
    for (id, memory, disk) in [&kept[0], &kept[3], &kept[7]] {
        let vm = Vm::restore(&g.store, &shape(), *id);
        let mut guest = vm.guest();
        assert_eq!(&guest.say("hash"), memory);
        assert_eq!(&guest.say(&format!("read 0 {}", 24 * MIB)), disk);
    }
}

#[test]
fn a_paused_vm_stays_paused_through_checkpoints_and_goes_on_when_resumed() {
    let Some(g) = golden() else { return };
    let vm = Vm::restore(&g.store, &shape(), g.id);
    let mut guest = vm.guest();
    let before = Lines::number(&guest.say("clock"), "mono");
    vm.ask(VmmRequest::Pause {}).unwrap();
    vm.ask(VmmRequest::Pause {}).unwrap();
    let (first, _) = vm.checkpoint(Some(g.id));
    let (second, _) = vm.checkpoint(Some(first));
    assert_eq!(vm.phase(), VmPhase::Paused);
    guest.send("clock");
    guest.stream.get_ref().set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(guest.stream.get_mut().read(&mut [0]).is_err(), "a paused guest is silent");
    guest.stream.get_ref().set_read_timeout(Some(BOUND)).unwrap();
    vm.ask(VmmRequest::Resume {}).unwrap();
    assert!(Lines::number(&guest.answer().unwrap(), "mono") >= before);
    drop(vm);
    let vm = Vm::restore(&g.store, &shape(), second);
    assert_eq!(vm.guest().say("hash"), g.memory);
}

#[test]
fn time_away_is_not_seen_by_the_monotonic_clock() {
    let Some(g) = golden() else { return };
    let vm = Vm::restore(&g.store, &shape(), g.id);
    let mut guest = vm.guest();
    let before = Lines::number(&guest.say("clock"), "mono");
    let (id, _) = vm.checkpoint(Some(g.id));
    let captured = Instant::now();
    drop(vm);
    // The time away is real time: nothing else to wait for.
    std::thread::park_timeout(Duration::from_millis(2500));
    let vm = Vm::restore(&g.store, &shape(), id);
    let mut guest = vm.guest();
    let restored = Instant::now();
    let after = Lines::number(&guest.say("clock"), "mono");
    let away = restored.duration_since(captured).as_millis() as i64;
    let slack = restored.elapsed().as_millis() as i64;
    println!("away {away} ms, the guest's clock went on by {} ms", after - before);
    assert!(after >= before && after - before < away - 1000 + slack, "{before} -> {after}, away {away}");
}

#[test]
fn a_transfer_in_flight_at_the_checkpoint_does_not_reach_the_restored_connection() {
    let Some(g) = golden() else { return };
    let vm = Vm::restore(&g.store, &shape(), g.id);
    let mut guest = vm.guest();
    // The guest is stuck in this write while the checkpoint is taken; half a command is on its way to it.
    guest.send("echo 3000000");
    guest.send("hash");
    guest.stream.get_mut().read_exact(&mut [0; 1000]).unwrap();
    let (id, _) = vm.checkpoint(Some(g.id));
    drop(vm);
    let vm = Vm::restore(&g.store, &shape(), id);
    // More connections than the port has buffers (128), each cut in the middle of a transfer.
    for n in 0..150 {
        let mut guest = vm.guest();
        let pong = guest.say("ping");
        assert!(pong.starts_with("pong connects="), "connection {n}: {}", &pong[..pong.len().min(80)]);
        guest.send("echo 300000");
        guest.stream.get_mut().read_exact(&mut [0; 10]).unwrap();
    }
    assert_eq!(vm.guest().say("hash"), g.memory);
}

#[test]
fn a_newer_connection_of_the_node_takes_over_and_the_guest_notices_nothing() {
    let Some(g) = golden() else { return };
    let vm = Vm::restore(&g.store, &shape(), g.id);
    let mut guest = vm.guest();
    assert_eq!(guest.say("hash"), g.memory);
    let second = Connection::open(&vm.dir.path().join("control"), &g.store);
    let hello = second.ask(VmmRequest::Hello { protocol: PROTOCOL }, &[]);
    let Ok(VmmReply::Hello { phase, config, jail, .. }) = hello else { panic!("{hello:?}") };
    assert_eq!((phase, config), (VmPhase::Running, Some(vm.config())));
    println!("jail: {jail:?}");
    assert!(vm.ask(VmmRequest::Stats {}).is_err(), "the older connection is closed");
    assert!(second.ask(VmmRequest::Boot { config: vm.config(), image_manifest_hex: String::new() }, &[]).is_err());
    let taken = second.ask(VmmRequest::Checkpoint { parent: None, journal_position: 0 }, &[]);
    assert!(matches!(taken, Ok(VmmReply::Checkpoint { .. })), "{taken:?}");
    assert_eq!(guest.say("hash"), g.memory, "on the connection from before");
}

#[test]
fn the_node_leaving_during_an_upload_fails_it_and_the_next_one_has_everything() {
    let Some(g) = golden() else { return };
    let vm = Vm::restore(&g.store, &shape(), g.id);
    let mut guest = vm.guest();
    assert_eq!(guest.say("fill 30000000 77"), "ok");
    let memory = guest.say("hash");
    let before = g.store.packs_begun.load(Ordering::SeqCst);
    vm.node.send(VmmRequest::Checkpoint { parent: Some(g.id), journal_position: 0 }, &[]);
    until("the upload begins", || (g.store.packs_begun.load(Ordering::SeqCst) > before).then_some(()));
    vm.node.close();
    let node = Connection::open(&vm.dir.path().join("control"), &g.store);
    let id = until("a checkpoint succeeds", || {
        match node.ask(VmmRequest::Checkpoint { parent: Some(g.id), journal_position: 0 }, &[]) {
            Ok(VmmReply::Checkpoint { stats }) => Some(stats.id.parse().unwrap()),
            Err(f) if f.code == "busy" => None,
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(guest.say("hash"), memory);
    drop(vm);
    let vm = Vm::restore(&g.store, &shape(), id);
    assert_eq!(vm.guest().say("hash"), memory);
}

#[test]
fn the_lease_watchdog_stops_the_guest_at_the_deadline_and_lets_it_go_when_renewed() {
    let Some(g) = golden() else { return };
    let vm = Vm::launch(&g.store, &shape());
    let (keys, write_domain) = g.store.keys();
    vm.ask(VmmRequest::Keys { keys, write_domain }).unwrap();
    // A lease that cannot be shortened later, so it is short from the start.
    vm.lease(boottime_ms() + 6_000);
    let started = vm.start_restore(g.id);
    assert!(started.is_ok(), "{started:?}");
    let mut guest = vm.guest();
    assert_eq!(guest.say("hash"), g.memory);
    let deadline = boottime_ms() + 6_500;
    vm.lease(deadline);
    let pid = vm.engine_pid();
    let stopped = vm.node.event("Lease", |e| matches!(e, VmmEvent::Lease { running: false }).then_some(boottime_ms()));
    assert_eq!(state_of(pid), 'T');
    println!("stopped and told {} ms after the deadline", stopped - deadline);
    assert!(stopped >= deadline);
    assert_eq!(vm.phase(), VmPhase::LeaseEnded);
    let refused = vm.ask(VmmRequest::Checkpoint { parent: None, journal_position: 0 });
    assert_eq!(refused.unwrap_err().code, "lease-ended");
    guest.send("hash");
    guest.stream.get_ref().set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(guest.stream.get_mut().read(&mut [0]).is_err(), "nothing passes");
    guest.stream.get_ref().set_read_timeout(Some(BOUND)).unwrap();
    let stale = VmmRequest::Lease { token: RunToken { run: 0, ..TOKEN }, deadline_boottime_ms: u64::MAX };
    assert_eq!(vm.ask(stale).unwrap_err().code, "stale-run");
    assert_eq!(state_of(pid), 'T');
    vm.lease(u64::MAX);
    vm.node.event("Lease", |e| matches!(e, VmmEvent::Lease { running: true }).then_some(()));
    assert_eq!(guest.answer().unwrap(), g.memory);
    vm.checkpoint(Some(g.id));
}

#[test]
fn a_newer_run_ends_this_one() {
    let Some(g) = golden() else { return };
    let mut vm = Vm::restore(&g.store, &shape(), g.id);
    let engine = pidfd(vm.engine_pid());
    let newer = VmmRequest::Lease { token: RunToken { epoch: 9, ..TOKEN }, deadline_boottime_ms: u64::MAX };
    assert_eq!(vm.ask(newer).unwrap_err().code, "superseded");
    let (fault, code) = vm.died();
    assert_eq!((fault.code.as_str(), code), ("superseded", 12));
    assert!(gone(&engine));
}

#[test]
fn nothing_runs_before_the_first_heartbeat() {
    let Some(g) = golden() else { return };
    let vm = Vm::launch(&g.store, &shape());
    let (keys, write_domain) = g.store.keys();
    vm.ask(VmmRequest::Keys { keys, write_domain }).unwrap();
    // Another run's heartbeat does not count.
    let other = VmmRequest::Lease { token: RunToken { run: 9, ..TOKEN }, deadline_boottime_ms: u64::MAX };
    vm.ask(other).unwrap();
    let started = std::thread::scope(|s| {
        let starting = s.spawn(|| vm.start_restore(g.id));
        until("it is starting", || (vm.phase() == VmPhase::Starting).then_some(()));
        let asked = vm.ask(VmmRequest::Pause {});
        assert_eq!(asked.unwrap_err().code, "not-ready");
        vm.lease(u64::MAX);
        starting.join().unwrap()
    });
    assert!(started.is_ok(), "{started:?}");
    assert_eq!(vm.guest().say("hash"), g.memory);
}

#[test]
fn a_killed_engine_is_reported_with_its_console_and_ends_the_process() {
    let Some(g) = golden() else { return };
    let mut vm = Vm::restore(&g.store, &shape(), g.id);
    assert_eq!(vm.guest().say("hash"), g.memory);
    signal(&pidfd(vm.engine_pid()), rustix::process::Signal::KILL);
    let (fault, code) = vm.died();
    assert_eq!((fault.code.as_str(), code), ("engine-died", 11));
    assert!(fault.why.contains("killed by signal 9"), "{fault}");
    assert!(!vm.run_dir().join("vmm.pid").exists() && !vm.dir.path().join("control").exists());
}

#[test]
fn a_panic_and_a_power_off_of_the_guest_are_told_apart() {
    let Some(g) = golden() else { return };
    for (order, code, shown) in [("panic", "guest-panic", "sysrq triggered crash"), ("poweroff", "guest-poweroff", "")] {
        let mut vm = Vm::restore(&g.store, &shape(), g.id);
        let mut guest = vm.guest();
        guest.send(order);
        let (fault, exit) = vm.died();
        assert_eq!((fault.code.as_str(), exit), (code, 11), "{fault}");
        assert!(fault.why.contains(shown), "{fault}");
    }
}

#[test]
fn a_stopped_engine_is_a_timeout_that_says_so_and_the_guest_goes_on_afterwards() {
    let Some(g) = golden() else { return };
    let vm = Vm::restore(&g.store, &shape(), g.id);
    let mut guest = vm.guest();
    assert_eq!(guest.say("hash"), g.memory);
    let engine = pidfd(vm.engine_pid());
    signal(&engine, rustix::process::Signal::STOP);
    let began = Instant::now();
    let fault = vm.ask(VmmRequest::Checkpoint { parent: Some(g.id), journal_position: 0 }).unwrap_err();
    assert_eq!(fault.code, "timeout");
    assert!(fault.why.contains("stopped by a signal"), "{fault}");
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    signal(&engine, rustix::process::Signal::CONT);
    assert_eq!(guest.say("hash"), g.memory);
    vm.checkpoint(Some(g.id));
}

#[test]
fn the_engine_dies_with_a_killed_ks_vmm() {
    let Some(g) = golden() else { return };
    let vm = Vm::restore(&g.store, &shape(), g.id);
    let engine = pidfd(vm.engine_pid());
    vm.kill();
    assert!(gone(&engine), "no orphan");
}

#[test]
fn stop_and_sigterm_end_everything() {
    let Some(g) = golden() else { return };
    for by_signal in [false, true] {
        let mut vm = Vm::restore(&g.store, &shape(), g.id);
        let engine = pidfd(vm.engine_pid());
        if by_signal {
            signal(&pidfd(vm.process.id() as i32), rustix::process::Signal::TERM);
        } else {
            vm.ask(VmmRequest::Stop {}).unwrap();
        }
        assert!(gone(&engine));
        assert_eq!(vm.exit_code(), 0);
    }
}

#[test]
fn a_missing_or_failing_qemu_is_named() {
    let Some(g) = golden() else { return };
    for (program, code, shown) in
        [("/nonexistent/qemu", "engine-missing", "qemu-system-x86"), ("/usr/bin/false", "engine-died", "QEMU exited with 1")]
    {
        let mut shape = shape();
        shape.args = vec!["--qemu".into(), program.into()];
        let mut vm = Vm::launch(&g.store, &shape);
        let fault = vm.try_restore(g.id).unwrap_err();
        assert_eq!(fault.code, code, "{fault}");
        assert!(fault.to_string().contains(shown), "{fault}");
        assert_eq!(vm.exit_code(), 10);
    }
}

#[test]
fn another_version_shape_or_clock_is_refused_by_name() {
    let Some(g) = golden() else { return };
    let manifest = g.store.manifest(&g.id);
    let changed = |f: &dyn Fn(&mut Manifest)| {
        let mut m = manifest.clone();
        f(&mut m);
        g.store.node.commit(&m.encode(), &Default::default()).unwrap()
    };
    let version = changed(&|m| m.machine.as_mut().unwrap().engine_version = "QEMU 6.0 (elsewhere)".into());
    let clock = changed(&|m| m.machine.as_mut().unwrap().tsc_khz += 100_000);
    let vcpus = changed(&|m| m.machine.as_mut().unwrap().vcpus = 2);
    for (id, shown) in [(version, "QEMU 6.0 (elsewhere)"), (clock, "kHz"), (vcpus, "2 virtual CPUs")] {
        let mut vm = Vm::launch(&g.store, &shape());
        let fault = vm.try_restore(id).unwrap_err();
        assert_eq!(fault.code, "incompatible", "{fault}");
        assert!(fault.why.contains(shown), "{fault}");
        assert_eq!(vm.exit_code(), 10);
    }
    let mut larger = shape();
    larger.memory_mib = 512;
    let fault = Vm::launch(&g.store, &larger).try_restore(g.id).unwrap_err();
    assert_eq!(fault.code, "incompatible", "{fault}");
}

#[test]
fn without_the_shim_memory_is_loaded_at_once_and_the_operator_is_told() {
    let Some(g) = golden() else { return };
    let empty = tempfile::tempdir().unwrap();
    // A copy of the program with nothing beside it.
    let lone = empty.path().join("ks-vmm");
    std::fs::copy(env!("CARGO_BIN_EXE_ks-vmm"), &lone).unwrap();
    let mut shape = shape();
    shape.program = Some(lone);
    let vm = Vm::restore(&g.store, &shape, g.id);
    let text = vm.node.event("Warning", |e| match e {
        VmmEvent::Warning { text } => Some(text.clone()),
        _ => None,
    });
    assert!(text.contains("libks_vmm_shim.so"), "{text}");
    let mut guest = vm.guest();
    assert_eq!(guest.say("hash"), g.memory);
    assert_eq!(guest.say("poke 4096"), "ok");
    let memory = guest.say("hash");
    let (id, stats) = vm.checkpoint(Some(g.id));
    assert_eq!(stats.tracker, "hash-scan");
    drop(vm);
    let vm = Vm::restore(&g.store, &self::shape(), id);
    assert_eq!(vm.guest().say("hash"), memory);
}

#[test]
fn the_jailed_engine_has_another_uid_no_network_and_an_almost_empty_root() {
    let Some(g) = golden() else { return };
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: the whole jail needs root");
    }
    let mut shape = shape();
    shape.args = vec!["--jail-uid".into(), "64123".into()];
    let vm = Vm::restore(&g.store, &shape, g.id);
    let mut guest = vm.guest();
    assert_eq!(guest.say("hash"), g.memory);
    vm.checkpoint(Some(g.id));
    assert!(vm.node.events().iter().all(|e| !matches!(e, VmmEvent::Warning { .. })), "{:?}", vm.node.events());
    let proc = std::path::PathBuf::from(format!("/proc/{}", vm.engine_pid()));
    let status = std::fs::read_to_string(proc.join("status")).unwrap();
    for line in ["Uid:\t64123\t64123\t64123\t64123", "Gid:\t64123", "NoNewPrivs:\t1", "Seccomp:\t2", "CapEff:\t0000000000000000"]
    {
        assert!(status.contains(line), "{line} in {status}");
    }
    for ns in ["net", "pid", "mnt", "ipc", "uts"] {
        let own = std::fs::read_link(format!("/proc/self/ns/{ns}")).unwrap();
        assert_ne!(std::fs::read_link(proc.join("ns").join(ns)).unwrap(), own, "{ns}");
    }
    let net = std::fs::read_to_string(proc.join("net/dev")).unwrap();
    let devices: Vec<&str> = net.lines().skip(2).filter_map(|l| l.split(':').next()).map(str::trim).collect();
    assert!(devices.iter().all(|d| *d == "lo"), "{devices:?}");
    let mut root: Vec<_> = std::fs::read_dir(proc.join("root")).unwrap().map(|e| e.unwrap().file_name()).collect();
    root.sort();
    assert!(!root.iter().any(|n| n == "etc" || n == "home" || n == "root" || n == "tmp"), "{root:?}");
    let open: Vec<String> = std::fs::read_dir(proc.join("fd"))
        .unwrap()
        .map(|e| std::fs::read_link(e.unwrap().path()).unwrap().display().to_string())
        .collect();
    println!("root {root:?}; open {open:?}");
    assert!(!open.iter().any(|p| p.ends_with("/control") || p.ends_with("vmm.log")), "{open:?}");
    let hello = vm.ask(VmmRequest::Hello { protocol: PROTOCOL });
    let Ok(VmmReply::Hello { jail, .. }) = hello else { panic!("{hello:?}") };
    for word in ["uid=64123", "no-network", "pid-namespace", "mount-namespace", "qemu-sandbox"] {
        assert!(jail.iter().any(|w| w == word), "{word} in {jail:?}");
    }
}

#[test]
fn an_idle_ks_vmm_sleeps() {
    let Some(g) = golden() else { return };
    let vm = Vm::restore(&g.store, &shape(), g.id);
    assert_eq!(vm.guest().say("hash"), g.memory);
    until("everything is paged in", || (vm.stats().chunks_missing == 0).then_some(()));
    let ticks = || {
        let of = |pid: i32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            stat.rsplit_once(") ").unwrap().1.split(' ').skip(11).take(2).map(|w| w.parse::<u64>().unwrap()).sum::<u64>()
        };
        of(vm.process.id() as i32) + of(vm.jailed_pid())
    };
    let before = ticks();
    std::thread::park_timeout(Duration::from_secs(2));
    let used = ticks() - before;
    println!("{used} ticks of 10 ms in 2 s");
    assert!(used <= 4, "{used} ticks of 10 ms in 2 s of idleness");
}
