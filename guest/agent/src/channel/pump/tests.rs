//! Generations over a socket pair, with the host's end played by the test. Cases V3 and V4.

use std::os::fd::OwnedFd;

use ks_proto::{
    channel::{Deframer, ESC, Escaper, Generation, Piece, marker},
    guest::{ExecFrame, GuestAnswer, GuestRequest, PROTOCOL},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixStream, unix::pipe},
    task::JoinHandle,
};
use tokio_util::compat::TokioAsyncReadCompatExt as _;

use crate::{
    channel::{Port, serve_framed},
    testing::{self, Client, exec_request, until, within},
};

const HELLO: GuestRequest = GuestRequest::Hello { protocol: PROTOCOL };

/// The far side of the pipe: what ks-vmm and ksd do.
struct Host {
    dir: tempfile::TempDir,
    pipe: Option<UnixStream>,
}

/// One generation from the host's side; ended by [`Host::cut`].
struct Live {
    client: Client,
    carrying: JoinHandle<UnixStream>,
    stop: tokio::sync::oneshot::Sender<()>,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let agent = testing::agent(&dir);
        let (host, guest) = UnixStream::pair().unwrap();
        let port = Port::stream(OwnedFd::from(guest.into_std().unwrap())).unwrap();
        tokio::spawn(async move { serve_framed(agent, port).await });
        Self { dir, pipe: Some(host) }
    }

    async fn raw(&mut self, bytes: &[u8]) {
        self.pipe.as_mut().unwrap().write_all(bytes).await.unwrap();
    }

    /// Writes a marker and carries a connection after it.
    fn begin(&mut self, generation: Generation) -> Live {
        let (ours, theirs) = tokio::io::duplex(16 * 1024);
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let pipe = self.pipe.take().unwrap();
        let carrying = tokio::spawn(carry(pipe, theirs, generation, stopped));
        Live { client: Client::over(ours.compat()), carrying, stop }
    }

    /// Stops carrying at whatever byte it is, as a checkpoint does.
    async fn cut(&mut self, live: Live) {
        live.stop.send(()).unwrap();
        self.pipe = Some(within("the pipe back", live.carrying).await.unwrap());
    }

    fn fifo(&self, name: &str) -> (pipe::Receiver, String) {
        let path = self.dir.path().join(name);
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let receiver = pipe::OpenOptions::new().open_receiver(&path).unwrap();
        (receiver, path.display().to_string())
    }
}

async fn carry(
    pipe: UnixStream,
    connection: tokio::io::DuplexStream,
    generation: Generation,
    stopped: tokio::sync::oneshot::Receiver<()>,
) -> UnixStream {
    let (mut from_guest, mut to_guest) = pipe.into_split();
    let (mut from_client, mut to_client) = tokio::io::split(connection);
    let up = async {
        to_guest.write_all(&marker(&generation)).await.unwrap();
        let mut escaper = Escaper::default();
        let mut buf = [0; 4096];
        loop {
            let n = from_client.read(&mut buf).await.unwrap_or(0);
            if n == 0 {
                std::future::pending::<()>().await;
            }
            let mut out = Vec::new();
            escaper.push(&buf[..n], &mut out);
            to_guest.write_all(&out).await.unwrap();
        }
    };
    let down = async {
        let (mut deframer, mut current) = (Deframer::new(), false);
        let mut buf = [0; 4096];
        loop {
            let n = from_guest.read(&mut buf).await.unwrap();
            assert!(n > 0, "the guest keeps its end open");
            for piece in deframer.push(&buf[..n]) {
                match piece {
                    Piece::Marker(g) => current = g == generation,
                    Piece::Data(data) if current => {
                        let _ = to_client.write_all(&data).await;
                    }
                    Piece::Data(_) => {}
                }
            }
        }
    };
    tokio::select! {
        () = up => {}
        () = down => {}
        _ = stopped => {}
    }
    from_guest.reunite(to_guest).unwrap()
}

async fn says_hello(live: &Live) {
    let answer = live.client.ask(&HELLO).await;
    assert!(matches!(answer, GuestAnswer::Hello { protocol: PROTOCOL, .. }), "{answer:?}");
}

#[tokio::test]
async fn what_comes_before_the_first_marker_is_dropped() {
    let mut host = Host::new();
    host.raw(b"left over from before").await;
    host.raw(&ESC[..5]).await;
    let live = host.begin([1; 16]);
    says_hello(&live).await;
}

#[tokio::test]
async fn data_that_looks_like_a_marker_passes() {
    let mut host = Host::new();
    let live = host.begin([1; 16]);
    let data = [&marker(&[9; 16])[..], &ESC, &ESC[..7], &[0, 1]].concat().repeat(500);
    let done = live.client.run(&["cat"], &data, None).await;
    assert!(done.stdout == data);
}

/// V3: transfers in flight both ways when the host side is cut at an arbitrary byte.
#[tokio::test]
async fn v3_transfers_in_flight_are_reset() {
    let mut host = Host::new();
    for cycle in 0..4_u8 {
        let live = host.begin([cycle; 16]);
        let (mut out_alive, out_fifo) = host.fifo(&format!("out{cycle}"));
        let (mut in_alive, in_fifo) = host.fifo(&format!("in{cycle}"));
        let script = format!("exec 3>{out_fifo}; echo ready; exec cat /dev/zero");
        let (mut pouring, _pouring_writer) = live.client.exec(&["sh", "-c", &script], None).await.unwrap();
        let _ = until(&mut pouring, b"ready\n").await;
        let script = format!("exec 3>{in_fifo}; echo ready; exec cat >/dev/null");
        let (mut drinking, mut feed) = live.client.exec(&["sh", "-c", &script], None).await.unwrap();
        let _ = until(&mut drinking, b"ready\n").await;
        for _ in 0..20 {
            feed.write_all(&ExecFrame::Stdin(vec![cycle; 60_000]).encode()).await.unwrap();
            let _ = until(&mut pouring, &[0; 1000]).await;
        }
        host.cut(live).await;
        // Half a frame, and half an escape, of the old generation.
        host.raw(&[0, 0, 0, 0, 0, 0]).await;
        host.raw(&ESC[..usize::from(cycle) + 2]).await;
        let next = host.begin([cycle + 100; 16]);
        says_hello(&next).await;
        let mut nothing = Vec::new();
        within("the end of the old reader", in_alive.read_to_end(&mut nothing)).await.unwrap();
        within("the end of the old writer", out_alive.read_to_end(&mut nothing)).await.unwrap();
        host.cut(next).await;
    }
}

/// V4: ten cycles, each with a read that is blocked.
#[tokio::test]
async fn v4_each_of_ten_cycles_resets_a_blocked_read() {
    let mut host = Host::new();
    for cycle in 0..10_u8 {
        let live = host.begin([cycle; 16]);
        says_hello(&live).await;
        let (mut alive, fifo) = host.fifo(&format!("alive{cycle}"));
        let script = format!("exec 3>{fifo}; echo ready; cat; echo not reached");
        let (mut reader, _writer) = live.client.exec(&["sh", "-c", &script], None).await.unwrap();
        let _ = until(&mut reader, b"ready\n").await;
        host.cut(live).await;
        let next = host.begin([cycle + 100; 16]);
        says_hello(&next).await;
        within("the end of the blocked program", alive.read_to_end(&mut Vec::new())).await.unwrap();
        host.cut(next).await;
    }
}

/// The host was away and read nothing: the guest's output is stuck, and a marker must still get through.
#[tokio::test]
async fn a_marker_is_seen_while_output_is_stuck() {
    let mut host = Host::new();
    let live = host.begin([1; 16]);
    let (mut alive, fifo) = host.fifo("alive");
    let script = format!("exec 3>{fifo}; echo ready; exec cat /dev/zero");
    let (mut reader, _writer) = live.client.program(&exec_request(&["sh", "-c", &script], None)).await.unwrap();
    let _ = until(&mut reader, b"ready\n").await;
    host.cut(live).await;
    // Only the marker: nothing of the old output is read until the old program is gone.
    host.raw(&marker(&[2; 16])).await;
    within("the end of the old program", alive.read_to_end(&mut Vec::new())).await.unwrap();
    let next = host.begin([3; 16]);
    says_hello(&next).await;
}

/// A connection that breaks the protocol ends; the pipe lives on.
#[tokio::test]
async fn nonsense_ends_the_generation_only() {
    let mut host = Host::new();
    host.raw(&marker(&[1; 16])).await;
    host.raw(&[0xff; 4000]).await;
    let live = host.begin([2; 16]);
    says_hello(&live).await;
}
