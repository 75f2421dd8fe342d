//! Tests of verified reading: good and bad copies, absent objects, lengths.

use super::*;
use crate::testing::{Call, MemoryNode};

fn chunk(seed: u8) -> Vec<u8> {
    (0..CHUNK_BYTES).map(|i| seed.wrapping_add((i / 7) as u8)).collect()
}

fn node_with(n: u8) -> (MemoryNode, DomainKey, Vec<ChunkId>) {
    let node = MemoryNode::new();
    let key = DomainKey::new(1, [3; 32]);
    let chunks: Vec<_> = (0..n).map(chunk).collect();
    let refs = node.import(&key, ObjectKind::Data, &chunks);
    (node, key, refs)
}

#[test]
fn chunks_read_back_and_zero_needs_no_pack() {
    let (node, key, refs) = node_with(3);
    let source = node.source(&[key]);
    assert_eq!(source.read(&refs[2]).unwrap(), chunk(2));
    assert_eq!(source.read_cached(&refs[2]).unwrap().as_slice(), chunk(2));
    assert_eq!(source.read(&ChunkId::ZERO).unwrap(), vec![0; CHUNK_BYTES]);
    source.verify(&refs).unwrap();
    assert_eq!(node.calls(Call::Fetch), 0);
}

#[test]
fn a_corrupt_local_copy_is_fetched_once_and_a_corrupt_fetched_copy_is_refused_by_name() {
    let (node, key, refs) = node_with(2);
    node.corrupt(&refs[0], false);
    node.corrupt(&refs[1], true);
    let source = node.source(&[key]);
    assert_eq!(source.read(&refs[0]).unwrap(), chunk(0));
    assert_eq!(source.read(&refs[0]).unwrap(), chunk(0));
    assert_eq!(node.calls(Call::Fetch), 1, "the good copy is kept");
    let fault = source.read(&refs[1]).unwrap_err();
    assert_eq!(fault.code, "corrupt");
    assert!(fault.what.contains(&refs[1].to_hex()) && fault.why.contains("pack number 0"), "{fault}");
    assert_eq!(source.verify(&refs).unwrap_err().code, "corrupt");
}

#[test]
fn an_absent_object_is_never_zeros() {
    let (node, key, _) = node_with(1);
    let source = node.source(&[key]);
    let stranger = ChunkId([0x55; 32]);
    let fault = source.read(&stranger).unwrap_err();
    assert_eq!(fault.code, "corrupt");
    assert!(fault.why.contains("no holder has it"), "{fault}");
    node.fail(Call::Fetch, Some(Fault::new("node-gone", "node", "restarting", "wait")));
    assert!(is_transient(&source.read(&stranger).unwrap_err()), "a node that is away is not corruption");
}

#[test]
fn a_segment_never_passes_as_a_chunk_and_a_short_chunk_is_refused() {
    let (node, key, _) = node_with(1);
    let segment = node.import(&key, ObjectKind::Segment, &[vec![1; 16384]])[0];
    let short = node.import(&key, ObjectKind::Data, &[vec![1; 100]])[0];
    let source = node.source(&[key]);
    assert_eq!(source.read(&segment).unwrap_err().code, "corrupt");
    assert_eq!(source.read(&short).unwrap_err().code, "corrupt");
}

#[test]
fn maps_and_state_load_with_their_exact_lengths() {
    let (node, key, refs) = node_with(3);
    let mut all = vec![ChunkId::ZERO; 600];
    all[0] = refs[0];
    all[511] = refs[1];
    let first = ks_proto::manifest::encode_segment(&all[..512]);
    let segments = vec![node.import(&key, ObjectKind::Segment, &[first])[0], ChunkId::ZERO];
    let state = node.import(&key, ObjectKind::State, &[vec![7; 10], vec![8; 5]]);
    let source = node.source(&[key]);
    let map = Map { bytes: 600 * CHUNK_BYTES as u64, segments };
    assert_eq!(source.load_map(&map).unwrap(), all);
    assert_eq!(source.load_state(&state, 15).unwrap().len(), 15);
    assert_eq!(source.load_state(&state, 14).unwrap_err().code, "corrupt");
}
