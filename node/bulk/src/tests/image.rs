//! Kernels and initramfs between nodes.

use super::world::*;
use crate::{CallError, ImageFiles};
use ks_proto::ids::ImageId;
use std::path::PathBuf;
use std::sync::Arc;

struct Folder(PathBuf);
impl ImageFiles for Folder {
    fn path(&self, image: &ImageId, which: &str) -> Option<PathBuf> {
        let path = self.0.join(image.to_hex()).join(which);
        path.exists().then_some(path)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_images_file_arrives_checked_and_resumed_or_not_at_all() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let image = ImageId([3; 32]);
    let folder = tmp.path().join("images").join(image.to_hex());
    std::fs::create_dir_all(&folder).unwrap();
    let content: Vec<u8> = (0..80).flat_map(chunk).collect();
    std::fs::write(folder.join("kernel"), &content).unwrap();
    std::fs::write(tmp.path().join("images").join("secret"), b"no").unwrap();
    let setup = Setup { images: Arc::new(Folder(tmp.path().join("images"))), ..Setup::default() };
    let a = Node::with(&tmp.path().join("a"), &members, setup);
    let b = Node::start(&tmp.path().join("b"), &members);
    let (to, part) = (tmp.path().join("kernel"), tmp.path().join("kernel.part"));
    let hash = *blake3::hash(&content).as_bytes();
    let fetch = |which: &'static str, expect: Option<[u8; 32]>| {
        let (bulk, holder, to) = (b.bulk.clone(), a.holder(), to.clone());
        async move { bulk.fetch_image_file(&holder, &image, which, &to, expect).await }
    };
    for bad in ["../secret", "a/b", "", ".", "Kernel", &"k".repeat(65)] {
        let e = b.bulk.fetch_image_file(&a.holder(), &image, bad, &to, None).await.unwrap_err();
        assert!(matches!(e, CallError::Refused { .. }), "{bad}: {e}");
    }
    assert!(matches!(fetch("initrd", None).await.unwrap_err(), CallError::Absent { .. }));
    assert!(!to.exists());
    // Half of it is here already; then what is here is damaged.
    std::fs::write(&part, &content[..1_000_003]).unwrap();
    let before = a.bulk.traffic().0;
    let got = fetch("kernel", Some(hash)).await.unwrap();
    assert_eq!((got.bytes, got.hash), (content.len() as u64, hash));
    assert_eq!(a.bulk.traffic().0 - before, content.len() as u64 - 1_000_003);
    assert_eq!(std::fs::read(&to).unwrap(), content);
    std::fs::remove_file(&to).unwrap();
    std::fs::write(&part, [7; 50_000]).unwrap();
    fetch("kernel", None).await.unwrap();
    assert_eq!(std::fs::read(&to).unwrap(), content);
    assert!(!part.exists());
    // A file other than the fleet's records name is refused, and leaves nothing.
    std::fs::remove_file(&to).unwrap();
    let e = fetch("kernel", Some([1; 32])).await.unwrap_err();
    assert!(matches!(e, CallError::Wrong { .. }) && !to.exists() && !part.exists(), "{e}");
}
