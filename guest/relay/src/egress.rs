//! The egress proxy: HTTP CONNECT, plain `http://` requests and SOCKS5 on one port, each a raw stream outside.
//!
//! Which hosts may be reached is decided outside; names are resolved there too. A connection does not survive a
//! restore, unlike a call: the far end knows nothing of checkpoints.

use std::{io, net::Ipv6Addr, sync::Arc};

use ks_proto::relay::{RelayAnswer, RelayAsk};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpListener,
};

use crate::{Dial, Inner, server::accept, wire};

/// Bytes of a proxy request's head.
const HEAD_BYTES_MAX: usize = 64 * 1024;
const SOCKS: u8 = 5;

pub(crate) async fn serve<D: Dial>(inner: Arc<Inner<D>>, listener: TcpListener) -> io::Error {
    // An error is that client's affair: it has been told, or it is gone.
    accept(inner, listener, |inner, client| async move { drop(connection(&inner, client).await) }).await
}

/// Serves one client.
pub(crate) async fn connection<D, S>(inner: &Inner<D>, mut client: S) -> io::Result<()>
where
    D: Dial,
    S: AsyncRead + AsyncWrite + Unpin,
{
    let first = client.read_u8().await?;
    if first == SOCKS { socks(inner, client).await } else { http(inner, client, first).await }
}

enum Opened<S> {
    Stream(S),
    Refused { status: u16, message: String },
}

async fn open<D: Dial>(inner: &Inner<D>, host: &str, port: u16) -> io::Result<Opened<D::Stream>> {
    let mut stream = inner.dial.open().await?;
    wire::write_ask(&mut stream, &RelayAsk::Egress { host: host.to_owned(), port }).await?;
    stream.flush().await?;
    match wire::read_answer(&mut stream).await? {
        RelayAnswer::Ok {} => Ok(Opened::Stream(stream)),
        RelayAnswer::Refused { status, message, .. } => Ok(Opened::Refused { status, message }),
        other => Err(io::Error::new(io::ErrorKind::InvalidData, format!("{other:?} to an egress"))),
    }
}

async fn http<D, S>(inner: &Inner<D>, mut client: S, first: u8) -> io::Result<()>
where
    D: Dial,
    S: AsyncRead + AsyncWrite + Unpin,
{
    let Some((head, rest)) = read_head(&mut client, first).await? else {
        return plain(&mut client, 431, "the proxy request's head is longer than 64 KiB").await;
    };
    let request = match ProxyRequest::parse(&head) {
        Ok(request) => request,
        Err(why) => return plain(&mut client, 400, why).await,
    };
    match open(inner, &request.host, request.port).await {
        Ok(Opened::Stream(mut stream)) => {
            match &request.forward {
                Some(head) => stream.write_all(head).await?,
                None => client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?,
            }
            stream.write_all(&rest).await?;
            stream.flush().await?;
            tokio::io::copy_bidirectional(&mut client, &mut stream).await.map(drop)
        }
        Ok(Opened::Refused { status, message }) => plain(&mut client, status, &message).await,
        Err(e) => plain(&mut client, 502, &format!("the node cannot be reached: {e}")).await,
    }
}

async fn plain<S: AsyncWrite + Unpin>(client: &mut S, status: u16, message: &str) -> io::Result<()> {
    let text = format!(
        "HTTP/1.1 {status} Refused by KeepState\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{message}\n",
        message.len() + 1
    );
    client.write_all(text.as_bytes()).await?;
    client.shutdown().await
}

/// The head and what came after it; None when it is too long.
async fn read_head<S: AsyncRead + Unpin>(client: &mut S, first: u8) -> io::Result<Option<(Vec<u8>, Vec<u8>)>> {
    let mut got = vec![first];
    loop {
        if let Some(end) = find(&got, b"\r\n\r\n") {
            let rest = got.split_off(end + 4);
            return Ok(Some((got, rest)));
        }
        if got.len() > HEAD_BYTES_MAX {
            return Ok(None);
        }
        if client.read_buf(&mut got).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|w| w == needle)
}

/// Where to, and for a plain request the head to send there.
#[derive(Debug, PartialEq, Eq)]
struct ProxyRequest {
    host: String,
    port: u16,
    forward: Option<Vec<u8>>,
}

impl ProxyRequest {
    fn parse(head: &[u8]) -> Result<Self, &'static str> {
        let text = std::str::from_utf8(head).map_err(|_| "the request's head is not text")?;
        let (line, headers) = text.split_once("\r\n").ok_or("the request has no first line")?;
        let mut words = line.split(' ');
        let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next()) else {
            return Err("the request's first line has not three words");
        };
        if method == "CONNECT" {
            let (host, port) = authority(target, None)?;
            return Ok(Self { host, port, forward: None });
        }
        let rest = target
            .strip_prefix("http://")
            .ok_or("this is a proxy: it takes CONNECT, http:// requests and SOCKS5; the models' gateway is on port 4180")?;
        let at = rest.find(['/', '?']).unwrap_or(rest.len());
        let (host, port) = authority(&rest[..at], Some(80))?;
        let slash = if rest[at..].starts_with('/') { "" } else { "/" };
        // One request per connection: the next one may be for another host.
        let mut forward = format!("{method} {slash}{} {version}\r\nconnection: close\r\n", &rest[at..]);
        for header in headers.split("\r\n").filter(|h| !h.is_empty()) {
            let name = header.split(':').next().unwrap_or_default().to_ascii_lowercase();
            if !matches!(name.as_str(), "connection" | "proxy-connection" | "proxy-authorization" | "keep-alive") {
                forward.push_str(header);
                forward.push_str("\r\n");
            }
        }
        forward.push_str("\r\n");
        Ok(Self { host, port, forward: Some(forward.into_bytes()) })
    }
}

/// `host:port`, `[v6]:port`.
fn authority(text: &str, default: Option<u16>) -> Result<(String, u16), &'static str> {
    let text = text.rsplit_once('@').map_or(text, |(_, host)| host);
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("the address has no closing bracket")?;
            (host, port.strip_prefix(':'))
        }
        None => match text.rsplit_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = match port {
        Some(port) => port.parse().map_err(|_| "the port is not a number up to 65535")?,
        None => default.ok_or("CONNECT needs host:port")?,
    };
    if host.is_empty() { Err("no host is named") } else { Ok((host.to_owned(), port)) }
}

/// SOCKS5 without authentication, CONNECT only (RFC 1928).
async fn socks<D, S>(inner: &Inner<D>, mut client: S) -> io::Result<()>
where
    D: Dial,
    S: AsyncRead + AsyncWrite + Unpin,
{
    const NO_AUTH: u8 = 0;
    let mut methods = vec![0; usize::from(client.read_u8().await?)];
    client.read_exact(&mut methods).await?;
    if !methods.contains(&NO_AUTH) {
        client.write_all(&[SOCKS, 0xff]).await?;
        return client.shutdown().await;
    }
    client.write_all(&[SOCKS, NO_AUTH]).await?;
    let mut head = [0; 4];
    client.read_exact(&mut head).await?;
    let host = match head[3] {
        1 => std::net::Ipv4Addr::from(client.read_u32().await?).to_string(),
        3 => {
            let mut name = vec![0; usize::from(client.read_u8().await?)];
            client.read_exact(&mut name).await?;
            String::from_utf8(name).unwrap_or_default()
        }
        4 => Ipv6Addr::from(client.read_u128().await?).to_string(),
        _ => return reply(&mut client, 8).await,
    };
    let port = client.read_u16().await?;
    if head[0] != SOCKS || head[1] != 1 {
        return reply(&mut client, 7).await;
    }
    match open(inner, &host, port).await {
        Ok(Opened::Stream(mut stream)) => {
            client.write_all(&socks_reply(0)).await?;
            tokio::io::copy_bidirectional(&mut client, &mut stream).await.map(drop)
        }
        Ok(Opened::Refused { status: 403, .. }) => reply(&mut client, 2).await,
        Ok(Opened::Refused { .. }) => reply(&mut client, 4).await,
        Err(_) => reply(&mut client, 1).await,
    }
}

fn socks_reply(code: u8) -> [u8; 10] {
    [SOCKS, code, 0, 1, 0, 0, 0, 0, 0, 0]
}

async fn reply<S: AsyncWrite + Unpin>(client: &mut S, code: u8) -> io::Result<()> {
    client.write_all(&socks_reply(code)).await?;
    client.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxy_requests_are_read_and_rewritten() {
        let connect = ProxyRequest::parse(b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: pypi.org:443\r\n\r\n").unwrap();
        assert_eq!(connect, ProxyRequest { host: "pypi.org".into(), port: 443, forward: None });
        let v6 = ProxyRequest::parse(b"CONNECT [::1]:8 HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!((v6.host.as_str(), v6.port), ("::1", 8));
        let get = b"GET http://deb.debian.org/debian/x?y HTTP/1.1\r\nHost: deb.debian.org\r\nProxy-Connection: keep-alive\r\nA: b\r\n\r\n";
        let get = ProxyRequest::parse(get).unwrap();
        let want = "GET /debian/x?y HTTP/1.1\r\nconnection: close\r\nHost: deb.debian.org\r\nA: b\r\n\r\n";
        assert_eq!((get.host.as_str(), get.port), ("deb.debian.org", 80));
        assert_eq!(String::from_utf8(get.forward.unwrap()).unwrap(), want);
        let bare = ProxyRequest::parse(b"GET http://h:81 HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!((bare.port, bare.forward.unwrap().starts_with(b"GET / HTTP")), (81, true));
        for bad in ["GET / HTTP/1.1", "CONNECT h HTTP/1.1", "CONNECT :1 HTTP/1.1", "CONNECT h:70000 HTTP/1.1", "X"] {
            assert!(ProxyRequest::parse(format!("{bad}\r\n\r\n").as_bytes()).is_err(), "{bad}");
        }
    }
}
