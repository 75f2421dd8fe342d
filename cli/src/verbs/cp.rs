//! `ks cp`: files between here and a session.

use crate::args;
use crate::failure::{Failure, Res};
use crate::host::files::{self, Item};
use crate::host::http::{Node, encode};
use crate::host::link::{self, Incoming};
use crate::host::{tarball, unpack};
use crate::human;
use crate::output::Ctx;
use crate::target::{Place, place};
use futures::StreamExt;
use ks_proto::api::ExecStart;
use ks_proto::guest::ExecFrame;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use tokio::sync::mpsc;

/// Copies.
pub async fn run(ctx: &Ctx, a: &args::Cp) -> Res<u8> {
    match (place(&a.from)?, place(&a.to)?) {
        (Place::Here(from), Place::There { session, path }) => put(ctx, Path::new(&from), &session, &path).await,
        (Place::There { session, path }, Place::Here(to)) => get(ctx, &session, &path, &to).await,
        (Place::Here(_), Place::Here(_)) => {
            Err(Failure::usage("neither side is in a session", "both are paths here", "write one as SESSION:PATH"))
        }
        (Place::There { .. }, Place::There { .. }) => {
            Err(Failure::usage("both sides are in a session", "ks copies between here and a session", "copy to here first"))
        }
    }
}

/// Is this path a folder in the session?
async fn is_folder(node: &Node, session: &str, path: &str) -> Res<bool> {
    let start =
        ExecStart { argv: ["test", "-d", path].map(str::to_owned).to_vec(), cwd: Some("/".into()), ..ExecStart::default() };
    let (_tx, mut rx) = link::open(node, session, "exec", &start).await?;
    loop {
        match rx.next().await {
            Incoming::Frame(ExecFrame::Exit { code, .. }) => return Ok(code == 0),
            Incoming::Frame(_) => {}
            Incoming::Refused(e) => return Err(e.into()),
            Incoming::Lost(why) => return Err(Failure::link_lost(format!("looking at {session}:{path}"), why)),
        }
    }
}

fn split(path: &str) -> Option<(&str, &str)> {
    let path = path.trim_end_matches('/');
    let (dir, name) = path.rsplit_once('/')?;
    (!name.is_empty() && name != "." && name != "..").then_some((if dir.is_empty() { "/" } else { dir }, name))
}

async fn put(ctx: &Ctx, from: &Path, session: &str, path: &str) -> Res<u8> {
    let bad = |e: io::Error| {
        Failure::usage(format!("cannot copy {}", from.display()), e.to_string(), "name a file or folder that exists")
    };
    let meta = from.symlink_metadata().map_err(bad)?;
    let node = Node::find(ctx)?;
    // As `cp -r` does: into a folder that is there, else to that very name.
    let own = from.canonicalize().ok().and_then(|p| p.file_name().map(|n| n.to_string_lossy().into_owned()));
    let own = if meta.is_symlink() { from.file_name().map(|n| n.to_string_lossy().into_owned()) } else { own };
    let into = path.ends_with('/') || is_folder(&node, session, path).await?;
    let (dir, name) = match (into, own, split(path)) {
        (true, Some(own), _) => (path.to_owned(), own),
        (false, _, Some((dir, name))) => (dir.to_owned(), name.to_owned()),
        _ => return Err(Failure::usage(format!("cannot copy to {path:?}"), "it names no file", "write SESSION:/folder/name")),
    };
    let mut items = BTreeMap::new();
    let root = PathBuf::from(&name);
    if meta.is_dir() {
        files::whole(from, &root, &mut items)?;
    } else {
        items.insert(root, Item { source: from.to_path_buf(), bytes: meta.len() });
    }
    let (files, bytes) = (items.len() as u64, items.values().map(|i| i.bytes).sum::<u64>());
    send(ctx, &node, session, &dir, items).await?;
    let to = format!("{session}:{}/{name}", dir.trim_end_matches('/'));
    ctx.result(
        &json!({"schema": "ks.cp.v1", "from": from.display().to_string(), "to": to, "files": files, "bytes": bytes}),
        || format!("{} -> {to}  {} {}\n", from.display(), human::count(files, "file"), human::mib(bytes)),
    )?;
    Ok(0)
}

/// Sends items beneath a folder of the session, with a bar.
pub async fn send(ctx: &Ctx, node: &Node, session: &str, dir: &str, items: BTreeMap<PathBuf, Item>) -> Res<()> {
    let total = items.values().map(|i| i.bytes).sum::<u64>();
    let mut bar = ctx.bar();
    let mut done = 0;
    let what = format!("to {session}:{dir}");
    let stream = tarball::stream(items, move |bytes| {
        done += bytes;
        bar.step(&what, done, total);
    });
    node.put_stream(&format!("/v1/sessions/{session}/files?path={}", encode(dir)), stream).await
}

/// A byte stream as a blocking reader.
struct Reader {
    rx: mpsc::Receiver<io::Result<Vec<u8>>>,
    part: io::Cursor<Vec<u8>>,
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.part.read(buffer)? {
                0 => match self.rx.blocking_recv() {
                    Some(part) => self.part = io::Cursor::new(part?),
                    None => return Ok(0),
                },
                n => return Ok(n),
            }
        }
    }
}

async fn get(ctx: &Ctx, session: &str, path: &str, to: &str) -> Res<u8> {
    let node = Node::find(ctx)?;
    let folder = is_folder(&node, session, path).await?;
    let target = Path::new(to);
    let into = to.ends_with('/') || target.is_dir();
    let name = split(path).map(|(_, n)| n.to_owned());
    let target = match (into, name) {
        (true, Some(n)) => target.join(n),
        (true, None) | (false, _) => target.to_path_buf(),
    };
    let (root, only) = match (folder, target.file_name()) {
        (true, _) => (target.clone(), None),
        (false, Some(n)) => (parent(&target), Some(PathBuf::from(n))),
        (false, None) => {
            return Err(Failure::usage(format!("cannot copy to {to:?}"), "it names no file", "name a file or folder here"));
        }
    };
    let stream = node.get_stream(&format!("/v1/sessions/{session}/files?path={}", encode(path))).await?;
    let (tx, rx) = mpsc::channel(4);
    let work = tokio::task::spawn_blocking(move || {
        let mut reader = Reader { rx, part: io::Cursor::new(vec![]) };
        unpack::unpack(&mut reader, &root, only.as_deref())
    });
    let mut bar = ctx.bar();
    let mut done = 0;
    futures::pin_mut!(stream);
    while let Some(part) = stream.next().await {
        done += part.as_ref().map_or(0, |p| p.len() as u64);
        bar.step(&format!("from {session}:{path}, {}", human::mib(done)), 0, 0);
        if tx.send(part).await.is_err() {
            break;
        }
    }
    drop(tx);
    bar.clear();
    let what = || format!("cannot copy {session}:{path} to {}", target.display());
    let got = work.await.map_err(|e| Failure::local(what(), e, "report this"))?;
    let got = got.map_err(|e| Failure::local(what(), e, "what was whole is in place; nothing is half; try again"))?;
    for line in &got.left_out {
        ctx.note(&format!("left out {}", crate::table::clean(line)));
    }
    let shown = target.display().to_string();
    ctx.result(
        &json!({"schema": "ks.cp.v1", "from": format!("{session}:{path}"), "to": shown, "files": got.files, "bytes": got.bytes, "left_out": got.left_out}),
        || format!("{session}:{path} -> {shown}  {} {}\n", human::count(got.files, "file"), human::mib(got.bytes)),
    )?;
    Ok(0)
}

fn parent(p: &Path) -> PathBuf {
    p.parent().filter(|d| !d.as_os_str().is_empty()).map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_component_is_the_name() {
        assert_eq!(split("/a/b"), Some(("/a", "b")));
        assert_eq!(split("/a/b/"), Some(("/a", "b")));
        assert_eq!(split("/b"), Some(("/", "b")));
        assert_eq!(split("/"), None);
        assert_eq!(split("/a/.."), None);
    }
}
