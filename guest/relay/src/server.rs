//! The HTTP server for programs inside: limits, the provider's name, the body, and a task for each call.

use std::{io, sync::Arc};

use hyper::{
    Request, Response,
    body::Incoming,
    header::{HeaderMap, UPGRADE},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use ks_proto::relay::{self, HEADERS_MAX, PATH_BYTES_MAX};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::{oneshot, watch},
};

use crate::{
    Dial, Inner,
    answer::{Alive, AnswerBody, Refusal},
    call::{self, Client, Wanted},
    spool::{Spool, SpoolError},
};

/// Bytes of a request's head that hyper may hold: all headers, the path and their frame.
const HEAD_BYTES_MAX: usize = relay::HEADER_BYTES_MAX + PATH_BYTES_MAX + 16 * 1024;

pub(crate) async fn serve<D: Dial>(inner: Arc<Inner<D>>, listener: TcpListener) -> io::Error {
    accept(inner, listener, connection).await
}

/// Gives each client of a listener a task of its own, until the listener fails.
pub(crate) async fn accept<D, F>(
    inner: Arc<Inner<D>>,
    listener: TcpListener,
    serve: fn(Arc<Inner<D>>, TcpStream) -> F,
) -> io::Error
where
    D: Dial,
    F: Future<Output = ()> + Send + 'static,
{
    loop {
        // Beyond the limit clients wait in the backlog, as they would at any busy server.
        let Ok(permit) = inner.connections.clone().acquire_owned().await else { return io::Error::other("closed") };
        match listener.accept().await {
            Ok((socket, _)) => {
                let _ = socket.set_nodelay(true);
                let served = serve(inner.clone(), socket);
                tokio::spawn(async move {
                    served.await;
                    drop(permit);
                });
            }
            Err(e) if is_passing(&e) => tokio::time::sleep(crate::PAUSES.0).await,
            Err(e) => return e,
        }
    }
}

/// One connection's fault, or too few descriptors for a moment.
fn is_passing(e: &io::Error) -> bool {
    const EMFILE: i32 = 24;
    const ENFILE: i32 = 23;
    matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted)
        || matches!(e.raw_os_error(), Some(EMFILE | ENFILE))
}

pub(crate) async fn connection<D, S>(inner: Arc<Inner<D>>, io: S)
where
    D: Dial,
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| {
        let inner = inner.clone();
        async move { Ok::<_, std::convert::Infallible>(answer(inner, request).await) }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.max_headers(HEADERS_MAX).max_buf_size(HEAD_BYTES_MAX);
    // An error is the client's: it sent no HTTP, or it went away.
    let _ = builder.serve_connection(TokioIo::new(io), service).await;
}

async fn answer<D: Dial>(inner: Arc<Inner<D>>, request: Request<Incoming>) -> Response<AnswerBody> {
    // A proxy's request line names a host: only the path counts.
    let path = request.uri().path_and_query().map_or("/", |p| p.as_str()).to_owned();
    let (provider, path) = split(&path);
    match begin(&inner, request, &provider, &path).await {
        // While this waits, `alive` is its own: hyper drops it with this future when the client goes away.
        Ok((answer, alive)) => match answer.await {
            Ok(mut response) => {
                response.body_mut().hold(alive);
                response
            }
            Err(_) => {
                let why = "the call ended without an answer; try again";
                Refusal::new(502, "no-answer", why).response(&provider, &path)
            }
        },
        Err(refusal) => refusal.response(&provider, &path),
    }
}

type Begun = (oneshot::Receiver<Response<AnswerBody>>, Alive);

/// Provider and the path after it.
fn split(path: &str) -> (String, String) {
    let rest = path.strip_prefix('/').unwrap_or(path);
    match rest.find(['/', '?']) {
        Some(at) if rest.as_bytes()[at] == b'/' => (rest[..at].to_owned(), rest[at..].to_owned()),
        Some(at) => (rest[..at].to_owned(), format!("/{}", &rest[at..])),
        None => (rest.to_owned(), "/".to_owned()),
    }
}

async fn begin<D: Dial>(inner: &Arc<Inner<D>>, request: Request<Incoming>, provider: &str, path: &str) -> Result<Begun, Refusal> {
    if request.headers().contains_key(UPGRADE) || request.method() == hyper::Method::CONNECT {
        let why = "the gateway speaks plain HTTP and server-sent events only, no WebSocket";
        return Err(Refusal::new(426, "no-upgrade", why));
    }
    if provider.is_empty() || provider.len() > 64 {
        let why = "the first part of the path names a provider, as in http://127.0.0.1:4180/openai/v1; see `ks provider ls`";
        return Err(Refusal::new(404, "no-provider", why));
    }
    if path.len() > PATH_BYTES_MAX {
        return Err(Refusal::new(414, "bad-request", format!("the path is longer than {} KiB", PATH_BYTES_MAX >> 10)));
    }
    let headers = text(request.headers())?;
    let permit = inner.calls.clone().try_acquire_owned().map_err(|_| {
        let why = format!("{} calls of this session are under way; try again when one has ended", relay::CALLS_MAX);
        Refusal::new(503, "too-many-calls", why)
    })?;
    let method = request.method().as_str().to_owned();
    let body = Spool::take(request.into_body(), &inner.spool).await.map_err(|e| match e {
        SpoolError::TooLong => Refusal::new(413, "too-long", e.to_string()),
        SpoolError::Cut(_) => Refusal::new(400, "bad-request", e.to_string()),
        SpoolError::Disk(_) => Refusal::new(507, "disk-full", e.to_string()),
    })?;
    let (alive, gone) = watch::channel(());
    let (tx, rx) = oneshot::channel();
    let wanted = Wanted { provider: provider.to_owned(), method, path: path.to_owned(), headers, body };
    let inner = inner.clone();
    tokio::spawn(async move {
        call::drive(&inner, wanted, Client::new(tx, gone)).await;
        drop(permit);
    });
    Ok((rx, alive))
}

fn text(headers: &HeaderMap) -> Result<Vec<(String, String)>, Refusal> {
    let mut out = Vec::with_capacity(headers.len());
    for (name, value) in headers {
        let value = std::str::from_utf8(value.as_bytes())
            .map_err(|_| Refusal::new(400, "bad-request", format!("the header {name} is not UTF-8")))?;
        out.push((name.as_str().to_owned(), value.to_owned()));
    }
    relay::check_headers(&out).map_err(|e| Refusal::new(431, "bad-request", e.to_string()))?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn the_first_segment_names_the_provider() {
        let parts = |p| {
            let (a, b) = split(p);
            format!("{a} {b}")
        };
        assert_eq!(parts("/openai/v1/chat/completions?a=b"), "openai /v1/chat/completions?a=b");
        assert_eq!(parts("/gemini"), "gemini /");
        assert_eq!(parts("/x?y"), "x /?y");
        assert_eq!(parts("/"), " /");
        assert_eq!(parts("//v1"), " /v1");
    }
}
