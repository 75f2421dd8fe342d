//! Tar streams and listings over an in-memory connection. Cases S4 and S5.

use std::{
    io::Read as _,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{MetadataExt as _, PermissionsExt as _, symlink},
    },
    path::Path,
};

use ks_proto::guest::{FileEntry, GuestAnswer, GuestRequest};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::testing::{Client, answer, connected, within};

/// Sends a tar stream; the code of the refusal if it fails.
async fn put(client: &Client, path: &Path, tar: &[u8]) -> Result<(), String> {
    let request = GuestRequest::PutTar { path: path.display().to_string() };
    let (mut reader, mut writer) = client.program(&request).await?;
    writer.write_all(tar).await.unwrap();
    writer.shutdown().await.unwrap();
    match within("the last answer", answer(&mut reader)).await {
        GuestAnswer::Ok {} => Ok(()),
        GuestAnswer::Refused { code, why, .. } => Err(format!("{code}: {why}")),
        other => panic!("{other:?}"),
    }
}

async fn get(client: &Client, path: &Path) -> Vec<u8> {
    let request = GuestRequest::GetTar { path: path.display().to_string() };
    let (mut reader, _writer) = client.program(&request).await.unwrap();
    let mut tar = Vec::new();
    within("the archive", reader.read_to_end(&mut tar)).await.unwrap();
    tar
}

fn header(kind: tar::EntryType, size: u64, mode: u32) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(mode);
    header.set_mtime(1_700_000_000);
    header.set_uid(4242);
    header
}

fn file(builder: &mut tar::Builder<Vec<u8>>, path: &str, data: &[u8], mode: u32) {
    let mut header = header(tar::EntryType::Regular, data.len() as u64, mode);
    builder.append_data(&mut header, path, data).unwrap();
}

fn link(builder: &mut tar::Builder<Vec<u8>>, kind: tar::EntryType, path: &str, target: &str) {
    builder.append_link(&mut header(kind, 0, 0o777), path, target).unwrap();
}

/// An entry whose name `tar` itself would refuse to write.
fn raw_name(builder: &mut tar::Builder<Vec<u8>>, name: &str, data: &[u8]) {
    let mut header = header(tar::EntryType::Regular, data.len() as u64, 0o644);
    header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
    header.set_cksum();
    builder.append(&header, data).unwrap();
}

#[tokio::test]
async fn everything_is_unpacked_as_packed() {
    let (dir, client) = connected();
    let to = dir.path().join("new/deep");
    let mut tar = tar::Builder::new(Vec::new());
    tar.append_data(&mut header(tar::EntryType::Directory, 0, 0o750), "d", std::io::empty()).unwrap();
    file(&mut tar, "d/run.sh", b"#!/bin/sh\n", 0o4755);
    file(&mut tar, "without/parent", b"x", 0o600);
    file(&mut tar, &format!("long/{}", "n".repeat(180)), b"long", 0o644);
    link(&mut tar, tar::EntryType::Symlink, "d/link", "/etc/passwd");
    link(&mut tar, tar::EntryType::Link, "hard", "d/run.sh");
    put(&client, &to, &tar.into_inner().unwrap()).await.unwrap();

    let script = to.join("d/run.sh").metadata().unwrap();
    assert_eq!(script.permissions().mode() & 0o7777, 0o755, "no set-id bits");
    assert_eq!((script.mtime(), script.nlink()), (1_700_000_000, 2));
    let made = to.join("d").metadata().unwrap();
    assert_eq!((made.permissions().mode() & 0o777, made.mtime()), (0o750, 1_700_000_000));
    assert_eq!(std::fs::read(to.join("without/parent")).unwrap(), b"x");
    assert_eq!(std::fs::read(to.join("long").join("n".repeat(180))).unwrap(), b"long");
    assert_eq!(std::fs::read_link(to.join("d/link")).unwrap(), Path::new("/etc/passwd"));
    let names: Vec<_> = std::fs::read_dir(to.join("d")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "no temporary files: {names:?}");
}

#[tokio::test]
async fn s4_nothing_is_written_outside() {
    let (dir, client) = connected();
    let outside = dir.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("victim"), "safe").unwrap();
    let to = dir.path().join("to");
    std::fs::create_dir(&to).unwrap();
    symlink("../outside", to.join("existing")).unwrap();
    symlink(outside.join("victim"), to.join("file-link")).unwrap();
    type Make = fn(&mut tar::Builder<Vec<u8>>);
    let cases: [(&str, Make); 7] = [
        ("dots", |t| raw_name(t, "../outside/victim", b"hit")),
        ("inner dots", |t| raw_name(t, "a/../../outside/victim", b"hit")),
        ("absolute", |t| raw_name(t, "/tmp/ks-guest-test-absolute", b"hit")),
        ("a link that was there", |t| file(t, "existing/victim", b"hit", 0o644)),
        ("two chained links", |t| {
            link(t, tar::EntryType::Symlink, "one", ".");
            link(t, tar::EntryType::Symlink, "one/two", "../outside");
            file(t, "two/victim", b"hit", 0o644);
        }),
        ("a hard link to outside", |t| {
            link(t, tar::EntryType::Link, "h", "existing/victim");
        }),
        ("a device", |t| {
            t.append_data(&mut header(tar::EntryType::Char, 0, 0o666), "dev", std::io::empty()).unwrap();
        }),
    ];
    for (name, make) in cases {
        let mut tar = tar::Builder::new(Vec::new());
        make(&mut tar);
        let refused = put(&client, &to, &tar.into_inner().unwrap()).await.unwrap_err();
        assert!(refused.starts_with("bad-request"), "{name}: {refused}");
        assert_eq!(std::fs::read(outside.join("victim")).unwrap(), b"safe", "{name}");
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1, "{name}");
    }
    assert!(!Path::new("/tmp/ks-guest-test-absolute").exists());

    // A file in place of a link replaces the link, not what it points to.
    let mut tar = tar::Builder::new(Vec::new());
    file(&mut tar, "file-link", b"new", 0o644);
    put(&client, &to, &tar.into_inner().unwrap()).await.unwrap();
    assert!(to.join("file-link").symlink_metadata().unwrap().is_file());
    assert_eq!(std::fs::read(outside.join("victim")).unwrap(), b"safe");
}

#[tokio::test]
async fn a_cut_archive_leaves_the_old_file() {
    let (dir, client) = connected();
    std::fs::write(dir.path().join("f"), "old").unwrap();
    let mut tar = tar::Builder::new(Vec::new());
    file(&mut tar, "f", &[7; 5000], 0o644);
    let whole = tar.into_inner().unwrap();
    for keep in [0, 512, 600, 512 + 5000] {
        let refused = put(&client, dir.path(), &whole[..keep]).await.unwrap_err();
        assert!(refused.contains("cut off") || refused.contains("EOF"), "{keep}: {refused}");
        let now = std::fs::read(dir.path().join("f")).unwrap();
        assert!(now == b"old" || keep > 5512 - 1 && now == [7; 5000], "{keep}: half a file");
        assert!(!std::fs::read_dir(dir.path()).unwrap().any(|e| e.unwrap().file_name().to_string_lossy().starts_with(".ks-")));
    }
}

#[tokio::test]
async fn after_a_failure_the_rest_is_taken_and_the_answer_read() {
    let (dir, client) = connected();
    let mut tar = tar::Builder::new(Vec::new());
    raw_name(&mut tar, "../x", b"");
    file(&mut tar, "big", &vec![1; 3_000_000], 0o644);
    let refused = put(&client, &dir.path().join("to"), &tar.into_inner().unwrap()).await.unwrap_err();
    assert!(refused.contains("../x"), "{refused}");
}

#[tokio::test]
async fn s5_sparse_files_stay_sparse_both_ways() {
    let (dir, client) = connected();
    let big = dir.path().join("from");
    std::fs::create_dir(&big).unwrap();
    let f = std::fs::File::create(big.join("sparse")).unwrap();
    f.set_len(20 << 30).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&f, b"middle", 10 << 30).unwrap();
    drop(f);
    let tar = get(&client, &big).await;
    assert!(tar.len() < 1 << 20, "{} bytes for a file of holes", tar.len());

    // And a plain archive with zeros in it.
    let mut zeros = tar::Builder::new(Vec::new());
    file(&mut zeros, "zeros", &vec![0; 4 << 20], 0o644);
    put(&client, &dir.path().join("to"), &zeros.into_inner().unwrap()).await.unwrap();
    let made = dir.path().join("to/zeros").metadata().unwrap();
    assert_eq!(made.len(), 4 << 20);
    assert!(made.blocks() * 512 < 1 << 20, "{} blocks", made.blocks());
}

#[tokio::test]
async fn a_directory_comes_back_as_it_is() {
    let (dir, client) = connected();
    let from = dir.path().join("from");
    std::fs::create_dir_all(from.join("sub/empty")).unwrap();
    let mut noise = vec![0; 300_000];
    getrandom::fill(&mut noise).unwrap();
    std::fs::write(from.join("sub/data"), &noise).unwrap();
    symlink("nowhere", from.join("dangling")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(from.join("socket")).unwrap();
    let tar = get(&client, &from).await;
    let mut archive = tar::Archive::new(tar.as_slice());
    let mut names = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().display().to_string();
        if name == "sub/data" {
            let mut data = Vec::new();
            entry.read_to_end(&mut data).unwrap();
            assert!(data == noise);
        }
        names.push(name);
    }
    assert_eq!(names, ["dangling", "sub", "sub/data", "sub/empty"]);
    put(&client, &dir.path().join("back"), &tar).await.unwrap();
    assert!(std::fs::read(dir.path().join("back/sub/data")).unwrap() == noise);
}

#[tokio::test]
async fn a_file_becomes_an_archive_of_one() {
    let (dir, client) = connected();
    std::fs::write(dir.path().join("f"), "data").unwrap();
    let tar = get(&client, &dir.path().join("f")).await;
    let mut archive = tar::Archive::new(tar.as_slice());
    let names: Vec<_> = archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().display().to_string()).collect();
    assert_eq!(names, ["f"]);
}

#[tokio::test]
async fn what_is_not_there_is_not_found() {
    let (dir, client) = connected();
    let path = dir.path().join("none").display().to_string();
    for request in [GuestRequest::GetTar { path: path.clone() }, listing(path)] {
        assert_eq!(client.program(&request).await.err().as_deref(), Some("not-found"));
    }
    let relative = GuestRequest::GetTar { path: "etc".into() };
    assert_eq!(client.program(&relative).await.err().as_deref(), Some("bad-request"));
}

fn listing(path: String) -> GuestRequest {
    GuestRequest::ListFiles { path, hash: true, paths: vec![] }
}

async fn list(client: &Client, request: &GuestRequest) -> Vec<FileEntry> {
    let (mut reader, _writer) = client.program(request).await.unwrap();
    let mut text = String::new();
    within("the listing", reader.read_to_string(&mut text)).await.unwrap();
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[tokio::test]
async fn a_listing_has_sizes_and_hashes_in_order() {
    let (dir, client) = connected();
    let root = dir.path().join("root");
    std::fs::create_dir_all(root.join("b")).unwrap();
    std::fs::write(root.join("b/file"), "contents").unwrap();
    symlink("b/file", root.join("a")).unwrap();
    let entries = list(&client, &listing(root.display().to_string())).await;
    assert_eq!(entries.len(), 2);
    assert_eq!(entries[0].path, root.join("a").display().to_string());
    assert_eq!(entries[0].hash, blake3::hash(b"b/file").to_hex().to_string());
    assert_eq!((entries[1].bytes, entries[1].hash.as_str()), (8, blake3::hash(b"contents").to_hex().as_str()));
}

#[tokio::test]
async fn a_listing_without_hashes_tells_times_and_inodes_and_opens_nothing() {
    let (dir, client) = connected();
    let root = dir.path().join("root");
    std::fs::create_dir(&root).unwrap();
    std::fs::write(root.join("f"), "contents").unwrap();
    let odd = root.join(std::ffi::OsStr::from_bytes(b"odd\xff"));
    std::fs::write(&odd, "odd").unwrap();
    let long_ago = std::time::UNIX_EPOCH + std::time::Duration::new(1_700_000_000, 5);
    let f = std::fs::File::options().write(true).open(root.join("f")).unwrap();
    f.set_times(std::fs::FileTimes::new().set_accessed(long_ago).set_modified(long_ago)).unwrap();
    drop(f);
    let request = GuestRequest::ListFiles { path: root.display().to_string(), hash: false, paths: vec![] };
    let entries = list(&client, &request).await;
    let m = root.join("f").symlink_metadata().unwrap();
    assert_eq!((m.atime(), m.atime_nsec()), (1_700_000_000, 5), "it was not read");
    let ctime = m.ctime() * 1_000_000_000 + m.ctime_nsec();
    let [f, odd] = &entries[..] else { panic!("{entries:?}") };
    assert_eq!((f.bytes, f.hash.as_str(), f.mode, f.ino), (8, "", m.mode(), m.ino()));
    assert_eq!((f.mtime_ns, f.ctime_ns), (1_700_000_000_000_000_005, ctime));
    assert_eq!(odd.hash, blake3::hash(b"odd").to_hex().to_string(), "it cannot be asked for by name");
}

#[tokio::test]
async fn only_what_is_asked_for_is_hashed() {
    let (dir, client) = connected();
    let at = |name: &str| dir.path().join(name).display().to_string();
    for name in ["a", "b", "c"] {
        std::fs::write(at(name), name).unwrap();
    }
    std::fs::create_dir(at("folder")).unwrap();
    let ask = |paths| GuestRequest::ListFiles { path: "/".into(), hash: true, paths };
    let entries = list(&client, &ask(vec![at("c"), at("gone"), at("folder"), at("a")])).await;
    let got: Vec<_> = entries.iter().map(|e| (e.path.clone(), e.hash.clone())).collect();
    assert_eq!(got, ["c", "a"].map(|n| (at(n), blake3::hash(n.as_bytes()).to_hex().to_string())));
    let refused = client.program(&ask(vec![at("a"), "b".into()])).await.err();
    assert_eq!(refused.as_deref(), Some("bad-request"), "a path that is not absolute");
}
