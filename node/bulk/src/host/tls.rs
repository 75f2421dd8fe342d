//! The handshake: both ends prove their [`PeerId`] with libp2p's certificates, and the allow-list is asked in it, so that a
//! stranger's connection ends before any byte of it is read.
//!
//! libp2p-tls makes and checks the certificates; the configuration is our own, because its offers ChaCha20 first whatever the
//! processor can do, and writes keys to SSLKEYLOGFILE.

use crate::ALPN;
use crate::error::StartError;
use libp2p_identity::{Keypair, PeerId};
use libp2p_tls::certificate;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{self, cipher_suite};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use std::fmt;
use std::sync::Arc;

/// Says whether a peer is a member.
pub type Allow = Arc<dyn Fn(&PeerId) -> bool + Send + Sync>;

/// The node's certificate and what it takes to use it.
pub struct Identity {
    keypair: Keypair,
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl Identity {
    /// A fresh certificate for the node's key.
    pub fn new(keypair: Keypair) -> Result<Self, StartError> {
        let (certificate, key) = certificate::generate(&keypair).map_err(|e| StartError::Identity { why: e.to_string() })?;
        let mut provider = ring::default_provider();
        let (aes, cha) = (cipher_suite::TLS13_AES_128_GCM_SHA256, cipher_suite::TLS13_CHACHA20_POLY1305_SHA256);
        provider.cipher_suites = if has_aes() { vec![aes, cha] } else { vec![cha, aes] };
        Ok(Self { keypair, certificate, key, provider: Arc::new(provider) })
    }
    /// The node's id.
    pub fn peer_id(&self) -> PeerId {
        self.keypair.public().to_peer_id()
    }

    fn resolver(&self) -> Result<Arc<OneCert>, StartError> {
        let key = self.provider.key_provider.load_private_key(self.key.clone_key());
        let key = key.map_err(|e| StartError::Identity { why: e.to_string() })?;
        Ok(Arc::new(OneCert(Arc::new(CertifiedKey::new(vec![self.certificate.clone()], key)))))
    }

    /// How this node accepts connections: from peers that `allow` names.
    pub fn server(&self, allow: Allow) -> Result<quinn::ServerConfig, StartError> {
        let why = |e: &dyn fmt::Display| StartError::Identity { why: e.to_string() };
        let mut c = rustls::ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|e| why(&e))?
            .with_client_cert_verifier(Arc::new(Verifier { allow, expect: None }))
            .with_cert_resolver(self.resolver()?);
        c.alpn_protocols = vec![ALPN.to_vec()];
        // A resumed session would skip the allow-list.
        c.send_tls13_tickets = 0;
        Ok(quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(c).map_err(|e| why(&e))?)))
    }

    /// How this node dials the peer `expect`.
    pub fn client(&self, expect: PeerId) -> Result<quinn::ClientConfig, StartError> {
        let why = |e: &dyn fmt::Display| StartError::Identity { why: e.to_string() };
        let verifier = Verifier { allow: Arc::new(|_| true), expect: Some(expect) };
        let mut c = rustls::ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|e| why(&e))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(self.resolver()?);
        c.alpn_protocols = vec![ALPN.to_vec()];
        c.resumption = rustls::client::Resumption::disabled();
        Ok(quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(c).map_err(|e| why(&e))?)))
    }
}

/// The peer that a connection was proven to be from.
pub fn peer_of(c: &quinn::Connection) -> Option<PeerId> {
    let certs = c.peer_identity()?.downcast::<Vec<CertificateDer<'static>>>().ok()?;
    certificate::parse(certs.first()?).ok().map(|p| p.peer_id())
}

#[cfg(target_arch = "x86_64")]
fn has_aes() -> bool {
    std::is_x86_feature_detected!("aes") && std::is_x86_feature_detected!("pclmulqdq")
}
#[cfg(not(target_arch = "x86_64"))]
fn has_aes() -> bool {
    cfg!(target_arch = "aarch64")
}

/// Hands out the node's one certificate.
struct OneCert(Arc<CertifiedKey>);
impl fmt::Debug for OneCert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OneCert")
    }
}
impl rustls::server::ResolvesServerCert for OneCert {
    fn resolve(&self, _: rustls::server::ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}
impl rustls::client::ResolvesClientCert for OneCert {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
    fn has_certs(&self) -> bool {
        true
    }
}

/// Accepts exactly one certificate of libp2p's kind, of the peer that is expected, if it is allowed.
struct Verifier {
    allow: Allow,
    expect: Option<PeerId>,
}
impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").field("expect", &self.expect).finish_non_exhaustive()
    }
}

impl Verifier {
    fn check(&self, cert: &CertificateDer<'_>, more: &[CertificateDer<'_>]) -> Result<(), Error> {
        if !more.is_empty() {
            return Err(Error::General("more than one certificate".into()));
        }
        let peer = certificate::parse(cert).map_err(|e| Error::General(format!("not a member's certificate: {e}")))?.peer_id();
        if self.expect.is_some_and(|e| e != peer) {
            return Err(Error::General(format!("it is {peer}, another node than was dialled")));
        }
        if !(self.allow)(&peer) {
            return Err(Error::General(format!("{peer} is not a member of this fleet")));
        }
        Ok(())
    }
    fn signature(
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let parsed = certificate::parse(cert).map_err(|e| Error::General(e.to_string()))?;
        parsed.verify_signature(dss.scheme, message, dss.signature()).map_err(|e| Error::General(e.to_string()))?;
        Ok(HandshakeSignatureValid::assertion())
    }
    fn schemes() -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519, SignatureScheme::ECDSA_NISTP256_SHA256, SignatureScheme::ECDSA_NISTP384_SHA384]
    }
    fn old_tls() -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.3 only".into()))
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        cert: &CertificateDer<'_>,
        more: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(cert, more).map(|()| ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::old_tls()
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::signature(message, cert, dss)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        Self::schemes()
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }
    fn verify_client_cert(
        &self,
        cert: &CertificateDer<'_>,
        more: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(cert, more).map(|()| ClientCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::old_tls()
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::signature(message, cert, dss)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        Self::schemes()
    }
}
