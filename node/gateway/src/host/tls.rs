//! Connections to providers: TCP, and TLS with the public roots or with those an operator named.
//!
//! A certificate that does not verify fails the connection; there is no switch that says otherwise.

use crate::limits::CONNECT_PATIENCE;
use hyper::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// The certificates to trust: those in `pem`, else the public ones.
///
/// # Errors
/// If `pem` holds no certificate that can be trusted.
pub fn roots(pem: Option<&str>) -> io::Result<RootCertStore> {
    let bad = |why: String| io::Error::new(io::ErrorKind::InvalidInput, format!("the certificates to trust: {why}"));
    let mut store = RootCertStore::empty();
    match pem {
        None => store.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(pem) => {
            for cert in CertificateDer::pem_slice_iter(pem.as_bytes()) {
                store.add(cert.map_err(|e| bad(e.to_string()))?).map_err(|e| bad(e.to_string()))?;
            }
            if store.is_empty() {
                return Err(bad("there is no PEM certificate in them".to_owned()));
            }
        }
    }
    Ok(store)
}

/// Makes connections for one provider.
#[derive(Clone)]
pub struct Connector {
    tls: TlsConnector,
}

impl Connector {
    /// Trusting `pem`, or the public roots.
    ///
    /// # Errors
    /// As [`roots`].
    pub fn new(pem: Option<&str>) -> io::Result<Self> {
        let mut config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_root_certificates(roots(pem)?)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { tls: TlsConnector::from(Arc::new(config)) })
    }
}

/// One connection.
pub enum Wire {
    /// To a loopback address.
    Plain(TokioIo<TcpStream>),
    /// To anywhere else.
    Tls(Box<TokioIo<TlsStream<TcpStream>>>),
}

async fn connect(tls: TlsConnector, uri: Uri) -> io::Result<Wire> {
    let host = uri.host().ok_or_else(|| io::Error::other("the URL has no host"))?.trim_matches(['[', ']']).to_owned();
    let secure = uri.scheme_str() == Some("https");
    let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
    let work = async {
        let tcp = TcpStream::connect((host.as_str(), port)).await?;
        tcp.set_nodelay(true)?;
        if !secure {
            return Ok(Wire::Plain(TokioIo::new(tcp)));
        }
        let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
        let stream = tls.connect(name, tcp).await?;
        Ok(Wire::Tls(Box::new(TokioIo::new(stream))))
    };
    let late = || io::Error::new(io::ErrorKind::TimedOut, format!("{host}:{port} did not answer within {CONNECT_PATIENCE:?}"));
    tokio::time::timeout(CONNECT_PATIENCE, work).await.unwrap_or_else(|_| Err(late()))
}

impl tower_service::Service<Uri> for Connector {
    type Response = Wire;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Wire>> + Send>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(connect(self.tls.clone(), uri))
    }
}

impl Connection for Wire {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl hyper::rt::Read for Wire {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: hyper::rt::ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Wire::Plain(s) => Pin::new(s).poll_read(cx, buf),
            Wire::Tls(s) => Pin::new(s.as_mut()).poll_read(cx, buf),
        }
    }
}

impl hyper::rt::Write for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Wire::Plain(s) => Pin::new(s).poll_write(cx, buf),
            Wire::Tls(s) => Pin::new(s.as_mut()).poll_write(cx, buf),
        }
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Wire::Plain(s) => Pin::new(s).poll_flush(cx),
            Wire::Tls(s) => Pin::new(s.as_mut()).poll_flush(cx),
        }
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Wire::Plain(s) => Pin::new(s).poll_shutdown(cx),
            Wire::Tls(s) => Pin::new(s.as_mut()).poll_shutdown(cx),
        }
    }
}
