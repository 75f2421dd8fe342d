//! A journal's disk that is full: before a call, and in the middle of an answer.

use crate::harness::*;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A small disk of its own below a folder, if this user may mount one.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: &Path, size: &str) -> Option<Self> {
        std::fs::create_dir_all(at).unwrap();
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(at).status();
        status.is_ok_and(|s| s.success()).then(|| Self(at.to_owned()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Calls are refused before anything is sent, nothing is half-booked, and they pass again when there is space.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_journal_disk_refuses_calls_before_they_are_sent() {
    let mut disk = None;
    let world = World::with("anthropic", None, |config| {
        disk = SmallDisk::mount(&config.dir.join("journal"), "6m");
        config.free_bytes = 0;
    })
    .await;
    let Some(disk) = disk else {
        println!("skipped: this user cannot mount a small disk");
        return;
    };
    let guest = Guest::new(&world.socket(), 1);
    let (path, body) = streamed("anthropic", "tokens=3");
    assert_eq!(guest.call(1, &path, &body).await.to_end().await.end, Some(Ok(())));
    let ballast = disk.0.join("ballast");
    let mut full = std::fs::File::create(&ballast).unwrap();
    while std::io::Write::write_all(&mut full, &[1; 4096]).is_ok() {}
    for n in 2..6 {
        let got = guest.call(n, &path, &body).await.to_end().await;
        assert_eq!(got.refused.map(|r| (r.0, r.1)), Some((507, "disk-full".into())));
    }
    assert_eq!((world.provider.requests(), world.kind(guest.session(), "intent").len()), (1, 1));
    std::fs::remove_file(&ballast).unwrap();
    drop(full);
    assert_eq!(guest.call(9, &path, &body).await.to_end().await.end, Some(Ok(())));
    assert_eq!((world.provider.purchases(), world.kind(guest.session(), "completed").len()), (2, 2));
    world.in_order(&[guest.session()]).await;
}

/// An answer that does not fit is read on for its usage, cut for its client, and booked as partial with what it cost.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_does_not_fit_is_cut_and_booked() {
    let mut disk = None;
    let world = World::with("anthropic", None, |config| {
        disk = SmallDisk::mount(&config.dir.join("journal"), "5m");
        config.free_bytes = 0;
    })
    .await;
    if disk.is_none() {
        println!("skipped: this user cannot mount a small disk");
        return;
    }
    let guest = Guest::new(&world.socket(), 1);
    let (path, body) = streamed("anthropic", "tokens=30000,words=20");
    let got = guest.call(1, &path, &body).await.to_end().await;
    assert!(matches!(&got.end, Some(Err(why)) if why.contains("could not be stored")), "{:?} {:?}", got.end, got.refused);
    let ends = world.kind(guest.session(), "completed");
    assert_eq!((ends.len(), &ends[0]["outcome"], ends[0]["usage"]["output"].as_u64()), (1, &"partial".into(), Some(30_000)));
    world.in_order(&[guest.session()]).await;
}
