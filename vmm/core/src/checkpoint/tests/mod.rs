//! Tests of the pipeline: one instant, failures at every step, cycles, references that stay.

mod bench;
mod model;

use super::*;
use crate::memory::tests::uffd_here;
use crate::testing::{Call, MemoryNode};
use bench::{CHUNK, How, Vm, Wrong, rebuild, same};
use ks_proto::manifest::SEGMENT_SPAN;
use std::sync::atomic::{AtomicBool, Ordering};

fn image() -> Vec<Vec<u8>> {
    (0..8u8).map(|c| vec![if c == 5 { 0 } else { c + 1 }; CHUNK_BYTES]).collect()
}
fn whys() -> impl Iterator<Item = bool> {
    [true, false].into_iter().filter(|tracked| !tracked || uffd_here())
}
struct StopOnDrop<'a>(&'a AtomicBool);
impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
fn full() -> Fault {
    Fault::new("disk-full", "store", "no space left", "free space")
}

/// ONE-INSTANT: counters that the guest writes to memory and disk in one step agree with each other and with the device
/// state in every checkpoint, and every rebuilt image is the image at the pause byte for byte (V1).
#[test]
fn one_instant_and_byte_for_byte_while_the_guest_writes() {
    for tracked in whys() {
        let node = MemoryNode::new();
        let mut vm = Vm::boot(&node, 64, &image(), tracked);
        let (memory, disk) = (Arc::clone(&vm.memory), Arc::clone(&vm.disk));
        let at_pause = Arc::new(Mutex::new((Vec::new(), Vec::new())));
        let save = Arc::clone(&at_pause);
        vm.engine.state = Box::new(move || {
            let mut all = vec![0; memory.bytes() as usize];
            for (c, part) in all.chunks_exact_mut(CHUNK_BYTES).enumerate() {
                memory.read_chunk(c as u32, part).unwrap();
            }
            let mut blocks = vec![0; disk.bytes() as usize];
            disk.read_at(0, &mut blocks).unwrap();
            let counter = all[..8].to_vec();
            *lock(&save) = (all, blocks);
            counter
        });
        let (gate, map, disk, memory) =
            (Arc::clone(&vm.engine.gate), Arc::clone(&vm.map), Arc::clone(&vm.disk), Arc::clone(&vm.memory));
        disk.write_at(0, &[0; 8]).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                let mut n = 0u64;
                while !stop.load(Ordering::SeqCst) {
                    n += 1;
                    gate.inside(|| {
                        map.write(0, &n.to_le_bytes());
                        map.write((n * 7919 * 13) % (60 * CHUNK) + CHUNK, &[n as u8; 700]);
                        if n.is_multiple_of(5) {
                            memory.discard((n % 40 + 2) * CHUNK, (n % 3 + 1) * 4096).unwrap();
                        }
                        disk.write_at((n * 4099) % (6 * CHUNK) + CHUNK, &[n as u8; 900]).unwrap();
                        disk.write_at(0, &n.to_le_bytes()).unwrap();
                    });
                }
            });
            let _stop = StopOnDrop(&stop);
            for round in 0..10 {
                let stats = vm.checkpoint().unwrap();
                let (memory, disk, state) = rebuild(&node, &stats.id);
                assert_eq!((&memory[..8], &disk[..8]), (&state[..], &state[..]), "round {round}");
                let want = lock(&at_pause);
                same(&memory, &want.0, "memory");
                same(&disk, &want.1, "disk");
            }
        });
        assert!(!vm.engine.gate.paused());
    }
}

/// V13: a failure at any step or call leaves the guest running, and the next checkpoint includes what the failed one had.
#[test]
fn a_failure_at_any_step_loses_nothing() {
    for tracked in whys() {
        for step in Step::ALL {
            let node = MemoryNode::new();
            let mut vm = Vm::boot(&node, 40, &image(), tracked);
            vm.map.write(3 * CHUNK, &[1; 5000]);
            let first = vm.checkpoint().unwrap();
            vm.map.write(9 * CHUNK + 50, &[2; 100_000]);
            vm.disk.write_at(2 * CHUNK + 10, &[3; 5000]).unwrap();
            vm.memory.discard(3 * CHUNK, 4096).unwrap();
            let hit = Arc::new(AtomicBool::new(false));
            let hit2 = Arc::clone(&hit);
            vm.pipeline.set_probe(Some(Box::new(move |s| {
                if s != step {
                    return Ok(());
                }
                hit2.store(true, Ordering::SeqCst);
                Err(full())
            })));
            let commits = node.calls(Call::Commit);
            assert_eq!(vm.checkpoint().unwrap_err().code, "disk-full", "{step:?}");
            assert!(hit.load(Ordering::SeqCst), "{step:?} was reached");
            assert!(!vm.engine.gate.paused(), "the guest runs after a failed {step:?}");
            assert_eq!(node.calls(Call::Commit), commits, "NO-TORN: nothing is committed");
            rebuild(&node, &first.id);
            vm.pipeline.set_probe(None);
            vm.map.write(20 * CHUNK, &[4; 10]);
            let stats = vm.checkpoint().unwrap();
            let (memory, disk, _) = rebuild(&node, &stats.id);
            same(&memory, &vm.memory_now(), &format!("memory after a failed {step:?}"));
            same(&disk, &vm.disk_now(), &format!("disk after a failed {step:?}"));
            assert_eq!(vm.disk.dirty_bytes(), 0);
        }
    }
}

#[test]
fn a_node_or_an_engine_that_fails_loses_nothing() {
    let node = MemoryNode::new();
    let mut vm = Vm::boot(&node, 16, &image(), uffd_here());
    let check = |vm: &mut Vm| {
        let stats = vm.checkpoint().unwrap();
        let (memory, disk, _) = rebuild(&vm.node, &stats.id);
        same(&memory, &vm.memory_now(), "memory");
        same(&disk, &vm.disk_now(), "disk");
    };
    for (n, call) in [Call::Known, Call::NewPack, Call::PackDone, Call::Commit].into_iter().enumerate() {
        vm.map.write(n as u64 * CHUNK, &[n as u8 + 1; 9000]);
        vm.disk.write_at(n as u64 * CHUNK + 1, &[n as u8 + 90; 9000]).unwrap();
        node.fail(call, Some(full()));
        let aborts = node.aborts().len();
        assert_eq!(vm.checkpoint().unwrap_err().code, "disk-full", "{call:?}");
        assert_eq!(node.aborts().len(), aborts + 1, "what was uploaded is dropped");
        node.fail(call, None);
        check(&mut vm);
    }
    for wrong in [Wrong::Pause, Wrong::Save] {
        vm.map.write(12 * CHUNK, &[wrong as u8 + 40; 10]);
        vm.engine.wrong = Some(wrong);
        assert_eq!(vm.checkpoint().unwrap_err().code, "timeout", "{wrong:?}");
        assert!(!vm.engine.gate.paused());
        vm.engine.wrong = None;
        check(&mut vm);
    }
}

/// V2 and V7: every cycle restores lazily, writes, and checkpoints while its memory is still being paged in from the
/// same packs; every write of every cycle is there at the end.
#[test]
fn cycles_of_write_checkpoint_restore_keep_everything() {
    for how in [How::Lazy, How::Eager, How::Detached] {
        if how != How::Detached && !uffd_here() {
            continue;
        }
        let node = MemoryNode::new();
        let mut vm = Vm::boot(&node, 80, &image(), how != How::Detached);
        for c in 0..70 {
            vm.map.write(c * CHUNK, &vec![c as u8 + 1; CHUNK_BYTES]);
        }
        let mut want = (vm.memory_now(), vm.disk_now());
        let mut id = vm.checkpoint().unwrap().id;
        for cycle in 0..6u64 {
            let mut vm = Vm::restore(&node, &id, how);
            let (at, byte) = (cycle * 11 * CHUNK + 100, 200 + cycle as u8);
            vm.map.write(at, &[byte; 6000]);
            want.0[at as usize..at as usize + 6000].fill(byte);
            vm.memory.discard((cycle + 60) * CHUNK + 4096, 8192).unwrap();
            let gone = ((cycle + 60) * CHUNK) as usize + 4096;
            want.0[gone..gone + 8192].fill(0);
            vm.disk.write_at(cycle * CHUNK + 77, &[byte; 3000]).unwrap();
            want.1[(cycle * CHUNK) as usize + 77..(cycle * CHUNK) as usize + 3077].fill(byte);
            let stats = vm.checkpoint().unwrap();
            assert!(stats.dirty_memory_bytes <= if how == How::Detached { 80 * CHUNK } else { 3 * CHUNK }, "{how:?}: {stats:?}");
            let (memory, disk, _) = rebuild(&node, &stats.id);
            same(&memory, &want.0, &format!("{how:?} cycle {cycle}: memory"));
            same(&disk, &want.1, &format!("{how:?} cycle {cycle}: disk"));
            // And again, now without any change.
            let again = vm.checkpoint().unwrap();
            assert_eq!((again.chunks_new, again.dirty_disk_bytes), (0, 0), "{how:?}: {again:?}");
            id = again.id;
        }
    }
}

#[test]
fn unchanged_and_equal_content_keeps_its_reference_even_across_key_domains() {
    let node = MemoryNode::new();
    let mut vm = Vm::boot(&node, 8, &image(), uffd_here());
    vm.disk.write_at(3 * CHUNK, &vec![4; CHUNK_BYTES]).unwrap();
    vm.disk.write_at(4 * CHUNK, &vec![99; CHUNK_BYTES]).unwrap();
    vm.map.write(CHUNK, &vec![99; CHUNK_BYTES]);
    vm.map.write(2 * CHUNK, &vec![0; CHUNK_BYTES]);
    let stats = vm.checkpoint().unwrap();
    let before = bench::keys()[0].name(ObjectKind::Data, &vec![4; CHUNK_BYTES]);
    assert_eq!(vm.disk.stored_refs()[3], before, "rewritten with the image's own bytes: the image's chunk");
    assert_eq!(vm.disk.stored_refs()[4], vm.memory.stored_refs()[1], "one object for equal memory and disk");
    assert_eq!((stats.chunks_new, stats.chunks_known, stats.chunks_zero), (1, 2, 1), "{stats:?}");
    assert_eq!((stats.dirty_memory_bytes, stats.dirty_disk_bytes), (2 * CHUNK, 2 * CHUNK));
    let manifest = node.manifest(&stats.id.parse().unwrap()).unwrap();
    assert_eq!((manifest.journal_position, manifest.state_bytes), (7, 3));
}

#[test]
fn unchanged_segments_keep_their_names_and_large_state_is_cut() {
    let node = MemoryNode::new();
    let mut vm = Vm::boot(&node, 3 * SEGMENT_SPAN / CHUNK, &image(), uffd_here());
    vm.engine.state = Box::new(|| (0..9 << 20).map(|i| (i / 251) as u8).collect());
    for s in 0..3 {
        vm.map.write(s * SEGMENT_SPAN, &[1; 10]);
    }
    let first = vm.checkpoint().unwrap();
    vm.map.write(SEGMENT_SPAN + 99, &[2; 10]);
    vm.map.write(2 * SEGMENT_SPAN, &[0; 10]);
    let second = vm.checkpoint().unwrap();
    let of = |s: &CheckpointStats| node.manifest(&s.id.parse().unwrap()).unwrap();
    let (a, b) = (of(&first), of(&second));
    assert_eq!(a.memory.segments[0], b.memory.segments[0]);
    assert_ne!(a.memory.segments[1], b.memory.segments[1]);
    assert!(b.memory.segments[2].is_zero(), "a segment of only zeros is not stored");
    assert_eq!(a.disk, b.disk);
    assert_eq!((b.state.len(), b.state_bytes), (3, 9 << 20));
    assert_eq!(rebuild(&node, &second.id).2.len(), 9 << 20);
}

#[test]
fn one_at_a_time_and_a_dropped_capture_is_a_failed_one() {
    let node = MemoryNode::new();
    let mut vm = Vm::boot(&node, 8, &image(), uffd_here());
    vm.map.write(0, &[1; 10]);
    vm.disk.write_at(0, &[1; 10]).unwrap();
    let captured = vm.capture().unwrap();
    assert_eq!(vm.capture().map(|_| ()).unwrap_err().code, "busy");
    drop(captured);
    let stats = vm.checkpoint().unwrap();
    assert_eq!((stats.dirty_memory_bytes, stats.dirty_disk_bytes), (CHUNK, CHUNK));
    same(&rebuild(&node, &stats.id).0, &vm.memory_now(), "memory");
}

#[test]
fn the_copy_pool_gives_back_what_it_does_not_need() {
    let node = MemoryNode::new();
    let mut vm = Vm::boot(&node, 2048, &image(), uffd_here());
    for c in 0..1500 {
        vm.map.write(c * CHUNK, &[c as u8 | 1; CHUNK_BYTES]);
    }
    let captured = vm.capture().unwrap();
    let held = captured.pool.as_ref().unwrap().ready_bytes();
    assert!(held <= 1500 * CHUNK_BYTES + (32 << 20), "{held} bytes for 1500 chunks");
    vm.pipeline.store(captured).unwrap();
    let left = lock(&vm.pipeline.state).pool.as_ref().unwrap().ready_bytes();
    assert!(left <= POOL_RESERVE * CHUNK_BYTES, "{left} bytes");
}

/// V12: pages are given back while their chunks are captured and stored in the background.
#[test]
fn discards_while_a_capture_is_stored_touch_only_the_next_one() {
    let node = MemoryNode::new();
    let mut vm = Vm::boot(&node, 32, &image(), uffd_here());
    for c in 0..32 {
        vm.map.write(c * CHUNK, &vec![c as u8 + 1; CHUNK_BYTES]);
    }
    let before = vm.memory_now();
    let captured = vm.capture().unwrap();
    vm.memory.discard(0, 16 * CHUNK).unwrap();
    let stats = vm.pipeline.store(captured).unwrap();
    same(&rebuild(&node, &stats.id).0, &before, "the instant of the pause");
    let next = vm.checkpoint().unwrap();
    let after = rebuild(&node, &next.id).0;
    assert!(after[..16 * CHUNK_BYTES].iter().all(|b| *b == 0), "given back is zeros, never the old chunk");
    same(&after, &vm.memory_now(), "memory");
    assert_eq!(vm.memory.stored_refs()[..16], [ChunkId::ZERO; 16]);
}
