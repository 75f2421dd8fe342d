//! HTTPS nodes of one fleet, made of canned answers: one authority, a leaf for each.

use crate::fake::{Answer, Request, TOKEN};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

/// A certificate authority.
pub struct Authority {
    der: Vec<u8>,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let der = params.self_signed(&key).unwrap().der().to_vec();
        Self { der, issuer: Issuer::new(params, key) }
    }
    pub fn fingerprint(&self) -> String {
        blake3::hash(&self.der).to_hex().to_string()
    }
    fn server(&self, name: &str) -> ServerConfig {
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &self.issuer).unwrap();
        let chain = vec![leaf.der().clone(), self.der.clone().into()];
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        builder.with_no_client_auth().with_single_cert(chain, key).unwrap()
    }
}

/// One node; ends when dropped.
pub struct Secure {
    pub address: SocketAddr,
    pub requests: Arc<Mutex<Vec<Request>>>,
    _runtime: tokio::runtime::Runtime,
}

impl Secure {
    /// A body of status 0 closes the connection without an answer.
    pub fn new(ca: &Authority, name: &str, http: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let requests: Arc<Mutex<Vec<Request>>> = Arc::default();
        let acceptor = TlsAcceptor::from(Arc::new(ca.server(name)));
        let (http, seen) = (Arc::new(http), requests.clone());
        runtime.spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let (acceptor, http, seen) = (acceptor.clone(), http.clone(), seen.clone());
                tokio::spawn(async move {
                    // A client that does not believe us ends here.
                    let Ok(mut tls) = acceptor.accept(tcp).await else { return };
                    let mut head = vec![];
                    while !head.ends_with(b"\r\n\r\n") {
                        let Ok(b) = tls.read_u8().await else { return };
                        head.push(b);
                    }
                    let head = String::from_utf8(head).unwrap();
                    let lower = head.to_ascii_lowercase();
                    assert!(lower.contains(&format!("authorization: bearer {TOKEN}")), "no token in {head}");
                    let length = lower.lines().find_map(|l| l.strip_prefix("content-length: ")?.trim().parse().ok()).unwrap_or(0);
                    let mut body = vec![0; length];
                    tls.read_exact(&mut body).await.unwrap();
                    let request = Request { line: head.lines().next().unwrap().to_owned(), body };
                    seen.lock().unwrap().push(request.clone());
                    let a = http(&request);
                    if a.status > 0 {
                        let head =
                            format!("HTTP/1.1 {} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", a.status, a.body.len());
                        let _ = tls.write_all(head.as_bytes()).await;
                        let _ = tls.write_all(&a.body).await;
                    }
                    let _ = tls.shutdown().await;
                });
            }
        });
        Self { address, requests, _runtime: runtime }
    }
    pub fn asked(&self, line: &str) -> usize {
        self.requests.lock().unwrap().iter().filter(|r| r.line.starts_with(line)).count()
    }
}
