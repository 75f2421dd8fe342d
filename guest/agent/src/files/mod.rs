//! Files in and out of the guest: tar streams and listings. All disk work is on blocking threads, joined to the
//! stream by short bounded queues.

use std::{io, sync::Arc};

use ks_proto::guest::GuestAnswer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::{
    agent::Agent,
    exec::Account,
    refusal::Refusal,
    wire::{self, Reader, Writer},
};

mod beneath;
mod bridge;
mod list;
mod pack;
mod unpack;

/// Pieces in a queue between the stream and a blocking thread.
const QUEUE_PIECES: usize = 4;
const PIECE_BYTES: usize = 32 * 1024;

/// Unpacks a tar stream below `path`; answers when it may begin and when it is done.
pub async fn put(agent: &Arc<Agent>, path: &str, mut reader: Reader, writer: &mut Writer) -> io::Result<()> {
    let owner = if agent.in_vm { Account::resolve(None).ok().map(|a| (a.uid, a.gid)) } else { None };
    let target = match absolute(path) {
        Ok(()) => unpack::Target::open(path.as_ref(), owner).map_err(|e| Refusal::io(format!("unpack into {path}"), e)),
        Err(refusal) => Err(refusal),
    };
    let target = match target {
        Ok(target) => target,
        Err(refusal) => return refuse(writer, refusal).await,
    };
    wire::write_answer(writer, &GuestAnswer::Ok {}).await?;
    let (pieces, source) = bridge::incoming(QUEUE_PIECES);
    let unpacking = tokio::task::spawn_blocking(move || target.unpack(source));
    let fed = feed(&mut reader, pieces).await;
    let unpacked = unpacking.await.map_err(io::Error::other)?;
    fed?;
    let answer = match unpacked {
        Ok(()) => GuestAnswer::Ok {},
        Err(e) => {
            let code = if e.kind() == io::ErrorKind::InvalidData { "bad-request" } else { "io" };
            let next = "files before the failing entry are in place; mend it and send again";
            Refusal::new(code, format!("unpack into {path}"), e.to_string(), next).into()
        }
    };
    wire::write_answer(writer, &answer).await?;
    writer.shutdown().await
}

/// Feeds the stream to the blocking side until its end. What comes after that side gave up is read and dropped, so
/// that the node gets to read the answer.
async fn feed(reader: &mut Reader, pieces: bridge::Pieces) -> io::Result<()> {
    let mut pieces = Some(pieces);
    loop {
        let mut piece = vec![0; PIECE_BYTES];
        let n = reader.read(&mut piece).await?;
        if n == 0 {
            if reader.is_gone() {
                // Not an end but a lost stream: the archive must not look complete.
                if let Some(pieces) = pieces {
                    pieces.fail().await;
                }
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            return Ok(());
        }
        piece.truncate(n);
        if let Some(live) = &pieces
            && live.send(piece).await.is_err()
        {
            pieces = None;
        }
    }
}

/// Packs `path` into a tar stream. A failure in the middle cuts the stream without the archive's end.
pub async fn get(path: &str, writer: &mut Writer) -> io::Result<()> {
    let source = match absolute(path) {
        Ok(()) => pack::Source::open(path.as_ref()).map_err(|e| not_readable(path, e)),
        Err(refusal) => Err(refusal),
    };
    match source {
        Ok(source) => stream_out(writer, format!("packing {path}"), move |sink| source.pack(sink)).await,
        Err(refusal) => refuse(writer, refusal).await,
    }
}

/// Lists all regular files and links below `path`, or those in `paths`, as NDJSON.
pub async fn list(path: &str, hash: bool, paths: Vec<String>, writer: &mut Writer) -> io::Result<()> {
    let listing = match std::iter::once(path).chain(paths.iter().map(String::as_str)).try_for_each(absolute) {
        Ok(()) if paths.is_empty() => list::Listing::below(path.as_ref(), hash).map_err(|e| not_readable(path, e)),
        Ok(()) => Ok(list::Listing::of(paths, hash)),
        Err(refusal) => Err(refusal),
    };
    match listing {
        Ok(listing) => stream_out(writer, format!("listing {path}"), move |sink| listing.write(sink)).await,
        Err(refusal) => refuse(writer, refusal).await,
    }
}

async fn stream_out<F>(writer: &mut Writer, what: String, produce: F) -> io::Result<()>
where
    F: FnOnce(bridge::Sink) -> io::Result<()> + Send + 'static,
{
    wire::write_answer(writer, &GuestAnswer::Ok {}).await?;
    let (sink, mut pieces) = bridge::outgoing(QUEUE_PIECES, PIECE_BYTES);
    let producing = tokio::task::spawn_blocking(move || produce(sink));
    while let Some(piece) = pieces.recv().await {
        // An error drops the receiver, which ends the blocking side too.
        writer.write_all(&piece).await?;
        writer.flush().await?;
    }
    match producing.await.map_err(io::Error::other)? {
        Ok(()) => writer.shutdown().await,
        Err(why) => {
            // Dropped without a close, the stream is reset: the node sees a cut, never a short success.
            crate::log::line(&format!("{what}: {why}"));
            Err(why)
        }
    }
}

async fn refuse(writer: &mut Writer, refusal: Refusal) -> io::Result<()> {
    wire::write_answer(writer, &refusal.into()).await?;
    writer.shutdown().await
}

fn absolute(path: &str) -> Result<(), Refusal> {
    if path.starts_with('/') && !path.contains('\0') {
        return Ok(());
    }
    Err(Refusal::bad(format!("use the path {path:?}"), "it is not absolute"))
}

fn not_readable(path: &str, e: io::Error) -> Refusal {
    if e.kind() == io::ErrorKind::NotFound {
        let next = "check the path with `ks exec SESSION -- ls`";
        return Refusal::new("not-found", format!("read {path}"), "there is no such file or directory", next);
    }
    Refusal::io(format!("read {path}"), e)
}

#[cfg(test)]
mod tests;
