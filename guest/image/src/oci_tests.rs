//! Tests of archives made on the spot: whiteouts, digests, traversal, both layouts and compressions.

use super::*;

struct Member<'a> {
    name: &'a str,
    kind: tar::EntryType,
    body: &'a str,
}

fn file<'a>(name: &'a str, body: &'a str) -> Member<'a> {
    Member { name, kind: tar::EntryType::Regular, body }
}

fn dir(name: &str) -> Member<'_> {
    Member { name, kind: tar::EntryType::Directory, body: "" }
}

fn symlink<'a>(name: &'a str, target: &'a str) -> Member<'a> {
    Member { name, kind: tar::EntryType::Symlink, body: target }
}

fn hard_link<'a>(name: &'a str, target: &'a str) -> Member<'a> {
    Member { name, kind: tar::EntryType::Link, body: target }
}

/// A tar with names as given, even hostile ones.
fn layer(entries: &[Member<'_>]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for e in entries {
        let mut header = tar::Header::new_ustar();
        header.as_mut_bytes()[..e.name.len()].copy_from_slice(e.name.as_bytes());
        header.set_entry_type(e.kind);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_mode(if e.kind.is_dir() { 0o755 } else { 0o644 });
        let link = matches!(e.kind, tar::EntryType::Symlink | tar::EntryType::Link);
        if link {
            header.as_mut_bytes()[157..157 + e.body.len()].copy_from_slice(e.body.as_bytes());
        }
        let body = if link { "" } else { e.body };
        header.set_size(body.len() as u64);
        header.set_cksum();
        tar.append(&header, body.as_bytes()).unwrap();
    }
    tar.into_inner().unwrap()
}

fn sha(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn archive(files: &[(String, Vec<u8>)]) -> tempfile::NamedTempFile {
    let out = tempfile::NamedTempFile::new().unwrap();
    let mut tar = tar::Builder::new(out.reopen().unwrap());
    for (name, body) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(body.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        tar.append_data(&mut header, name, body.as_slice()).unwrap();
    }
    tar.finish().unwrap();
    out
}

fn config(layers: &[Vec<u8>]) -> Vec<u8> {
    let ids: Vec<String> = layers.iter().map(|l| format!("sha256:{}", sha(l))).collect();
    serde_json::to_vec(&serde_json::json!({
        "architecture": "amd64", "os": "linux", "config": {"Env": ["A=b"]},
        "rootfs": {"type": "layers", "diff_ids": ids},
    }))
    .unwrap()
}

/// An oci-layout with the plain `layers`, each stored as `pack` makes it.
fn oci_files(layers: &[Vec<u8>], pack: fn(&[u8]) -> Vec<u8>) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    let mut blob = |bytes: Vec<u8>, media_type: &str| {
        let digest = sha(&bytes);
        let size = bytes.len();
        files.push((format!("blobs/sha256/{digest}"), bytes));
        serde_json::json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size})
    };
    let config = blob(config(layers), "application/vnd.oci.image.config.v1+json");
    let layers: Vec<_> = layers.iter().map(|l| blob(pack(l), "application/vnd.oci.image.layer.v1.tar")).collect();
    let manifest = serde_json::to_vec(&serde_json::json!({"config": config, "layers": layers})).unwrap();
    let manifest = blob(manifest, "application/vnd.oci.image.manifest.v1+json");
    files.push(("index.json".into(), serde_json::to_vec(&serde_json::json!({"manifests": [manifest]})).unwrap()));
    files
}

fn plain(bytes: &[u8]) -> Vec<u8> {
    bytes.to_vec()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd_pack(bytes: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(bytes, 1).unwrap()
}

struct Unpacked {
    tree: tempfile::TempDir,
    result: Result<Vec<String>, OciError>,
}

fn unpack_files(files: &[(String, Vec<u8>)]) -> Unpacked {
    let tree = tempfile::tempdir().unwrap();
    let root = tree.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let staging = Staging::open(&root).unwrap();
    let result = unpack(archive(files).path(), &staging, 1 << 20);
    Unpacked { tree, result }
}

fn unpack_layers(layers: &[Vec<u8>]) -> Unpacked {
    unpack_files(&oci_files(layers, plain))
}

impl Unpacked {
    fn ok(self) -> Self {
        self.result.as_ref().unwrap();
        self
    }

    fn read(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.tree.path().join("root").join(name)).ok()
    }

    /// Refused, and nothing beside the tree.
    fn refused(self) -> OciError {
        let outside: Vec<_> = std::fs::read_dir(self.tree.path()).unwrap().collect();
        assert_eq!(outside.len(), 1, "wrote outside of the tree");
        self.result.unwrap_err()
    }
}

#[test]
fn layers_stack_in_all_compressions() {
    let layers = [layer(&[dir("etc/"), file("etc/a", "1"), file("b", "1")]), layer(&[file("etc/a", "2")])];
    for pack in [plain, gzip, zstd_pack] {
        let got = unpack_files(&oci_files(&layers, pack)).ok();
        assert_eq!((got.read("etc/a").unwrap(), got.read("b").unwrap()), ("2".into(), "1".into()));
        assert_eq!(got.result.unwrap(), ["A=b"]);
    }
}

#[test]
fn a_whiteout_hides_the_lower_file_only() {
    let got = unpack_layers(&[
        layer(&[file("d/a", "1"), file("d/b", "1"), file("e/c", "1")]),
        layer(&[file("d/.wh.a", ""), file(".wh.e", ""), file("d/b", "2"), file("d/.wh.b", "")]),
    ])
    .ok();
    assert_eq!(got.read("d/a"), None);
    assert_eq!(got.read("e/c"), None);
    assert_eq!(got.read("d/b").as_deref(), Some("2"), "a layer's own file survives its whiteout");
    assert_eq!(got.read("d/.wh.a"), None);
}

#[test]
fn an_opaque_directory_hides_all_of_lower_layers_in_any_order() {
    for marker_first in [true, false] {
        let mut upper = vec![file("d/new", "2"), file("d/sub/new", "2")];
        upper.insert(if marker_first { 0 } else { 2 }, file("d/.wh..wh..opq", ""));
        let got = unpack_layers(&[layer(&[file("d/old", "1"), file("d/sub/old", "1")]), layer(&upper)]).ok();
        assert_eq!(got.read("d/old"), None);
        assert_eq!(got.read("d/sub/old"), None);
        assert_eq!(got.read("d/new").as_deref(), Some("2"));
        assert_eq!(got.read("d/sub/new").as_deref(), Some("2"));
    }
}

#[test]
fn names_that_lead_out_are_refused() {
    for name in ["../evil", "a/../../evil", "/evil", ".."] {
        let error = unpack_layers(&[layer(&[file(name, "x")])]).refused();
        assert!(matches!(error, OciError::BadPath { .. }), "{name}: {error}");
    }
    for target in ["../../etc/passwd", "/etc/passwd"] {
        let error = unpack_layers(&[layer(&[hard_link("p", target)])]).refused();
        assert!(matches!(error, OciError::BadPath { .. }), "{target}: {error}");
    }
}

#[test]
fn symlinks_never_lead_out_of_the_tree() {
    let outside = tempfile::tempdir().unwrap();
    let target = outside.path().to_str().unwrap().to_owned();
    let victim = outside.path().join("victim");
    std::fs::write(&victim, "mine").unwrap();
    for link in [target.clone(), format!("../../../../../../../../{target}")] {
        // A file through the link, the link itself as a file, a whiteout and an opaque mark through it.
        for entry in ["l/victim", "l/.wh.victim", "l/.wh..wh..opq", "l/new"] {
            let got = unpack_layers(&[layer(&[symlink("l", &link)]), layer(&[file(entry, "x")])]);
            drop(got.result);
            assert_eq!(std::fs::read_to_string(&victim).unwrap(), "mine");
            assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 1, "{entry} through {link}");
        }
    }
    let link = victim.to_str().unwrap();
    let got = unpack_layers(&[layer(&[symlink("f", link), file("f", "x")])]).ok();
    assert_eq!(got.read("f").as_deref(), Some("x"));
    let got = unpack_layers(&[layer(&[symlink("f", link), hard_link("g", "f")])]).ok();
    assert!(got.tree.path().join("root/g").is_symlink(), "a hard link to a symlink is the symlink");
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "mine");
}

#[test]
fn a_link_inside_the_tree_is_followed_for_parents() {
    let got = unpack_layers(&[
        layer(&[dir("usr/bin/"), symlink("bin", "/usr/bin")]),
        layer(&[file("bin/tool", "t"), hard_link("usr/bin/same", "bin/tool")]),
    ])
    .ok();
    assert_eq!(got.read("usr/bin/tool").as_deref(), Some("t"));
    assert_eq!(got.read("usr/bin/same").as_deref(), Some("t"));
}

#[test]
fn a_changed_byte_is_refused() {
    let mut files = oci_files(&[layer(&[file("a", "1")])], plain);
    let original = files.clone();
    for i in 0..files.len() - 1 {
        let at = files[i].1.len() / 2;
        files[i].1[at] ^= 1;
        assert!(matches!(unpack_files(&files).refused(), OciError::Digest { .. }), "{}", files[i].0);
        files = original.clone();
    }
    files[1].1.push(0);
    assert!(matches!(unpack_files(&files).refused(), OciError::Digest { .. }), "a longer blob");
}

#[test]
fn a_layer_that_differs_from_its_diff_id_is_refused() {
    let (told, brought) = (layer(&[file("a", "1")]), layer(&[file("a", "2")]));
    let config = config(&[told]);
    let name = format!("{}.json", sha(&config));
    let manifest = serde_json::json!([{"Config": name, "Layers": ["l/layer.tar"]}]);
    let files = [
        ("manifest.json".to_owned(), serde_json::to_vec(&manifest).unwrap()),
        (name, config),
        ("l/layer.tar".to_owned(), brought),
    ];
    assert!(matches!(unpack_files(&files).refused(), OciError::Digest { .. }));
}

#[test]
fn docker_save_archives_unpack() {
    let layers = [layer(&[file("a", "1"), file("b", "1")]), layer(&[file(".wh.a", "")])];
    let config = config(&layers);
    let name = format!("{}.json", sha(&config));
    let manifest = serde_json::json!([{"Config": name, "RepoTags": ["x:1"], "Layers": ["0/layer.tar", "1/layer.tar"]}]);
    let files = [
        ("0/layer.tar".to_owned(), layers[0].clone()),
        ("1/layer.tar".to_owned(), layers[1].clone()),
        (name, config),
        ("manifest.json".to_owned(), serde_json::to_vec(&manifest).unwrap()),
    ];
    let got = unpack_files(&files).ok();
    assert_eq!((got.read("a"), got.read("b").as_deref()), (None, Some("1")));
}

#[test]
fn other_platforms_and_other_files_are_refused() {
    let index = serde_json::json!({"manifests": [{
        "mediaType": "application/vnd.oci.image.manifest.v1+json", "size": 2,
        "digest": format!("sha256:{}", sha(b"{}")), "platform": {"os": "linux", "architecture": "arm64"},
    }]});
    let files = [("index.json".to_owned(), serde_json::to_vec(&index).unwrap())];
    let error = unpack_files(&files).refused();
    assert!(error.to_string().contains("linux/arm64"), "{error}");
    assert!(matches!(unpack_files(&[("x".to_owned(), vec![])]).refused(), OciError::NotAnImage));
}

#[test]
fn more_than_the_limit_is_refused() {
    let big = "x".repeat(2 << 20);
    let error = unpack_files(&oci_files(&[layer(&[file("a", &big)])], gzip)).refused();
    assert!(matches!(error, OciError::TooBig { .. }), "{error}");
}

#[test]
fn cut_off_archives_are_errors_or_whole() {
    let whole = archive(&oci_files(&[layer(&[file("a", "1")])], gzip));
    let bytes = std::fs::read(whole.path()).unwrap();
    let tree = tempfile::tempdir().unwrap();
    let staging = Staging::open(tree.path()).unwrap();
    for len in (0..bytes.len() - 1024).step_by(97) {
        let cut = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(cut.path(), &bytes[..len]).unwrap();
        // Only padding may be missing from an archive that is still taken.
        if unpack(cut.path(), &staging, 1 << 20).is_ok() {
            assert_eq!(std::fs::read_to_string(tree.path().join("a")).unwrap(), "1", "{len}");
            assert!(len > bytes.len() - 2048, "{len} of {}", bytes.len());
        }
    }
}
