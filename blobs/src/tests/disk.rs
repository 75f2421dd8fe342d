//! A modelled disk: a real folder holds the live bytes, the model remembers which bytes and names are durable.
//!
//! Every change and sync is a step. A disk that is told to stop at step n carries out half of it, if it is a write, and
//! fails everything after. Then [`ModelDisk::after_crash`] builds the folder that a new process would find.

use crate::host::{Disk, Found, RealDisk};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// What a crash leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crash {
    /// The process died, the machine did not: everything written is there.
    KeepAll,
    /// Power loss: names and bytes that were not synced are gone.
    DropUnsynced,
    /// Power loss after the file system wrote its names but not the bytes: new names with only their synced bytes.
    NamesOnly,
    /// Power loss in which each unsynced name and each file's unsynced bytes made it or not, by a seeded toss.
    Toss(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Node {
    Dir,
    File(u64),
}

#[derive(Default)]
struct Model {
    steps: u64,
    stop_at: Option<u64>,
    stopped: bool,
    full_after: Option<u64>,
    // Durable names by folder, and durable bytes by inode.
    names: BTreeMap<PathBuf, BTreeMap<String, Node>>,
    bytes: BTreeMap<u64, Vec<u8>>,
    // Keeps every inode alive, so that a number is never used twice.
    held: Vec<File>,
}

/// Something that happens in the middle of an operation.
type Hook = Box<dyn FnOnce() + Send>;

pub struct ModelDisk {
    root: PathBuf,
    model: Mutex<Model>,
    hook: Mutex<Option<Hook>>,
}

impl ModelDisk {
    /// A disk over `root`; what is there now is durable. Stops at step `stop_at`, if given.
    pub fn new(root: &Path, stop_at: Option<u64>) -> Self {
        let mut m = Model { stop_at, ..Model::default() };
        if root.exists() {
            settle(root, &mut m);
        }
        Self { root: root.to_owned(), model: Mutex::new(m), hook: Mutex::new(None) }
    }
    /// Runs `hook` in the next creation of a file, before it.
    pub fn at_next_create(&self, hook: impl FnOnce() + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(hook));
    }
    pub fn stopped(&self) -> bool {
        self.model.lock().unwrap().stopped
    }
    /// After this many more steps that need space, the disk is full; None: there is room again.
    pub fn fill_after(&self, steps: Option<u64>) {
        self.model.lock().unwrap().full_after = steps;
    }
    /// The same process is gone, the machine runs on: a new process may use the disk.
    pub fn restart_process(&self) {
        let mut m = self.model.lock().unwrap();
        m.stopped = false;
        m.stop_at = None;
    }

    /// Counts a step. Err if the disk has stopped or stops here; `torn` is called for what a stopped step still does.
    fn step(&self, m: &mut Model, torn: impl FnOnce()) -> io::Result<()> {
        if m.stopped {
            return Err(io::Error::other("the machine has stopped"));
        }
        m.steps += 1;
        if m.stop_at == Some(m.steps) {
            m.stopped = true;
            torn();
            return Err(io::Error::other("the machine stops here"));
        }
        Ok(())
    }
    fn space(m: &mut Model) -> io::Result<()> {
        match &mut m.full_after {
            Some(0) => Err(io::Error::from_raw_os_error(28)),
            Some(n) => {
                *n -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Builds in `to` what a new process finds after the crash.
    pub fn after_crash(&self, crash: Crash, to: &Path) {
        let m = self.model.lock().unwrap();
        let mut toss = crash_toss(crash);
        std::fs::create_dir_all(to).unwrap();
        rebuild(&m, crash, &mut toss, &self.root, to);
    }
}

fn crash_toss(crash: Crash) -> impl FnMut() -> bool {
    let mut state = if let Crash::Toss(seed) = crash { seed.wrapping_mul(2).wrapping_add(1) } else { 1 };
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 40 & 1 == 1
    }
}

fn live_names(dir: &Path) -> BTreeMap<String, Node> {
    let Ok(entries) = std::fs::read_dir(dir) else { return BTreeMap::new() };
    entries
        .map(|e| {
            let e = e.unwrap();
            let meta = e.metadata().unwrap();
            (e.file_name().into_string().unwrap(), if meta.is_dir() { Node::Dir } else { Node::File(meta.ino()) })
        })
        .collect()
}

fn settle(dir: &Path, m: &mut Model) {
    let names = live_names(dir);
    for (name, node) in &names {
        let path = dir.join(name);
        match node {
            Node::Dir => settle(&path, m),
            Node::File(ino) => {
                m.bytes.insert(*ino, std::fs::read(&path).unwrap());
                m.held.push(File::open(&path).unwrap());
            }
        }
    }
    m.names.insert(dir.to_owned(), names);
}

fn rebuild(m: &Model, crash: Crash, toss: &mut impl FnMut() -> bool, from: &Path, to: &Path) {
    let (live, durable) = (live_names(from), m.names.get(from).cloned().unwrap_or_default());
    let mut names = live.clone();
    names.extend(durable.clone());
    for (name, _) in names {
        let (l, d) = (live.get(&name), durable.get(&name));
        let node = match crash {
            Crash::KeepAll | Crash::NamesOnly => l,
            Crash::DropUnsynced => d,
            Crash::Toss(_) => {
                if toss() {
                    l
                } else {
                    d
                }
            }
        };
        match node {
            None => {}
            Some(Node::Dir) => {
                std::fs::create_dir_all(to.join(&name)).unwrap();
                rebuild(m, crash, toss, &from.join(&name), &to.join(&name));
            }
            Some(Node::File(ino)) => {
                let live_bytes = || {
                    let f = m.held.iter().find(|f| f.metadata().unwrap().ino() == *ino).expect("every file is held");
                    let mut b = vec![0; usize::try_from(f.metadata().unwrap().len()).unwrap()];
                    f.read_exact_at(&mut b, 0).unwrap();
                    b
                };
                let synced = || m.bytes.get(ino).cloned().unwrap_or_default();
                let bytes = match crash {
                    Crash::KeepAll => live_bytes(),
                    Crash::DropUnsynced | Crash::NamesOnly => synced(),
                    Crash::Toss(_) => {
                        if toss() {
                            live_bytes()
                        } else {
                            synced()
                        }
                    }
                };
                std::fs::write(to.join(&name), bytes).unwrap();
            }
        }
    }
}

impl Disk for ModelDisk {
    fn create(&self, path: &Path) -> io::Result<File> {
        let hook = self.hook.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
        let mut m = self.model.lock().unwrap();
        self.step(&mut m, || ())?;
        Self::space(&mut m)?;
        let f = RealDisk.create(path)?;
        m.held.push(f.try_clone()?);
        Ok(f)
    }
    fn open(&self, path: &Path) -> io::Result<File> {
        RealDisk.open(path)
    }
    fn reopen(&self, path: &Path) -> io::Result<File> {
        let mut m = self.model.lock().unwrap();
        if m.stopped {
            return Err(io::Error::other("the machine has stopped"));
        }
        let f = RealDisk.reopen(path)?;
        m.held.push(f.try_clone()?);
        Ok(f)
    }
    fn append(&self, file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut m = self.model.lock().unwrap();
        self.step(&mut m, || RealDisk.append(file, offset, &bytes[..bytes.len() / 2]).unwrap())?;
        Self::space(&mut m)?;
        RealDisk.append(file, offset, bytes)
    }
    fn read_at(&self, file: &File, buf: &mut [u8], offset: u64) -> io::Result<()> {
        RealDisk.read_at(file, buf, offset)
    }
    fn len(&self, file: &File) -> io::Result<u64> {
        RealDisk.len(file)
    }
    fn sync(&self, file: &File) -> io::Result<()> {
        let mut m = self.model.lock().unwrap();
        self.step(&mut m, || ())?;
        Self::space(&mut m)?;
        let mut b = vec![0; usize::try_from(file.metadata()?.len()).unwrap()];
        file.read_exact_at(&mut b, 0)?;
        m.bytes.insert(file.metadata()?.ino(), b);
        Ok(())
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        let mut m = self.model.lock().unwrap();
        self.step(&mut m, || ())?;
        m.names.insert(dir.to_owned(), live_names(dir));
        Ok(())
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut m = self.model.lock().unwrap();
        self.step(&mut m, || ())?;
        Self::space(&mut m)?;
        RealDisk.rename(from, to)
    }
    fn unlink(&self, path: &Path) -> io::Result<()> {
        let mut m = self.model.lock().unwrap();
        self.step(&mut m, || ())?;
        RealDisk.unlink(path)
    }
    fn make_dir(&self, path: &Path) -> io::Result<bool> {
        let mut m = self.model.lock().unwrap();
        if path.is_dir() {
            return Ok(false);
        }
        self.step(&mut m, || ())?;
        Self::space(&mut m)?;
        RealDisk.make_dir(path)
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<Found>> {
        RealDisk.list(dir)
    }
    fn lock(&self, path: &Path) -> io::Result<File> {
        let m = self.model.lock().unwrap();
        if m.stopped {
            return Err(io::Error::other("the machine has stopped"));
        }
        drop(m);
        let f = RealDisk.lock(path)?;
        self.model.lock().unwrap().held.push(File::open(path)?);
        Ok(f)
    }
    fn now_ms(&self) -> u64 {
        RealDisk.now_ms()
    }
}
