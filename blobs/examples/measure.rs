//! Measures what the choices of the format cost on real data: chunk sizes, ingestion, opening and planning.
//!
//! `cargo run --release -p ks-blobs --example measure -- chunks FILE...` cuts the files into 16, 64 and 256 KiB chunks and
//! tells dedup, compression, speed, and what a fault costs beside placing the page; `-- store FILE` ingests a disk image
//! into a temporary store beside the file and
//! times ingestion, reopening, and the restore plan of a checkpoint of about 25,000 chunks.

use anyhow::{Context, Result, bail};
use ks_blobs::{KeyRing, Store, UploadScope};
use ks_proto::chunk::{CHUNK_BYTES, DomainKey, ObjectKind, is_zeros};
use ks_proto::ids::{ChunkId, SessionId};
use ks_proto::manifest::{EngineKind, Machine, Manifest, Map, SEGMENT_CHUNKS, encode_segment};
use ks_proto::pack::{PackBuilder, ROW_BYTES};
use std::collections::HashSet;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

const MIB: f64 = 1024.0 * 1024.0;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.split_first() {
        Some((mode, files)) if mode == "chunks" && !files.is_empty() => chunks(files),
        Some((mode, [file])) if mode == "store" => store(Path::new(file)),
        _ => bail!("usage: measure chunks FILE... | measure store DISK-IMAGE"),
    }
}

/// One line per chunk size: the same bytes, as if each file were a checkpoint after the other.
fn chunks(files: &[String]) -> Result<()> {
    println!(
        "| chunk | chunks | zero | distinct | stored MiB (objects + references) | of read | name MiB/s | seal MiB/s | open us a chunk |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let key = DomainKey::new(1, [1; 32]);
    for size in [16 * 1024, 64 * 1024, 256 * 1024] {
        let (mut seen, mut buf) = (HashSet::new(), vec![0u8; size]);
        let (mut n, mut zero, mut stored, mut read) = (0u64, 0u64, 0usize, 0u64);
        let (mut naming, mut sealing, mut opening, mut sealed) = (0.0, 0.0, 0.0, 0u64);
        for file in files {
            let mut f = std::fs::File::open(file).with_context(|| format!("open {file}"))?;
            loop {
                buf.fill(0);
                let got = fill(&mut f, &mut buf)?;
                if got == 0 {
                    break;
                }
                (n, read) = (n + 1, read + size as u64);
                if is_zeros(&buf) {
                    zero += 1;
                    continue;
                }
                stored += 32;
                let t = Instant::now();
                let id = key.name(ObjectKind::Data, &buf);
                naming += t.elapsed().as_secs_f64();
                if seen.insert(id) {
                    let t = Instant::now();
                    let (codec, body) = key.seal(ObjectKind::Data, &id, &buf, [0; 24]);
                    sealing += t.elapsed().as_secs_f64();
                    let t = Instant::now();
                    key.open(ObjectKind::Data, codec, &id, size, &body)?;
                    opening += t.elapsed().as_secs_f64();
                    sealed += size as u64;
                    stored += body.len() + ROW_BYTES;
                }
            }
        }
        let hashed = (n - zero) as f64 * size as f64 / MIB;
        println!(
            "| {} KiB | {n} | {zero} | {} | {:.1} | {:.1} % | {:.0} | {:.0} | {:.0} |",
            size / 1024,
            seen.len(),
            stored as f64 / MIB,
            stored as f64 * 100.0 / read as f64,
            hashed / naming,
            sealed as f64 / MIB / sealing,
            opening * 1e6 / seen.len() as f64
        );
    }
    Ok(())
}

fn fill(f: &mut std::fs::File, buf: &mut [u8]) -> Result<usize> {
    let mut at = 0;
    while at < buf.len() {
        match f.read(&mut buf[at..])? {
            0 => break,
            n => at += n,
        }
    }
    Ok(at)
}

fn store(image: &Path) -> Result<()> {
    let dir = image.with_extension("measure-store");
    std::fs::create_dir(&dir).with_context(|| format!("create {}", dir.display()))?;
    let done = timed(image, &dir);
    std::fs::remove_dir_all(&dir)?;
    done
}

fn timed(image: &Path, dir: &Path) -> Result<()> {
    let file = std::fs::File::open(image)?;
    let keys = KeyRing::new([DomainKey::new(0, [1; 32]), DomainKey::new(1, [2; 32])]);
    let store = Store::open(dir)?;
    let t = Instant::now();
    let got = store.ingest_disk(&file, keys.get(0).context("key 0")?, &mut |_, _| {})?;
    println!(
        "ingest: {:.2} s, {} MiB disk, {} new, {} known, {} zero chunks, {} MiB stored",
        t.elapsed().as_secs_f64(),
        got.manifest.disk.bytes >> 20,
        got.chunks_new,
        got.chunks_known,
        got.chunks_zero,
        got.stored_bytes >> 20
    );
    let t = Instant::now();
    let id = checkpoint_of_25k(&store, &keys, &got.manifest)?;
    println!("checkpoint of 25,000 chunks of memory: {:.2} s (made, uploaded, committed)", t.elapsed().as_secs_f64());
    drop(store);
    let t = Instant::now();
    let store = Store::open(dir)?;
    println!("open: {:.1} ms, {:?}", t.elapsed().as_secs_f64() * 1e3, store.stats());
    for round in ["cold", "warm", "warm"] {
        let t = Instant::now();
        let (plan, files) = store.closure_plan(&id, &keys)?;
        println!(
            "plan, {round}: {:.1} ms for {} objects in {} packs",
            t.elapsed().as_secs_f64() * 1e3,
            plan.rows().len(),
            files.len()
        );
    }
    let t = Instant::now();
    let report = store.verify(&id, &keys)?;
    println!("verify: {:.2} s, {} MiB, {} faults", t.elapsed().as_secs_f64(), report.bytes >> 20, report.faults.len());
    let t = Instant::now();
    let (mut after, mut bytes) = (None, 0);
    loop {
        let step = store.scrub(after, &keys)?;
        if step.pack.is_none() {
            break;
        }
        (after, bytes) = (step.pack, bytes + step.bytes);
    }
    println!("scrub: {:.2} s, {} MiB", t.elapsed().as_secs_f64(), bytes >> 20);
    let t = Instant::now();
    let r = store.gc(&[id, got.id], &keys, 0, u64::MAX)?;
    println!("gc with nothing to do: {:.0} ms, {r:?}", t.elapsed().as_secs_f64() * 1e3);
    Ok(())
}

/// A checkpoint of 2 GiB of memory, 25,000 chunks of it in use, over the image's disk.
fn checkpoint_of_25k(store: &std::sync::Arc<Store>, keys: &KeyRing, image: &Manifest) -> Result<ks_proto::CheckpointId> {
    let key = keys.get(1).context("key 1")?;
    let scope = UploadScope { keys: keys.clone(), write_domain: 1, bases: vec![] };
    let up = store.begin_upload(scope);
    let mut refs = vec![ChunkId::ZERO; 32 * 1024];
    let (mut file, mut bytes) = (up.new_pack()?, Vec::new());
    let (mut b, header) = PackBuilder::start(1);
    bytes.extend(header);
    let mut nonce = [0u8; 24];
    let mut put = |kind, id, plain: &[u8]| -> Result<()> {
        if b.is_full_for(plain.len()) {
            let (next, header) = PackBuilder::start(1);
            let (tail, name, _) = std::mem::replace(&mut b, next).finish();
            bytes.extend(tail);
            file.write_all_at(&bytes, 0)?;
            up.pack_done(name, bytes.len() as u64)?;
            (file, bytes) = (up.new_pack()?, header);
        }
        for (d, s) in nonce.iter_mut().zip(id_bytes(&id)) {
            *d = *s;
        }
        bytes.extend(b.add(key, kind, id, plain, nonce));
        Ok(())
    };
    for n in 0..25_000u64 {
        let mut plain = vec![0u8; CHUNK_BYTES];
        plain[..8].copy_from_slice(&(n + 1).to_le_bytes());
        let id = key.name(ObjectKind::Data, &plain);
        refs[usize::try_from(n)?] = id;
        put(ObjectKind::Data, id, &plain)?;
    }
    let mut memory = Map { bytes: 2 << 30, segments: vec![] };
    for part in refs.chunks(SEGMENT_CHUNKS) {
        let plain = encode_segment(part);
        let id = if is_zeros(&plain) { ChunkId::ZERO } else { key.name(ObjectKind::Segment, &plain) };
        if !id.is_zero() {
            put(ObjectKind::Segment, id, &plain)?;
        }
        memory.segments.push(id);
    }
    let state = vec![5u8; 50_000];
    let state_id = key.name(ObjectKind::State, &state);
    put(ObjectKind::State, state_id, &state)?;
    let (tail, name, _) = b.finish();
    bytes.extend(tail);
    file.write_all_at(&bytes, 0)?;
    up.pack_done(name, bytes.len() as u64)?;
    let machine = Machine {
        engine: EngineKind::Qemu,
        profile: "tcg".into(),
        engine_version: "measured".into(),
        cpu_model: "max".into(),
        features: vec![],
        tsc_khz: 1,
        vcpus: 1,
        cmdline: String::new(),
        kernel_hash: String::new(),
        initrd_hash: String::new(),
    };
    let m = Manifest {
        session: SessionId([1; 16]),
        machine: Some(machine),
        state: vec![state_id],
        state_bytes: 50_000,
        memory,
        ..image.clone()
    };
    Ok(up.commit(&m.encode())?)
}

fn id_bytes(id: &ChunkId) -> &[u8] {
    &id.0[..24]
}
