//! Writes sealed objects into packs, one pack at a time, and hands each to the node.

use crate::host_link::HostLink;
use ks_proto::chunk::Codec;
use ks_proto::control::Fault;
use ks_proto::pack::PackBuilder;
use ks_proto::{ChunkId, ObjectKind};
use std::fs::File;
use std::io::Write;

/// A sealed object that waits to be written.
pub struct Sealed {
    /// What it is.
    pub kind: ObjectKind,
    /// Its name.
    pub id: ChunkId,
    /// Length of its plain bytes.
    pub plain_len: u32,
    /// How it is compressed.
    pub codec: Codec,
    /// The bytes to store.
    pub stored: Vec<u8>,
}

/// The packs of one checkpoint.
pub struct Packer<'a> {
    link: &'a dyn HostLink,
    domain: u32,
    open: Option<(PackBuilder, File)>,
    /// Bytes of all packs that are done.
    pub stored_bytes: u64,
    /// Called as NewPack, WritePack and PackDone begin.
    pub step: &'a dyn Fn(super::Step) -> Result<(), Fault>,
}

impl<'a> Packer<'a> {
    /// No pack yet: one is asked for with the first object.
    pub fn new(link: &'a dyn HostLink, domain: u32, step: &'a dyn Fn(super::Step) -> Result<(), Fault>) -> Self {
        Self { link, domain, open: None, stored_bytes: 0, step }
    }
    /// Appends an object.
    pub fn add(&mut self, object: &Sealed) -> Result<(), Fault> {
        let needed = (object.plain_len as usize).max(object.stored.len());
        if self.open.as_ref().is_some_and(|(b, _)| b.is_full_for(needed)) {
            self.finish()?;
        }
        if self.open.is_none() {
            (self.step)(super::Step::NewPack)?;
            let mut file = self.link.new_pack()?;
            let (builder, header) = PackBuilder::start(self.domain);
            write(&mut file, &header)?;
            self.open = Some((builder, file));
        }
        (self.step)(super::Step::WritePack)?;
        if let Some((builder, file)) = &mut self.open {
            builder.add_sealed(object.kind, object.codec, object.id, object.plain_len, &object.stored);
            write(file, &object.stored)?;
        }
        Ok(())
    }
    /// Finishes the open pack, if any; returns when the node has it synced.
    pub fn finish(&mut self) -> Result<(), Fault> {
        let Some((builder, mut file)) = self.open.take() else { return Ok(()) };
        let body = builder.len() as u64;
        let (tail, id, _) = builder.finish();
        write(&mut file, &tail)?;
        drop(file);
        (self.step)(super::Step::PackDone)?;
        let bytes = body + tail.len() as u64;
        self.link.pack_done(id, bytes)?;
        self.stored_bytes += bytes;
        Ok(())
    }
}

fn write(file: &mut File, bytes: &[u8]) -> Result<(), Fault> {
    file.write_all(bytes).map_err(|e| {
        let full = matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
        let (code, next) = if full { ("disk-full", "free space in the store") } else { ("internal", "see the node's log") };
        Fault::new(code, "write a pack", e.to_string(), next)
    })
}
