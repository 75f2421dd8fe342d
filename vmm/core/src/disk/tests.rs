//! Tests of the layered disk against a plain vector, with freezes, failures and readers beside writers.

use super::*;
use crate::testing::{Call, MemoryNode};
use ks_proto::RunToken;
use ks_proto::chunk::{DomainKey, ObjectKind};
use proptest::prelude::*;

const CHUNKS: u64 = 6;
const BYTES: u64 = CHUNKS * CHUNK;

struct Bench {
    node: MemoryNode,
    key: DomainKey,
    disk: Disk,
    model: Vec<u8>,
    _dir: tempfile::TempDir,
}

fn gate() -> Arc<LeaseGate> {
    let token = RunToken::default();
    let gate = LeaseGate::new(token);
    gate.renew(token, u64::MAX).unwrap();
    Arc::new(gate)
}

fn bench() -> Bench {
    let (node, key) = (MemoryNode::new(), DomainKey::new(1, [3; 32]));
    let chunks: Vec<Vec<u8>> = (0..CHUNKS).map(|c| vec![if c % 3 == 2 { 0 } else { c as u8 + 1 }; CHUNK_BYTES]).collect();
    let refs = node.import(&key, ObjectKind::Data, &chunks);
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::new(refs, BYTES, node.source(std::slice::from_ref(&key)), dir.path(), gate()).unwrap();
    Bench { node, key, disk, model: chunks.concat(), _dir: dir }
}

impl Bench {
    fn check(&self) {
        let mut all = vec![0xee; BYTES as usize];
        self.disk.read_at(0, &mut all).unwrap();
        assert!(
            all == self.model,
            "the disk differs from the model at {:?}",
            all.iter().zip(&self.model).position(|(a, b)| a != b)
        );
    }
    fn store(&self, set: FrozenSet) {
        let mut refs = BTreeMap::new();
        for c in set.chunks() {
            let mut plain = vec![0; CHUNK_BYTES];
            self.disk.read_frozen(&set, c, &mut plain).unwrap();
            refs.insert(c, self.node.import(&self.key, ObjectKind::Data, &[plain])[0]);
        }
        self.disk.stored(set, &refs);
    }
    fn rebuilt(&self) -> Vec<u8> {
        let source = self.node.source(std::slice::from_ref(&self.key));
        self.disk.stored_refs().iter().flat_map(|id| source.read(id).unwrap()).collect()
    }
}

#[derive(Debug, Clone)]
enum Op {
    Write { at: u64, len: u64, byte: u8 },
    Zero { at: u64, len: u64 },
    Freeze,
    Store,
}

fn op() -> impl Strategy<Value = Op> {
    let range = (0..BYTES, prop_oneof![1..5000u64, 1..200_000u64], any::<bool>()).prop_map(|(at, len, aligned)| {
        let at = if aligned { at / BLOCK_BYTES * BLOCK_BYTES } else { at };
        (at, len.min(BYTES - at))
    });
    prop_oneof![
        4 => (range.clone(), 1u8..255).prop_map(|((at, len), byte)| Op::Write { at, len, byte }),
        2 => range.prop_map(|(at, len)| Op::Zero { at, len }),
        1 => Just(Op::Freeze),
        1 => Just(Op::Store),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn any_writes_and_checkpoints_read_as_the_model(ops in proptest::collection::vec(op(), 1..40)) {
        let mut b = bench();
        let mut frozen: Option<(FrozenSet, Vec<u8>)> = None;
        for op in ops {
            match op {
                Op::Write { at, len, byte } => {
                    b.disk.write_at(at, &vec![byte; len as usize]).unwrap();
                    b.model[at as usize..(at + len) as usize].fill(byte);
                }
                Op::Zero { at, len } => {
                    b.disk.write_zeroes(at, len).unwrap();
                    b.model[at as usize..(at + len) as usize].fill(0);
                }
                // A set that is replaced is a failed checkpoint: the next one includes it.
                Op::Freeze => frozen = Some((b.disk.freeze().unwrap(), b.model.clone())),
                Op::Store => if let Some((set, at_freeze)) = frozen.take() {
                    b.store(set);
                    prop_assert!(b.rebuilt() == at_freeze, "the stored disk is the frozen instant");
                }
            }
            b.check();
        }
        let set = b.disk.freeze().unwrap();
        b.store(set);
        prop_assert!(b.rebuilt() == b.model);
        prop_assert_eq!(b.disk.dirty_bytes(), 0);
    }
}

#[test]
fn a_failed_checkpoint_is_in_the_next_one() {
    let b = bench();
    b.disk.write_at(0, &[9; 4096]).unwrap();
    drop(b.disk.freeze().unwrap());
    b.disk.write_at(3 * CHUNK, &[8; 10]).unwrap();
    assert_eq!(b.disk.dirty_bytes(), 2 * CHUNK);
    let set = b.disk.freeze().unwrap();
    assert_eq!(set.chunks(), vec![0, 3]);
    b.store(set);
    let rebuilt = b.rebuilt();
    assert_eq!((rebuilt[0], rebuilt[4095], rebuilt[4096]), (9, 9, 1));
    assert_eq!((rebuilt[3 * CHUNK_BYTES + 9], rebuilt[3 * CHUNK_BYTES + 10]), (8, 4));
    assert_eq!(b.disk.freeze().unwrap().chunks(), Vec::<u32>::new());
}

#[test]
fn a_closed_gate_refuses_writes_and_lets_reads_pass() {
    let b = bench();
    b.disk.lease.end();
    assert!(matches!(b.disk.write_at(0, &[1]), Err(DiskError::LeaseEnded)));
    assert!(matches!(b.disk.write_zeroes(0, 8192), Err(DiskError::LeaseEnded)));
    assert!(matches!(b.disk.flush(), Err(DiskError::LeaseEnded)));
    b.check();
}

#[test]
fn requests_outside_are_refused() {
    let b = bench();
    for (at, len) in [(BYTES, 1), (BYTES - 1, 2), (u64::MAX, 2)] {
        assert!(matches!(b.disk.write_at(at, &vec![1; len]), Err(DiskError::Range { .. })), "{at}+{len}");
        assert!(matches!(b.disk.read_at(at, &mut vec![1; len]), Err(DiskError::Range { .. })), "{at}+{len}");
        assert!(matches!(b.disk.write_zeroes(at, len as u64), Err(DiskError::Range { .. })), "{at}+{len}");
    }
}

#[test]
fn an_unreadable_base_chunk_is_an_error_and_not_zeros() {
    let b = bench();
    let id = b.disk.base[1];
    b.node.corrupt(&id, true);
    let mut buf = [7; 512];
    assert!(matches!(b.disk.read_at(CHUNK, &mut buf), Err(DiskError::Base(f)) if f.code == "corrupt"));
    // A write that needs the rest of the block fails as well; whole blocks do not need it.
    assert!(matches!(b.disk.write_at(CHUNK + 1, &[1]), Err(DiskError::Base(_))));
    b.disk.write_at(CHUNK, &[5; 4096]).unwrap();
    b.disk.read_at(CHUNK, &mut buf).unwrap();
    assert_eq!(buf, [5; 512]);
    assert!(b.node.calls(Call::Fetch) > 0);
}

#[test]
fn trimming_what_is_zero_makes_nothing_dirty() {
    let b = bench();
    b.disk.write_zeroes(2 * CHUNK, CHUNK).unwrap();
    assert_eq!(b.disk.dirty_bytes(), 0, "chunk 2 was zeros");
    b.disk.write_zeroes(CHUNK, CHUNK).unwrap();
    assert_eq!(b.disk.dirty_bytes(), CHUNK);
}

#[test]
fn readers_and_writers_beside_freezing_and_storing_never_see_foreign_bytes() {
    let b = bench();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        let (disk, stop) = (&b.disk, &stop);
        let writer = s.spawn(move || {
            for round in 0..400u64 {
                let byte = (round % 250 + 1) as u8;
                disk.write_at(4 * CHUNK, &vec![byte; 3 * 4096]).unwrap();
            }
            stop.store(true, std::sync::atomic::Ordering::SeqCst);
        });
        s.spawn(move || {
            let mut buf = vec![0; 3 * 4096];
            while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                disk.read_at(4 * CHUNK, &mut buf).unwrap();
                assert!(buf.iter().all(|&x| x == buf[0]), "a read saw two writes");
            }
        });
        while !stop.load(std::sync::atomic::Ordering::SeqCst) {
            let set = disk.freeze().unwrap();
            let mut plain = vec![0; CHUNK_BYTES];
            disk.read_frozen(&set, 4, &mut plain).unwrap();
            disk.stored(set, &BTreeMap::new());
        }
        writer.join().unwrap();
    });
}
