//! Tests of memory over a real userfaultfd: the dirty set, lazy paging, discards, the eager way.

use super::map::GuestMap;
use super::uffd::Uffd;
use super::*;
use crate::testing::{Call, MemoryNode};
use ks_proto::ObjectKind;
use ks_proto::chunk::DomainKey;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

const CHUNK: u64 = CHUNK_BYTES as u64;
const PAGE: usize = PAGE_BYTES as usize;
const DEADLINE: Duration = Duration::from_secs(20);

/// False, and says so loudly, where the kernel cannot do what these tests are about.
pub(crate) fn uffd_here() -> bool {
    match Uffd::open(None) {
        Ok(_) => true,
        Err(e) => {
            eprintln!("skipped: userfaultfd with asynchronous write protection is not available here: {e}");
            false
        }
    }
}

struct Rng(u64);
impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

fn chunk(c: u64) -> Vec<u8> {
    if c % 5 == 4 {
        return vec![0; CHUNK_BYTES];
    }
    (0..CHUNK_BYTES).map(|i| (c as u8).wrapping_mul(31).wrapping_add((i / PAGE) as u8 * 3) | 1).collect()
}

struct Restored {
    node: MemoryNode,
    key: DomainKey,
    refs: Vec<ChunkId>,
    memory: Arc<Memory>,
    fatal: mpsc::Receiver<Fault>,
}

fn restored(chunks: u64) -> Restored {
    let (node, key) = (MemoryNode::new(), DomainKey::new(1, [3; 32]));
    let plain: Vec<_> = (0..chunks).map(chunk).collect();
    let refs = node.import(&key, ObjectKind::Data, &plain);
    let memory = Memory::create(chunks * CHUNK).unwrap();
    let (tx, fatal) = mpsc::channel();
    let tx = Mutex::new(tx);
    let on_fatal: OnFatal = Arc::new(move |f| lock(&tx).send(f).unwrap());
    memory.restore_lazy(node.source(std::slice::from_ref(&key)), refs.clone(), vec![7, 3], on_fatal).unwrap();
    Restored { node, key, refs, memory, fatal }
}

fn attach(memory: &Arc<Memory>) -> Arc<GuestMap> {
    let map = Arc::new(GuestMap::new(memory).unwrap());
    let tracked = Tracked::in_this_process(None, None, map.base(), map.len(), memory.wants_missing()).unwrap();
    memory.attach(tracked).unwrap();
    map
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !done() {
        assert!(Instant::now() < end, "not within {DEADLINE:?}: {what}");
        std::thread::yield_now();
    }
}

fn indices(c: &Collected) -> Vec<u32> {
    c.chunks.iter().map(|d| d.index).collect()
}

#[test]
fn memory_is_whole_chunks_and_cannot_change_its_size() {
    assert_eq!(Memory::create(0).unwrap_err().code, "bad-request");
    assert_eq!(Memory::create(CHUNK + 4096).unwrap_err().code, "bad-request");
    let m = Memory::create(4 * CHUNK).unwrap();
    assert!(rustix::fs::ftruncate(m.fd(), CHUNK).is_err());
    assert!(rustix::fs::ftruncate(m.fd(), 9 * CHUNK).is_err());
    assert_eq!(m.used_bytes(), 0);
    let wrong = m.restore_eager(MemoryNode::new().source(&[]), vec![ChunkId::ZERO; 3]).unwrap_err();
    assert_eq!(wrong.code, "incompatible");
}

#[test]
fn a_booted_guest_is_captured_whole_and_then_only_what_it_wrote() {
    if !uffd_here() {
        return;
    }
    let memory = Memory::create(256 * CHUNK).unwrap();
    let map = attach(&memory);
    for c in [0u64, 9, 200] {
        map.write(c * CHUNK + 5000, &[1; 10]);
    }
    assert_eq!(indices(&memory.collect().unwrap()), vec![0, 9, 200]);
    assert_eq!(indices(&memory.collect().unwrap()), Vec::<u32>::new());
    let mut rng = Rng(7);
    for round in 0..20 {
        let mut wrote = BTreeSet::new();
        for _ in 0..rng.below(60) {
            let at = rng.below(256 * CHUNK - 9000);
            let len = 1 + rng.below(9000);
            map.write(at, &vec![round as u8 + 1; len as usize]);
            wrote.extend((at / CHUNK) as u32..=((at + len - 1) / CHUNK) as u32);
        }
        assert!(memory.prescan() >= wrote.len());
        let found: BTreeSet<u32> = indices(&memory.collect().unwrap()).into_iter().collect();
        assert!(found.is_superset(&wrote), "missed {:?}", wrote.difference(&found).collect::<Vec<_>>());
        assert_eq!(found, wrote, "and nothing else: the mapping was armed before it was touched");
    }
}
use std::collections::BTreeSet;

#[test]
fn loading_makes_nothing_dirty_and_gives_the_restored_bytes() {
    if !uffd_here() {
        return;
    }
    let r = restored(40);
    let map = attach(&r.memory);
    for c in (0..40).rev() {
        let mut got = vec![9; CHUNK_BYTES];
        map.read(c * CHUNK, &mut got);
        assert!(got == chunk(c), "chunk {c}");
    }
    until("all is loaded", || r.memory.paging().missing == 0);
    let stats = r.memory.paging();
    assert_eq!(stats.faulted + stats.prefetched, 32, "each chunk that is not zeros is loaded once: {stats:?}");
    assert_eq!(r.memory.touch_order().len() as u64, stats.faulted);
    assert_eq!(indices(&r.memory.collect().unwrap()), Vec::<u32>::new());
    // Holes are still served, and tracking goes on.
    map.write(4 * CHUNK + 17, &[1]);
    map.write(8 * CHUNK, &[1]);
    let mut zeros = [9; 16];
    map.read(39 * CHUNK, &mut zeros);
    assert_eq!(zeros, [0; 16]);
    assert_eq!(indices(&r.memory.collect().unwrap()), vec![4, 8]);
    assert!(r.fatal.try_recv().is_err());
}

#[test]
fn a_write_to_a_page_that_is_not_there_keeps_the_rest_of_its_chunk() {
    if !uffd_here() {
        return;
    }
    let r = restored(10);
    let map = attach(&r.memory);
    map.write(6 * CHUNK + 100, &[0xee; 3]);
    let c = r.memory.collect().unwrap();
    assert_eq!(indices(&c), vec![6]);
    assert_eq!(c.chunks[0].settled, state::ALL);
    let mut expected = chunk(6);
    expected[100..103].fill(0xee);
    let mut got = vec![0; CHUNK_BYTES];
    r.memory.read_chunk(6, &mut got).unwrap();
    assert!(got == expected);
}

#[test]
fn what_the_guest_gave_back_is_zeros_and_dirty_and_its_neighbours_are_not_lost() {
    if !uffd_here() {
        return;
    }
    let r = restored(12);
    // The prefetcher is kept out so that the chunks are certainly not loaded when they are given back.
    for c in 0..12 {
        lock(&r.memory.shared.inner).states.claim(c);
    }
    let map = attach(&r.memory);
    until("the prefetcher is through", || r.memory.shared.prefetch_done.load(Ordering::SeqCst));
    map.remove(CHUNK + 2 * PAGE_BYTES, 3 * PAGE_BYTES).unwrap();
    r.memory.discard(2 * CHUNK, CHUNK).unwrap();
    for c in 0..12 {
        lock(&r.memory.shared.inner).states.release(c);
    }
    let collected = r.memory.collect().unwrap();
    assert_eq!(indices(&collected), vec![1, 2]);
    assert_eq!(
        (collected.chunks[0].settled, collected.chunks[0].data),
        (0b11100, 0),
        "only the pages given back are in the file"
    );
    let mut one = vec![9; CHUNK_BYTES];
    map.read(CHUNK, &mut one);
    let mut expected = chunk(1);
    expected[2 * PAGE..5 * PAGE].fill(0);
    assert!(one == expected, "the rest of the chunk came, the pages given back are zeros");
    let mut two = vec![9; CHUNK_BYTES];
    map.read(2 * CHUNK, &mut two);
    assert!(two == vec![0; CHUNK_BYTES], "never the old chunk");
    // Loaded pages that are given back.
    let mut three = vec![9; CHUNK_BYTES];
    map.read(3 * CHUNK, &mut three);
    assert!(three == chunk(3));
    map.remove(3 * CHUNK, CHUNK).unwrap();
    map.read(3 * CHUNK, &mut three);
    assert!(three == vec![0; CHUNK_BYTES]);
    assert_eq!(indices(&r.memory.collect().unwrap()), vec![3]);
}

#[test]
fn a_hole_punched_behind_our_back_is_found() {
    if !uffd_here() {
        return;
    }
    let r = restored(6);
    let map = attach(&r.memory);
    until("all is loaded", || r.memory.paging().missing == 0);
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(r.memory.fd(), flags, 5 * CHUNK, PAGE_BYTES).unwrap();
    assert_eq!(r.memory.prescan(), 1);
    let c = r.memory.collect().unwrap();
    assert_eq!(indices(&c), vec![5]);
    assert_eq!(c.chunks[0].data, state::ALL ^ 1);
    drop(map);
}

#[test]
fn a_chunk_that_cannot_be_read_ends_the_guest_and_is_never_zeros() {
    if !uffd_here() {
        return;
    }
    let r = restored(8);
    r.node.corrupt(&r.refs[5], true);
    let map = attach(&r.memory);
    let served = Arc::new(AtomicBool::new(false));
    let (map2, served2) = (Arc::clone(&map), Arc::clone(&served));
    // This thread waits for ever, as a vCPU would; it ends with the process.
    std::thread::spawn(move || {
        let mut byte = [9];
        map2.read(5 * CHUNK, &mut byte);
        served2.store(true, Ordering::SeqCst);
    });
    let fault = r.fatal.recv_timeout(DEADLINE).unwrap();
    assert_eq!(fault.code, "corrupt");
    assert!(fault.what.contains("memory chunk 5") && fault.what.contains(&r.refs[5].to_hex()), "{fault}");
    r.memory.shutdown();
    drop(r);
    assert!(!served.load(Ordering::SeqCst), "the waiter still waits");
}

#[test]
fn a_node_that_is_away_delays_its_chunks_and_nothing_else() {
    if !uffd_here() {
        return;
    }
    let r = restored(8);
    r.node.corrupt(&r.refs[5], false);
    r.node.fail(Call::Fetch, Some(Fault::new("node-gone", "node", "restarting", "wait")));
    let map = attach(&r.memory);
    std::thread::scope(|s| {
        let waiter = s.spawn(|| {
            let mut five = vec![9; CHUNK_BYTES];
            map.read(5 * CHUNK, &mut five);
            five
        });
        until("the node was asked", || r.node.calls(Call::Fetch) > 0);
        // Faults and removes elsewhere are served meanwhile.
        let mut six = vec![9; CHUNK_BYTES];
        map.read(6 * CHUNK, &mut six);
        assert!(six == chunk(6));
        map.remove(CHUNK, CHUNK).unwrap();
        assert!(!waiter.is_finished());
        r.node.fail(Call::Fetch, None);
        assert!(waiter.join().unwrap() == chunk(5));
    });
    assert!(r.fatal.try_recv().is_err());
}

#[test]
fn an_eager_restore_verifies_everything_and_takes_no_memory_for_zeros() {
    let r = restored(10);
    let eager = Memory::create(10 * CHUNK).unwrap();
    eager.restore_eager(r.node.source(std::slice::from_ref(&r.key)), r.refs.clone()).unwrap();
    for c in 0..10 {
        let mut got = vec![9; CHUNK_BYTES];
        eager.read_chunk(c, &mut got).unwrap();
        assert!(got == chunk(u64::from(c)));
    }
    assert_eq!(eager.used_bytes(), 8 * CHUNK);
    r.node.corrupt(&r.refs[2], true);
    let other = Memory::create(10 * CHUNK).unwrap();
    let fault = other.restore_eager(r.node.source(std::slice::from_ref(&r.key)), r.refs.clone()).unwrap_err();
    assert_eq!(fault.code, "corrupt");
}

#[test]
fn without_a_userfaultfd_all_is_loaded_and_all_in_use_is_listed() {
    let r = restored(10);
    r.memory.detached().unwrap();
    let c = r.memory.collect().unwrap();
    assert_eq!((c.tracker, c.chunks.len()), ("hash-scan", 8));
}

/// V12: discards race with faults and the prefetcher; each thread owns its chunks and knows what they must show.
#[test]
fn discards_beside_paging_in_give_neither_zeros_for_data_nor_old_data_nor_death() {
    if !uffd_here() {
        return;
    }
    const THREADS: u64 = 3;
    let r = restored(96);
    let map = attach(&r.memory);
    std::thread::scope(|s| {
        for t in 0..THREADS {
            let (map, memory) = (Arc::clone(&map), &r.memory);
            s.spawn(move || {
                let mut rng = Rng(t + 1);
                for c in (t..96).step_by(THREADS as usize) {
                    let mut truth = chunk(c);
                    for _ in 0..30 {
                        let first = rng.below(16);
                        let pages = 1 + rng.below(16 - first);
                        let (at, len) = (first as usize * PAGE, pages as usize * PAGE);
                        match rng.below(4) {
                            0 => {
                                map.remove(c * CHUNK + at as u64, len as u64).unwrap();
                                truth[at..at + len].fill(0);
                            }
                            1 => {
                                memory.discard(c * CHUNK + at as u64, len as u64).unwrap();
                                truth[at..at + len].fill(0);
                            }
                            2 => {
                                let byte = 1 + rng.below(250) as u8;
                                map.write(c * CHUNK + at as u64, &vec![byte; len]);
                                truth[at..at + len].fill(byte);
                            }
                            _ => {
                                let mut got = vec![9; len];
                                map.read(c * CHUNK + at as u64, &mut got);
                                assert!(got == truth[at..at + len], "chunk {c}, pages {first}+{pages}");
                            }
                        }
                    }
                    let mut got = vec![9; CHUNK_BYTES];
                    map.read(c * CHUNK, &mut got);
                    assert!(got == truth, "chunk {c}");
                }
            });
        }
    });
    assert!(r.fatal.try_recv().is_err(), "the pager lives");
}
