//! Random guests, failures and restores against a plain model.

use super::bench::{CHUNK, How, Vm, rebuild, same};
use super::*;
use proptest::prelude::*;

/// Memory and disk.
type Bytes = (Vec<u8>, Vec<u8>);

const MEMORY: u64 = 12;
const DISK: u64 = 8;

#[derive(Debug, Clone)]
enum Op {
    Write { at: u64, len: u64, byte: u8 },
    Read { chunk: u64 },
    Remove { page: u64, pages: u64 },
    Discard { page: u64, pages: u64 },
    DiskWrite { at: u64, len: u64, byte: u8 },
    DiskZero { at: u64, len: u64 },
    Checkpoint,
    Fail(usize),
    Restore(u8),
}

fn range(chunks: u64) -> impl Strategy<Value = (u64, u64)> {
    let bytes = chunks * CHUNK;
    (0..bytes, prop_oneof![1..3000u64, 1..150_000u64]).prop_map(move |(at, len)| (at, len.min(bytes - at)))
}

fn op() -> impl Strategy<Value = Op> {
    let pages = (0..MEMORY * 16, 1..40u64).prop_map(|(p, n)| (p, n.min(MEMORY * 16 - p)));
    prop_oneof![
        4 => (range(MEMORY), any::<u8>()).prop_map(|((at, len), byte)| Op::Write { at, len, byte }),
        2 => (0..MEMORY).prop_map(|chunk| Op::Read { chunk }),
        1 => pages.clone().prop_map(|(page, pages)| Op::Remove { page, pages }),
        1 => pages.prop_map(|(page, pages)| Op::Discard { page, pages }),
        2 => (range(DISK), any::<u8>()).prop_map(|((at, len), byte)| Op::DiskWrite { at, len, byte }),
        1 => range(DISK).prop_map(|(at, len)| Op::DiskZero { at, len }),
        2 => Just(Op::Checkpoint),
        2 => (0..Step::ALL.len()).prop_map(Op::Fail),
        2 => (0..3u8).prop_map(Op::Restore),
    ]
}

struct World {
    node: MemoryNode,
    vm: Vm,
    now: (Vec<u8>, Vec<u8>),
    stored: Option<(String, Bytes)>,
}

impl World {
    fn checkpoint(&mut self) {
        let stats = self.vm.checkpoint().unwrap();
        let (memory, disk, _) = rebuild(&self.node, &stats.id);
        same(&memory, &self.now.0, "memory of a checkpoint");
        same(&disk, &self.now.1, "disk of a checkpoint");
        self.stored = Some((stats.id, self.now.clone()));
    }
    fn fail(&mut self, n: usize) {
        let step = Step::ALL[n];
        self.vm.pipeline.set_probe(Some(Box::new(move |s| if s == step { Err(full()) } else { Ok(()) })));
        match self.vm.checkpoint() {
            Err(f) => assert_eq!(f.code, "disk-full", "{step:?}"),
            // A step that this checkpoint had no use for: it is a good one.
            Ok(stats) => self.stored = Some((stats.id, self.now.clone())),
        }
        self.vm.pipeline.set_probe(None);
        assert!(!self.vm.engine.gate.paused());
    }
    fn restore(&mut self, how: u8) {
        let Some((id, at)) = self.stored.clone() else { return };
        let how = if uffd_here() { [How::Lazy, How::Eager, How::Detached][usize::from(how)] } else { How::Detached };
        self.vm = Vm::restore(&self.node, &id, how);
        self.now = at;
    }
    fn step(&mut self, op: &Op) {
        let span = |at: u64, len: u64| at as usize..(at + len) as usize;
        match *op {
            Op::Write { at, len, byte } => {
                self.vm.map.write(at, &vec![byte; len as usize]);
                self.now.0[span(at, len)].fill(byte);
            }
            Op::Read { chunk } => {
                let mut got = vec![0xaa; CHUNK_BYTES];
                self.vm.map.read(chunk * CHUNK, &mut got);
                same(&got, &self.now.0[span(chunk * CHUNK, CHUNK)], "memory as the guest sees it");
            }
            Op::Remove { page, pages } => {
                self.vm.map.remove(page * 4096, pages * 4096).unwrap();
                self.now.0[span(page * 4096, pages * 4096)].fill(0);
            }
            Op::Discard { page, pages } => {
                self.vm.memory.discard(page * 4096, pages * 4096).unwrap();
                self.now.0[span(page * 4096, pages * 4096)].fill(0);
            }
            Op::DiskWrite { at, len, byte } => {
                self.vm.disk.write_at(at, &vec![byte; len as usize]).unwrap();
                self.now.1[span(at, len)].fill(byte);
            }
            Op::DiskZero { at, len } => {
                self.vm.disk.write_zeroes(at, len).unwrap();
                self.now.1[span(at, len)].fill(0);
            }
            Op::Checkpoint => self.checkpoint(),
            Op::Fail(n) => self.fail(n),
            Op::Restore(how) => self.restore(how),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_history_is_stored_and_restored_as_the_model(ops in proptest::collection::vec(op(), 1..40)) {
        let node = MemoryNode::new();
        let vm = Vm::boot(&node, MEMORY, &image(), uffd_here());
        let mut world = World { node, vm, now: (vec![0; (MEMORY * CHUNK) as usize], image().concat()), stored: None };
        for op in &ops {
            world.step(op);
        }
        world.checkpoint();
        world.restore(0);
        let mut all = vec![0; (MEMORY * CHUNK) as usize];
        world.vm.map.read(0, &mut all);
        same(&all, &world.now.0, "memory at the end");
        same(&world.vm.disk_now(), &world.now.1, "disk at the end");
    }
}
