//! The fleet's certificate, pinned: a node is believed when its chain ends in the authority whose fingerprint we hold,
//! whatever the address is called. Public authorities count for nothing here.

use crate::context::Fingerprint;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use std::sync::{Arc, Mutex, PoisonError};

/// The name in every node's certificate.
const NAME: &str = ks_proto::fleet::NODE_SERVER_NAME;
/// What a failed pin says; found again in the error of a connection.
pub const OTHER_FLEET: &str = "its certificate is not of the pinned fleet";

/// Lower-case hex BLAKE3 of a certificate.
pub fn fingerprint_of(der: &[u8]) -> Fingerprint {
    Fingerprint::of(*blake3::hash(der).as_bytes())
}

/// A client configuration that believes only the fleet of this fingerprint. `ca` is its authority's certificate, when we
/// have it; else the node must send it along. A wrong `ca` is as good as none.
pub fn pinned(fingerprint: Fingerprint, ca: Option<Vec<u8>>) -> Result<ClientConfig, Error> {
    let provider = Arc::new(ring::default_provider());
    let ca = ca.filter(|der| fingerprint_of(der) == fingerprint).map(CertificateDer::from);
    let pin = Pin { fingerprint, ca, provider: provider.clone() };
    config(provider, Arc::new(pin))
}

/// A client configuration that believes nobody, and what the other side showed of itself.
pub fn looking() -> Result<(ClientConfig, Arc<Seen>), Error> {
    let provider = Arc::new(ring::default_provider());
    let seen = Arc::new(Seen { chain: Mutex::new(vec![]), provider: provider.clone() });
    Ok((config(provider, seen.clone())?, seen))
}

fn config(provider: Arc<CryptoProvider>, verifier: Arc<dyn ServerCertVerifier>) -> Result<ClientConfig, Error> {
    let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13])?;
    Ok(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth())
}

#[derive(Debug)]
struct Pin {
    fingerprint: Fingerprint,
    ca: Option<CertificateDer<'static>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pin {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        _asked: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let shown = chain.iter().find(|c| fingerprint_of(c) == self.fingerprint);
        let ca = self.ca.as_ref().or(shown).ok_or_else(|| Error::General(OTHER_FLEET.into()))?;
        let mut roots = RootCertStore::empty();
        roots.add(ca.clone().into_owned())?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone()).build();
        let verifier = verifier.map_err(|e| Error::General(e.to_string()))?;
        let name = ServerName::try_from(NAME).map_err(|e| Error::General(e.to_string()))?;
        verifier.verify_server_cert(leaf, chain, &name, ocsp, now).map_err(|e| match e {
            Error::InvalidCertificate(c) => Error::General(format!("{OTHER_FLEET} ({c:?})")),
            other => other,
        })
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken".into()))
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Notes the chain and refuses it.
#[derive(Debug)]
pub struct Seen {
    chain: Mutex<Vec<Vec<u8>>>,
    provider: Arc<CryptoProvider>,
}

impl Seen {
    /// Fingerprint of the last certificate of the chain, which is the authority's.
    pub fn authority(&self) -> Option<Fingerprint> {
        let chain = self.chain.lock().unwrap_or_else(PoisonError::into_inner);
        chain.get(1..).and_then(<[_]>::last).map(|der| fingerprint_of(der))
    }
}

impl ServerCertVerifier for Seen {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        _asked: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let all = std::iter::once(leaf).chain(chain).map(|c| c.to_vec()).collect();
        *self.chain.lock().unwrap_or_else(PoisonError::into_inner) = all;
        Err(Error::General("only looking".into()))
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken".into()))
    }
    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("only looking".into()))
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
