//! Guests that do their worst to a real `ksgw`, all at once, while an honest one works beside them: it is served as if nothing was,
//! the process lives and stays small, and every ledger verifies.

use crate::harness::*;
use crate::process;
use ks_proto::gateway::{AdminAnswer, AdminAsk, GatewayAsk};
use ks_proto::relay::{BodyFrame, PAYLOAD_BYTES_MAX, RelayAsk, encode_message};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// An honest call may take so long beside all that.
const SERVED: Duration = Duration::from_secs(20);
/// Memory of the process, in KiB, with all of it going on.
const RSS_KIB_MAX: u64 = 700 << 10;

struct World {
    dir: tempfile::TempDir,
    provider: ks_test_provider::Provider,
    process: process::Process,
}

/// The test holds thousands of streams open.
fn many_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

impl World {
    async fn new() -> Self {
        many_files();
        let provider = ks_test_provider::start("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let process = process::start(dir.path(), None, &dir.path().join("log")).await;
        process::set_up(dir.path(), format!("http://{}", provider.address)).await;
        Self { dir, provider, process }
    }
    fn socket(&self) -> PathBuf {
        self.dir.path().join("gw.sock")
    }
    fn rss_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.0.id())).unwrap();
        let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
    /// An honest guest's call is answered in time.
    async fn serves(&self, honest: &Guest, counter: u64) {
        let (path, _) = streamed("anthropic", "");
        let body =
            format!(r#"{{"model":"test-model!tokens=10","stream":true,"max_tokens":9,"messages":[{counter}]}}"#).into_bytes();
        let begun = Instant::now();
        let got = honest.call(counter, &path, &body).await.to_end().await;
        assert_eq!((got.end, got.refused), (Some(Ok(())), None));
        assert!(begun.elapsed() < SERVED, "an honest call took {:?}", begun.elapsed());
    }
    async fn in_order(&self, sessions: &[u8]) {
        let sessions = sessions.iter().map(|n| Guest::new(&self.socket(), *n).session()).collect();
        let AdminAnswer::Report { report } = Admin::connect(&self.socket()).await.ask(AdminAsk::Verify { sessions }).await else {
            panic!("no report")
        };
        assert_eq!((&report["ok"], &report["problems"]), (&true.into(), &serde_json::json!([])));
    }
}

async fn raw(socket: &Path, bytes: &[u8]) -> UnixStream {
    let mut s = UnixStream::connect(socket).await.unwrap();
    // A gateway that has seen enough need not read the rest.
    let _ = s.write_all(bytes).await;
    s
}

/// What it says before it hangs up; it must.
async fn hung_up(mut s: UnixStream) -> Vec<u8> {
    let mut said = Vec::new();
    let _ = soon("the end of a hostile stream", s.read_to_end(&mut said)).await;
    said
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_and_lies_are_refused_and_cost_nobody_anything() {
    let world = World::new().await;
    let (bad, honest) = (Guest::new(&world.socket(), 6), Guest::new(&world.socket(), 1));
    let stamp = encode_message(&GatewayAsk::Stream(Box::new(bad.stamp.clone()))).unwrap();
    let (path, body) = streamed("anthropic", "tokens=5");
    let call = bad.asking(1, &path, &[], &body);
    let ask = |c: &ks_proto::relay::Call| encode_message(&RelayAsk::Call(c.clone())).unwrap();
    let mut all: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 64],
        [&stamp[..], &[0xff, 0xff, 0xff, 0xff]].concat(),
        [&stamp[..], &[2, 0, 0, 0], b"{}"].concat(),
        [&stamp[..], &[4, 0, 0, 0], &[0xc3, 0x28, 0, 1]].concat(),
        // Deep and wide.
        [&stamp[..], &encode_message(&serde_json::json!({"ask": "call", "x": vec![0; 200_000]})).unwrap()].concat(),
    ];
    let deep = format!("{{\"ask\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    all.push([&stamp[..], &u32::try_from(deep.len()).unwrap().to_le_bytes(), deep.as_bytes()].concat());
    // A second stamp where the ask should be: a guest that says it is another session.
    let other = GatewayAsk::Stream(Box::new(honest.stamp.clone()));
    all.push([&stamp[..], &encode_message(&other).unwrap()].concat());
    all.push(
        [&stamp[..], &encode_message(&GatewayAsk::Admin(Box::new(AdminAsk::KeyList { user: String::new() }))).unwrap()].concat(),
    );
    // Frames that are none, longer than announced, shorter than announced, of another hash.
    for frames in [
        vec![9, 0, 0, 0, 0],
        vec![0, 0xff, 0xff, 0xff, 0x7f],
        BodyFrame::Data(vec![b'x'; body.len() + 1]).encode(),
        BodyFrame::End.encode(),
        [BodyFrame::Data(vec![b'x'; body.len()]).encode(), BodyFrame::End.encode()].concat(),
    ] {
        all.push([&stamp[..], &ask(&call), &frames].concat());
    }
    let changes: [fn(&mut ks_proto::relay::Call); 10] = [
        |c| c.headers = (0..10_000).map(|n| (format!("x-{n}"), "v".to_owned())).collect(),
        |c| c.headers = vec![("x".into(), "v".repeat(500_000))],
        |c| c.headers = vec![("x-evil\r\nhost".into(), "v".into())],
        |c| c.body_bytes = u64::MAX,
        |c| c.path = "http://evil.example/".into(),
        |c| c.path = format!("/{}", "a".repeat(100_000)),
        |c| c.provider = "../../etc".into(),
        |c| c.method = "BREW POT".into(),
        |c| c.call.nonce_hex = "z".repeat(32),
        |c| c.prior = Some("f".repeat(31)),
    ];
    for change in changes {
        let mut c = call.clone();
        change(&mut c);
        all.push([&stamp[..], &ask(&c)].concat());
    }
    for bytes in &all {
        let said = hung_up({
            let mut s = raw(&world.socket(), bytes).await;
            s.shutdown().await.ok();
            s
        })
        .await;
        let text = String::from_utf8_lossy(&said);
        assert!(!text.contains("\"accepted\"") && !text.contains(MARKED), "{text}");
    }
    // Numbers at the end of their range, which are not refused as such.
    let mut far = bad.clone();
    far.position = u64::MAX;
    for counter in [0, u64::MAX] {
        let got = far.call(counter, &path, &body).await.to_end().await;
        assert!(got.end == Some(Ok(())) || got.refused.is_some(), "{:?}", got.end);
    }
    let before = far.call(7, &path, &body).await.to_end().await;
    let mut beyond = far.rejoin(1, 7, &before, &body).await;
    assert!(!beyond.unknown);
    while beyond.next().await {}
    let bought = world.provider.purchases();
    assert!(bought <= 3, "{bought} were bought by garbage");
    world.serves(&honest, 1).await;
    world.in_order(&[1, 6]).await;
    assert!(!std::fs::read_to_string(world.dir.path().join("log")).unwrap().contains(MARKED));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_and_slow_guests_hold_up_nobody_else() {
    let world = World::new().await;
    let honest = Guest::new(&world.socket(), 1);
    world.serves(&honest, 1).await;
    let mut held = Vec::new();
    let stamp = |n: u8| encode_message(&GatewayAsk::Stream(Box::new(Guest::new(&world.socket(), n).stamp))).unwrap();
    // Streams that say nothing, or half a message, or announce the largest body and send a byte of it.
    for n in 0..1500 {
        let more: &[u8] = if n % 2 == 0 { b"" } else { &[0, 0, 16, 0, b'{'] };
        held.push(raw(&world.socket(), &[&stamp(20), more].concat()).await);
    }
    let (path, body) = streamed("anthropic", "tokens=5");
    for n in 0..40u8 {
        let guest = Guest::new(&world.socket(), 30 + n % 3);
        let mut call = guest.asking(u64::from(n), &path, &[], &body);
        call.body_bytes = 64 << 20;
        let ask = encode_message(&RelayAsk::Call(call)).unwrap();
        held.push(raw(&world.socket(), &[&stamp(30 + n % 3)[..], &ask, &BodyFrame::Data(vec![b'x']).encode()].concat()).await);
    }
    world.serves(&honest, 2).await;
    // Long answers that nobody reads.
    for n in 0..50u64 {
        let guest = Guest::new(&world.socket(), 40);
        let text = format!(r#"{{"model":"test-model!tokens=20000","stream":true,"max_tokens":9,"messages":[{n}]}}"#);
        let text = text.as_bytes();
        let ask = encode_message(&RelayAsk::Call(guest.asking(n, &path, &[], text))).unwrap();
        let frames = [BodyFrame::Data(text.to_vec()).encode(), BodyFrame::End.encode()].concat();
        held.push(raw(&world.socket(), &[&stamp(40)[..], &ask, &frames].concat()).await);
    }
    world.serves(&honest, 3).await;
    // A flood of calls, each in a timeline of its own, of a provider that is not there; and of connections that are not allowed.
    let mut refused = 0;
    for n in 0..400u64 {
        let mut guest = Guest::new(&world.socket(), 50);
        guest.nonce = u8::try_from(n % 250).unwrap();
        let got = guest.call(n, &path, &body).await.to_end().await;
        refused += usize::from(got.refused.is_some_and(|r| r.1 == "timelines"));
        let egress = RelayAsk::Egress { host: format!("h{n}.example"), port: 443 };
        hung_up({
            let mut s = raw(&world.socket(), &[stamp(51), encode_message(&egress).unwrap()].concat()).await;
            s.shutdown().await.ok();
            s
        })
        .await;
    }
    assert!(refused > 100, "a run begins as many timelines as it likes: {refused}");
    let lines = |n: u8| ledger(world.dir.path(), Guest::new(&world.socket(), n).session());
    assert!(lines(51).len() <= 200, "{} lines of refused connections", lines(51).len());
    assert!(lines(50).iter().filter(|l| l["kind"] == "timeline").count() <= 64);
    world.serves(&honest, 4).await;
    let rss = world.rss_kib();
    assert!(rss < RSS_KIB_MAX, "{rss} KiB");
    eprintln!("{} hostile streams held, {rss} KiB", held.len());
    drop(held);
    world.serves(&honest, 5).await;
    world.in_order(&[1, 40, 50, 51]).await;
}

/// A session that opens more streams than any relay does is refused, and its next ones are served when some have ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_has_so_many_streams_and_no_more() {
    let world = World::new().await;
    let guest = Guest::new(&world.socket(), 9);
    let (path, _) = streamed("anthropic", "");
    let mut held = Vec::new();
    for n in 0..2048u64 {
        // Each waits for its body.
        let mut s = guest.open().await;
        let mut call = guest.asking(n, &path, &[], b"x");
        call.body_bytes = 1;
        s.write_all(&encode_message(&RelayAsk::Call(call)).unwrap()).await.unwrap();
        held.push(s);
    }
    until_refused(&guest, &path).await;
    world.serves(&Guest::new(&world.socket(), 1), 1).await;
    drop(held);
    soon("room", async {
        let mut counter = 5000;
        loop {
            counter += 1;
            let got = guest
                .call(counter, &path, br#"{"model":"test-model!tokens=2","stream":true,"messages":[]}"#)
                .await
                .to_end()
                .await;
            if got.end == Some(Ok(())) {
                return;
            }
        }
    })
    .await;
}

async fn until_refused(guest: &Guest, path: &str) {
    soon("a refusal", async {
        let mut counter = 3000;
        loop {
            counter += 1;
            let body = vec![b'['; PAYLOAD_BYTES_MAX];
            let got = guest.call(counter, path, &body).await.to_end().await;
            if got.refused.is_some_and(|r| r.1 == "busy") {
                return;
            }
        }
    })
    .await;
}
