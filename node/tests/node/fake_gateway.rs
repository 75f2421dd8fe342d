//! The stand-in for `ksgw`: this test program again, started by a script of that name (see `harness`). It writes down what
//! it is told, one line each: `gateway-asks` for admin asks, `gateway-stamps` for streams.

use ks_proto::gateway::{AdminAnswer, AdminAsk, GatewayAsk, PROTOCOL, SOCKET};
use ks_proto::relay::{RelayAnswer, decode_message, encode_message, message_length};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// Not a test: does nothing unless the script started it with a gateway's arguments.
#[test]
fn main_when_started_as_ksgw() {
    let args: Vec<String> = std::env::args().collect();
    let Some(dir) = args.windows(2).find(|w| w[0] == "--dir").map(|w| PathBuf::from(&w[1])) else { return };
    let faults = PathBuf::from(std::env::var_os("KS_FAKE_FAULTS").unwrap());
    tokio::runtime::Runtime::new().unwrap().block_on(async move {
        let socket = dir.join(SOCKET);
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        note(&faults, "gateway-pids", &std::process::id().to_string());
        loop {
            // It outlives its node as the real one does, but not the test's folder.
            match tokio::time::timeout(Duration::from_millis(200), listener.accept()).await {
                Ok(Ok((stream, _))) => drop(tokio::spawn(connection(stream, faults.clone()))),
                Ok(Err(_)) => return,
                Err(_) if !socket.exists() => return,
                Err(_) => {}
            }
        }
    });
}

fn note(faults: &Path, file: &str, line: &str) {
    let mut f = std::fs::OpenOptions::new().create(true).append(true).open(faults.join(file)).unwrap();
    f.write_all(format!("{line}\n").as_bytes()).unwrap();
}

async fn json(stream: &mut UnixStream) -> Option<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).await.ok()?;
    let mut json = vec![0; message_length(length).unwrap()];
    stream.read_exact(&mut json).await.ok()?;
    Some(json)
}

async fn connection(mut stream: UnixStream, faults: PathBuf) {
    while let Some(bytes) = json(&mut stream).await {
        match decode_message::<GatewayAsk>(&bytes).unwrap() {
            GatewayAsk::Admin(ask) => {
                note(&faults, "gateway-asks", &format!("{ask:?}"));
                let answer = match *ask {
                    AdminAsk::Hello { .. } => AdminAnswer::Hello {
                        protocol: PROTOCOL,
                        version: "fake".into(),
                        pid: std::process::id(),
                        unsealed: false,
                    },
                    AdminAsk::KeyAdd { provider, .. } if provider == "nobody" => AdminAnswer::Refused {
                        code: "no-provider".into(),
                        what: "the key was not added".into(),
                        why: "there is no provider".into(),
                        next: "ks provider ls".into(),
                    },
                    AdminAsk::KeyAdd { .. } | AdminAsk::KeyList { .. } => AdminAnswer::Keys { keys: vec![] },
                    AdminAsk::EgressList { .. } => AdminAnswer::Egress { allow: vec!["pypi.org".into()] },
                    AdminAsk::Ledger { from, .. } => {
                        let first = AdminAnswer::Lines { lines: vec![format!("{{\"seq\":{from}}}")], more: true };
                        stream.write_all(&encode_message(&first).unwrap()).await.unwrap();
                        AdminAnswer::Lines { lines: vec!["{\"seq\":99}".into()], more: false }
                    }
                    _ => AdminAnswer::Done {},
                };
                stream.write_all(&encode_message(&answer).unwrap()).await.unwrap();
            }
            GatewayAsk::Stream(stamp) => {
                note(&faults, "gateway-stamps", &serde_json::to_string(&stamp).unwrap());
                let ask = json(&mut stream).await.unwrap();
                let message = String::from_utf8(ask).unwrap();
                let seen = RelayAnswer::Refused { status: 418, code: "seen".into(), message };
                stream.write_all(&encode_message(&seen).unwrap()).await.unwrap();
                return;
            }
        }
    }
}
