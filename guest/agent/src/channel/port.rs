//! A byte pipe to the host without blocking: the virtio-serial port, or a Unix socket in its place.
//!
//! A virtio-serial port whose host end is closed reports a hang-up and reads as zero bytes, again and again. It is
//! watched through an edge-triggered epoll of its own, inside tokio's: an open, a close, data and room each wake once,
//! and a closed host end costs nothing, with no timer.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    task::{Context, Poll},
    time::Duration,
};

use rustix::{
    event::{Timespec, epoll},
    fs::{Mode, OFlags},
    io::Errno,
};
use tokio::io::{Interest, unix::AsyncFd};

/// The pipe and its watcher.
#[derive(Debug)]
pub struct Port {
    file: OwnedFd,
    watch: AsyncFd<OwnedFd>,
    /// Zero bytes read mean the end (a socket), not that the host is away (a port).
    zero_is_end: bool,
}

impl Port {
    /// The virtio-serial device at `path`.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Self::new(rustix::fs::open(path, flags, Mode::empty())?, false)
    }

    /// A connected stream socket.
    pub fn stream(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Self::new(socket, true)
    }

    fn new(file: OwnedFd, zero_is_end: bool) -> io::Result<Self> {
        let inner = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let events = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&inner, &file, epoll::EventData::new_u64(0), events)?;
        Ok(Self { file, watch: crate::sys::watch(inner, Interest::READABLE)?, zero_is_end })
    }

    /// Reads what is there; None when nothing is.
    pub fn try_read(&mut self, buf: &mut [u8]) -> io::Result<Option<usize>> {
        match rustix::io::read(&self.file, buf) {
            Ok(0) if self.zero_is_end => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(0) | Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Ok(n) => Ok(Some(n)),
            Err(e) => Err(e.into()),
        }
    }

    /// Writes what fits; None when nothing does.
    pub fn try_write(&mut self, data: &[u8]) -> io::Result<Option<usize>> {
        match rustix::io::write(&self.file, data) {
            Ok(0) | Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Ok(n) => Ok(Some(n)),
            Err(e) => Err(e.into()),
        }
    }

    /// Ready once something has changed since the last call; both directions must then be tried again.
    pub fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut guard = std::task::ready!(self.watch.poll_read_ready(cx))?;
        let mut events = Vec::with_capacity(4);
        epoll::wait(self.watch.as_fd(), rustix::buffer::spare_capacity(&mut events), Some(&Timespec::default()))?;
        guard.clear_ready();
        Poll::Ready(Ok(()))
    }
}

/// Waits until the virtio-serial port with this name is there, and returns its device.
pub async fn find(name: &str, deadline: Duration) -> io::Result<PathBuf> {
    let end = tokio::time::Instant::now() + deadline;
    let mut pause = Duration::from_millis(2);
    loop {
        if let Some(device) = lookup(Path::new("/sys/class/virtio-ports"), name) {
            let path = Path::new("/dev").join(device);
            if path.exists() {
                return Ok(path);
            }
        }
        if tokio::time::Instant::now() > end {
            let why = format!("no virtio-serial port named {name} within {} s", deadline.as_secs());
            return Err(io::Error::new(io::ErrorKind::NotFound, why));
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

fn lookup(class: &Path, name: &str) -> Option<std::ffi::OsString> {
    let ports = std::fs::read_dir(class).ok()?;
    let mut found =
        ports.flatten().filter(|p| std::fs::read_to_string(p.path().join("name")).is_ok_and(|text| text.trim_end() == name));
    found.next().map(|p| p.file_name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_is_found_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        for (port, name) in [("vport0p1", "org.other\n"), ("vport0p2", "ks.channel\n")] {
            std::fs::create_dir(dir.path().join(port)).unwrap();
            std::fs::write(dir.path().join(port).join("name"), name).unwrap();
        }
        assert_eq!(lookup(dir.path(), "ks.channel"), Some("vport0p2".into()));
        assert_eq!(lookup(dir.path(), "ks"), None);
        assert_eq!(lookup(Path::new("/nonexistent"), "ks"), None);
    }
}
