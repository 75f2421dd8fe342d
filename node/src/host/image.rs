//! Images: made by `ks-image`, then taken into the chunk store; kernel and initramfs stay as files.

use super::engine::EngineChoice;
use super::files::random;
use super::process::libexec;
use super::vm::store_error;
use crate::node::Node;
use crate::progress::Steps;
use ks_blobs::IMAGE_DOMAIN;
use ks_proto::ImageId;
use ks_proto::api::{ApiError, Image};
use ks_raft::{Command, ImageRecord};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::io::{AsyncBufReadExt, AsyncReadExt};

/// The image that sessions get when none is named.
pub const DEFAULT: &str = "default";

/// Profile of an image for every engine but software KVM, and of images that say none.
const GENERAL: &str = "general";
/// Profile of an image for software KVM, and the name of its default image.
pub const SOFT: &str = "soft";

/// The profile called `text`; "" is `general`.
///
/// # Errors
/// `usage` for others.
pub fn profile(text: &str) -> Result<&'static str, ApiError> {
    match text {
        "" | GENERAL => Ok(GENERAL),
        SOFT => Ok(SOFT),
        other => {
            let why = format!("{other:?} is not general or soft");
            Err(ApiError::new("usage", "the image's profile", why, "use --profile general or soft"))
        }
    }
}

/// The image that a session gets when none is named, by the profile of its engine or of images for it.
pub fn default_for(profile: &str) -> &'static str {
    if profile == SOFT { SOFT } else { DEFAULT }
}

/// Checks that `image` is made for `engine`: on software KVM the distribution's kernel does not come up in a time that
/// anybody waits for, and the kernel for it lacks what other engines need.
///
/// # Errors
/// `incompatible`, with the image to take instead.
pub fn check_fits(image: &ImageRecord, engine: &EngineChoice) -> Result<(), ApiError> {
    let is = if image.profile.is_empty() { GENERAL } else { image.profile.as_str() };
    let needs = if engine.profile == SOFT { SOFT } else { GENERAL };
    if is == needs {
        return Ok(());
    }
    let why = format!("it has the profile {is}, and the {} engine ({}) needs one of {needs}", engine.engine, engine.profile);
    let next = match needs {
        SOFT => "leave --image out, use --engine qemu, or build one: ks image build --profile soft",
        _ => "leave --image out, or use --engine kvm on a host with software KVM",
    };
    Err(ApiError::new("incompatible", format!("image {} does not fit the engine", image.name), why, next))
}

/// Bytes between two steps that are told while a disk is stored.
const PROGRESS_BYTES: u64 = 64 << 20;

/// Folder of an image's kernel and initramfs.
pub fn image_dir(node: &Node, id: &ImageId) -> PathBuf {
    node.layout.images().join(id.to_hex())
}

/// What the node needs of `image.json`.
#[derive(serde::Deserialize)]
struct Info {
    id: String,
    #[serde(default)]
    kernel_release: String,
    #[serde(default)]
    cmdline: String,
    #[serde(default)]
    profile: String,
    root: Option<Root>,
}

#[derive(serde::Deserialize)]
struct Root {
    used_bytes: u64,
}

/// A line of `ks-image --json`.
#[derive(serde::Deserialize)]
struct Line {
    step: String,
    n: u64,
    of: u64,
    #[serde(default)]
    detail: String,
}

/// Runs `ks-image` with `args`, then takes the image in under `name`.
///
/// # Errors
/// The builder's own error text, or the store's.
pub async fn make(node: &Arc<Node>, name: &str, args: Vec<String>, steps: &Steps) -> Result<Image, ApiError> {
    let name = if name.is_empty() { DEFAULT } else { name };
    if name.parse::<ks_proto::SessionName>().is_err() {
        let why = format!("{name:?} has other characters than a-z, 0-9, '-' and '.'");
        return Err(ApiError::new("usage", "the image's name", why, "choose another name"));
    }
    let out = node.layout.tmp().join(format!("image-{}", hex::encode(random::<6>())));
    let result = match run_builder(name, args, &out, steps).await {
        Ok(()) => take_in(node, name, &out, steps).await,
        Err(e) => Err(e),
    };
    let _ = tokio::fs::remove_dir_all(&out).await;
    result
}

async fn run_builder(name: &str, mut args: Vec<String>, out: &Path, steps: &Steps) -> Result<(), ApiError> {
    args.extend(["--out".into(), out.display().to_string(), "--name".into(), name.into(), "--json".into()]);
    let program = libexec().join("ks-image");
    let mut c = tokio::process::Command::new(&program);
    c.args(&args).stdin(std::process::Stdio::null());
    c.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).kill_on_drop(true);
    let mut child = c.spawn().map_err(|e| {
        let next = "install KeepState's programs side by side, or set KS_LIBEXEC to their folder";
        ApiError::new("engine-missing", format!("cannot start {}", program.display()), e.to_string(), next)
    })?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let errors = tokio::spawn(async move {
        let mut text = Vec::new();
        if let Some(e) = stderr {
            let _ = e.take(1 << 20).read_to_end(&mut text).await;
        }
        String::from_utf8_lossy(&text).into_owned()
    });
    if let Some(o) = stdout {
        let mut lines = tokio::io::BufReader::new(o).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            if let Ok(l) = serde_json::from_str::<Line>(&line) {
                steps.step(format!("{}: {}", l.step, l.detail), l.n, l.of);
            }
        }
    }
    let status = child.wait().await.map_err(|e| ApiError::new("internal", "ks-image", e.to_string(), "try again"))?;
    if status.success() {
        return Ok(());
    }
    let text = errors.await.unwrap_or_default();
    let tail: Vec<&str> = text.lines().rev().take(12).collect();
    let why = tail.into_iter().rev().collect::<Vec<_>>().join("\n");
    Err(ApiError::new("internal", format!("the image was not made ({status})"), why, "mend that and try again"))
}

/// Takes an image directory (kernel, initrd, root.ext4, image.json) in under `name`.
///
/// # Errors
/// If a file is missing or the store refuses.
pub async fn take_in(node: &Arc<Node>, name: &str, dir: &Path, steps: &Steps) -> Result<Image, ApiError> {
    let (node, name, dir, steps) = (node.clone(), name.to_owned(), dir.to_owned(), steps.clone());
    let work = tokio::task::spawn_blocking(move || take_in_now(&node, &name, &dir, &steps));
    work.await.unwrap_or_else(|e| Err(ApiError::new("internal", "taking the image in", e.to_string(), "report this")))
}

fn take_in_now(node: &Arc<Node>, name: &str, dir: &Path, steps: &Steps) -> Result<Image, ApiError> {
    let bad = |what: String, e: &dyn std::fmt::Display| {
        ApiError::new("usage", what, e.to_string(), "build the image again: ks image build")
    };
    let json = dir.join("image.json");
    let text = std::fs::read_to_string(&json).map_err(|e| bad(format!("cannot read {}", json.display()), &e))?;
    let info: Info = serde_json::from_str(&text).map_err(|e| bad(format!("{} is not an image's", json.display()), &e))?;
    let key = node.supply.keys.get(IMAGE_DOMAIN).ok_or_else(|| bad("the key ring".into(), &"it has no key for images"))?;
    let root = dir.join("root.ext4");
    let disk = std::fs::File::open(&root).map_err(|e| bad(format!("cannot open {}", root.display()), &e))?;
    let disk_bytes = disk.metadata().map_err(|e| bad(root.display().to_string(), &e))?.len();
    let mut shown = 0;
    let mut progress = |done: u64, total: u64| {
        if done == total || done >= shown + PROGRESS_BYTES {
            shown = done;
            steps.step("storing the root disk", done, total);
        }
    };
    let taken = node.supply.store.ingest_disk(&disk, key, &mut progress).map_err(|e| store_error(&e))?;
    let (kernel, initrd) = (dir.join("kernel"), dir.join("initrd"));
    let id = content_id(&info, &kernel, &initrd, &taken.id).map_err(|e| bad("cannot read the kernel".into(), &e))?;
    let kept = image_dir(node, &id);
    keep_files(&kept, &[(&kernel, "kernel"), (&initrd, "initrd"), (&json, "image.json")])
        .map_err(|e| bad(format!("cannot keep the kernel in {}", kept.display()), &e))?;
    let image = ImageRecord {
        name: name.to_owned(),
        id,
        kernel: info.kernel_release,
        cmdline: info.cmdline,
        profile: profile(&info.profile)?.to_owned(),
        disk_bytes,
        disk_used_bytes: info.root.map_or(0, |r| r.used_bytes),
        disk: taken.id,
        created_unix_ms: super::clock::unix_ms(),
        holders: vec![node.fleet.number()],
    };
    node.state.apply(Command::PutImage { image: image.clone() })?;
    node.state.event("", "image", &format!("image {name} is {}", id.short()));
    Ok(listed(node, &image))
}

/// The builder's own content id, or one over what is here when it gives none.
fn content_id(info: &Info, kernel: &Path, initrd: &Path, disk: &ks_proto::CheckpointId) -> io::Result<ImageId> {
    if let Ok(id) = info.id.parse() {
        return Ok(id);
    }
    let mut h = blake3::Hasher::new();
    h.update(b"ks.image.v1\0").update(&disk.0).update(info.cmdline.as_bytes());
    h.update_reader(std::fs::File::open(kernel)?)?;
    match std::fs::File::open(initrd) {
        Ok(f) => drop(h.update_reader(f)?),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    Ok(ImageId(*h.finalize().as_bytes()))
}

fn keep_files(to: &Path, files: &[(&PathBuf, &str)]) -> io::Result<()> {
    let tmp = to.with_extension("new");
    let _ = std::fs::remove_dir_all(&tmp);
    std::fs::create_dir_all(&tmp)?;
    for (from, name) in files {
        match std::fs::copy(from, tmp.join(name)) {
            Ok(_) => std::fs::File::open(tmp.join(name))?.sync_all()?,
            Err(e) if e.kind() == io::ErrorKind::NotFound && *name == "initrd" => {}
            Err(e) => return Err(e),
        }
    }
    std::fs::File::open(&tmp)?.sync_all()?;
    if to.exists() {
        // The same content: replacing the files must not disturb a start that opens them now.
        for (_, name) in files.iter().filter(|(_, n)| tmp.join(n).exists()) {
            std::fs::rename(tmp.join(name), to.join(name))?;
        }
        std::fs::remove_dir_all(&tmp)?;
    } else {
        std::fs::rename(&tmp, to)?;
    }
    match to.parent() {
        Some(p) => std::fs::File::open(p)?.sync_all(),
        None => Ok(()),
    }
}

/// An image as the API lists it.
pub fn listed(node: &Node, i: &ImageRecord) -> Image {
    let golden = node.state.read().golden.iter().filter(|g| g.image_id == i.id).count() as u64;
    Image {
        schema: "ks.image.v1".into(),
        name: i.name.clone(),
        id: i.id.to_hex(),
        kernel: i.kernel.clone(),
        profile: if i.profile.is_empty() { GENERAL.to_owned() } else { i.profile.clone() },
        disk_bytes: i.disk_bytes,
        disk_used_bytes: i.disk_used_bytes,
        golden,
    }
}

/// The image called `name`.
///
/// # Errors
/// `not-found`, with how to make one.
pub fn find(node: &Node, name: &str) -> Result<ImageRecord, ApiError> {
    node.state.read().images.get(name).cloned().ok_or_else(|| {
        let why = format!("there is no image {name:?}");
        let next = match name {
            DEFAULT => "make it: ks image build (about two minutes)",
            SOFT => "make it: ks image build --profile soft (it compiles a kernel, about ten minutes)",
            _ => "ks image ls shows what there is",
        };
        ApiError::new("not-found", "the image is not there", why, next)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ks_proto::manifest::EngineKind;

    fn engine(engine: EngineKind, profile: &str) -> EngineChoice {
        EngineChoice { engine, profile: profile.into(), version: String::new(), why: String::new() }
    }
    fn image(profile: &str) -> ImageRecord {
        ImageRecord {
            name: "i".into(),
            id: ImageId([0; 32]),
            kernel: String::new(),
            cmdline: String::new(),
            profile: profile.into(),
            disk_bytes: 0,
            disk_used_bytes: 0,
            disk: ks_proto::CheckpointId([0; 32]),
            created_unix_ms: 0,
            holders: Vec::new(),
        }
    }

    #[test]
    fn software_kvm_takes_soft_images_only_and_other_engines_take_none_of_them() {
        let (soft, hardware, tcg) =
            (engine(EngineKind::Kvm, "soft"), engine(EngineKind::Kvm, "hardware"), engine(EngineKind::Qemu, "tcg"));
        for (profile, fits) in [("soft", [true, false, false]), ("general", [false, true, true]), ("", [false, true, true])] {
            for (e, fits) in [&soft, &hardware, &tcg].into_iter().zip(fits) {
                let got = check_fits(&image(profile), e);
                assert_eq!(got.is_ok(), fits, "{profile:?} on {}: {got:?}", e.profile);
            }
        }
        let refused = check_fits(&image(""), &soft).unwrap_err();
        assert_eq!(refused.code, "incompatible");
        assert!(refused.next.contains("ks image build --profile soft"), "{refused}");
        assert_eq!([default_for("soft"), default_for("tcg"), default_for("hardware")], ["soft", "default", "default"]);
    }

    #[test]
    fn profiles_are_checked_and_none_is_general() {
        assert_eq!(profile("").unwrap(), "general");
        assert_eq!(profile("soft").unwrap(), "soft");
        assert_eq!(profile("Soft").unwrap_err().code, "usage");
    }
}
