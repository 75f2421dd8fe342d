//! The egress proxy against a scripted gateway.

use ks_proto::relay::{RelayAnswer, RelayAsk};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

use crate::{
    egress,
    testing::{Gateway, relay, within},
};

async fn proxy() -> (DuplexStream, Gateway, tempfile::TempDir) {
    let (relay, gateway, dir) = relay();
    let (ours, theirs) = tokio::io::duplex(64 * 1024);
    tokio::spawn(async move {
        let _ = egress::connection(&relay.inner, theirs).await;
    });
    (ours, gateway, dir)
}

async fn exactly(io: &mut DuplexStream, len: usize) -> Vec<u8> {
    let mut got = vec![0; len];
    within("bytes", io.read_exact(&mut got)).await.unwrap();
    got
}

#[tokio::test]
async fn connect_gives_raw_bytes_both_ways() {
    let (mut client, gateway, _dir) = proxy().await;
    // Bytes that come with the head are not lost.
    client.write_all(b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: pypi.org\r\n\r\nhello").await.unwrap();
    let (mut stream, ask, _) = gateway.ask().await;
    assert_eq!(ask, RelayAsk::Egress { host: "pypi.org".into(), port: 443 });
    stream.say(RelayAnswer::Ok {}).await;
    let established = b"HTTP/1.1 200 Connection established\r\n\r\n";
    assert_eq!(exactly(&mut client, established.len()).await, established);
    assert_eq!(exactly(&mut stream.0, 5).await, b"hello");
    stream.0.write_all(b"back").await.unwrap();
    assert_eq!(exactly(&mut client, 4).await, b"back");
    client.shutdown().await.unwrap();
    assert_eq!(within("the half-close", stream.0.read(&mut [0; 1])).await.unwrap(), 0);
    stream.0.write_all(b"late").await.unwrap();
    assert_eq!(exactly(&mut client, 4).await, b"late", "the other half is still open");
}

#[tokio::test]
async fn a_denied_host_is_named_to_the_client() {
    let (mut client, gateway, _dir) = proxy().await;
    client.write_all(b"CONNECT evil.example:443 HTTP/1.1\r\n\r\n").await.unwrap();
    let (mut stream, _, _) = gateway.ask().await;
    let message = "evil.example is not on the session's list; ks egress allow".to_owned();
    stream.say(RelayAnswer::Refused { status: 403, code: "not-allowed".into(), message: message.clone() }).await;
    let mut text = String::new();
    within("the answer", client.read_to_string(&mut text)).await.unwrap();
    assert!(text.starts_with("HTTP/1.1 403") && text.contains(&message), "{text}");
}

#[tokio::test]
async fn plain_requests_go_in_origin_form() {
    let (mut client, gateway, _dir) = proxy().await;
    client.write_all(b"GET http://deb.debian.org/debian/ HTTP/1.1\r\nHost: deb.debian.org\r\n\r\n").await.unwrap();
    let (mut stream, ask, _) = gateway.ask().await;
    assert_eq!(ask, RelayAsk::Egress { host: "deb.debian.org".into(), port: 80 });
    stream.say(RelayAnswer::Ok {}).await;
    let wanted = b"GET /debian/ HTTP/1.1\r\nconnection: close\r\nHost: deb.debian.org\r\n\r\n";
    assert_eq!(exactly(&mut stream.0, wanted.len()).await, wanted);
}

#[tokio::test]
async fn socks_names_and_addresses() {
    let targets: [(&[u8], &str); 3] = [
        (b"\x03\x08pypi.org", "pypi.org"),
        (b"\x01\x7f\x00\x00\x01", "127.0.0.1"),
        (b"\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01", "::1"),
    ];
    for (target, host) in targets {
        let (mut client, gateway, _dir) = proxy().await;
        client.write_all(b"\x05\x02\x02\x00").await.unwrap();
        assert_eq!(exactly(&mut client, 2).await, [5, 0]);
        client.write_all(&[b"\x05\x01\x00", target, b"\x01\xbb"].concat()).await.unwrap();
        let (mut stream, ask, _) = gateway.ask().await;
        assert_eq!(ask, RelayAsk::Egress { host: host.into(), port: 443 });
        stream.say(RelayAnswer::Ok {}).await;
        assert_eq!(exactly(&mut client, 10).await[..2], [5, 0]);
        client.write_all(b"hi").await.unwrap();
        assert_eq!(exactly(&mut stream.0, 2).await, b"hi");
    }
    let (mut client, _gateway, _dir) = proxy().await;
    client.write_all(b"\x05\x01\x02").await.unwrap();
    assert_eq!(exactly(&mut client, 2).await, [5, 0xff], "no way to prove who one is, none is needed");
}
