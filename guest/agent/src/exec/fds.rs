//! Non-blocking pipes and terminals for tokio.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::io::Errno;
use tokio::io::{Interest, unix::AsyncFd};

/// One descriptor that is read or written without blocking.
#[derive(Debug)]
pub struct Fd(AsyncFd<OwnedFd>);

impl Fd {
    /// Makes `fd` non-blocking and watches it.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        crate::sys::watch(fd, Interest::READABLE | Interest::WRITABLE).map(Self)
    }

    /// Reads; 0 at the end. A terminal whose programs are all gone (EIO) is at its end.
    pub async fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut guard = self.0.readable().await?;
            let hung_up = guard.ready().is_read_closed();
            let read = guard.try_io(|fd| match rustix::io::read(fd.get_ref(), &mut *buf) {
                Err(Errno::IO) => Ok(0),
                other => other.map_err(io::Error::from),
            });
            match read {
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(result) => return result,
                // Hung up for good as far as tokio knows: waiting again would spin.
                Err(_would_block) if hung_up => return Ok(0),
                Err(_would_block) => {}
            }
        }
    }

    /// Writes all of `data`.
    pub async fn write_all(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let mut guard = self.0.writable().await?;
            let hung_up = guard.ready().is_write_closed();
            match guard.try_io(|fd| rustix::io::write(fd.get_ref(), data).map_err(io::Error::from)) {
                Ok(Ok(n)) => data = &data[n..],
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(e)) => return Err(e),
                Err(_would_block) if hung_up => return Err(io::ErrorKind::BrokenPipe.into()),
                Err(_would_block) => {}
            }
        }
        Ok(())
    }

    /// Bytes that can be read at once.
    pub fn pending(&self) -> u64 {
        rustix::io::ioctl_fionread(self.0.get_ref()).unwrap_or(0)
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}
