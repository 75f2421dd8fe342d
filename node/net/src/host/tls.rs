//! The fleet's certificates: a CA made with the fleet, a leaf for each node's HTTPS API, and clients that trust exactly that CA.
//!
//! A client pins the CA (by certificate or by its BLAKE3, as in a join token) and asks only that the leaf is the CA's and of this
//! use: it never compares the leaf's names with the address, because nodes move and every leaf of the CA is a node of this fleet.
//! TLS 1.3 only, with the provider named explicitly, so it does not depend on a process-wide choice.

use std::{net::IpAddr, sync::Arc};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SignatureAlgorithm, date_time_ymd,
};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error as RustlsError, RootCertStore, ServerConfig, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime},
};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The name that every leaf has besides the node's own.
pub const NODE_NAME: &str = "ks-node";
/// Most names of one leaf.
const NAMES_MAX: usize = 64;
const CA_NAME: &str = "KeepState fleet CA";
/// An uncompressed P-256 point.
const PUBLIC_KEY_BYTES: usize = 65;

/// Why a certificate or a configuration could not be made.
#[derive(Debug, Error)]
pub enum TlsError {
    /// Not a key of ours.
    #[error("the {0} is not a P-256 key: it was damaged, or written by another program")]
    Key(&'static str),
    /// A name for a leaf that is neither an IP address nor a host name, or too many.
    #[error(
        "{0:?} cannot be a name in a certificate: it must be an IP address or a host name, and there can be at most {NAMES_MAX}"
    )]
    Name(String),
    /// CA certificate and CA key are not of one CA.
    #[error("the fleet's CA certificate and CA key do not belong together")]
    Mismatch,
    /// The certificate library refused.
    #[error("cannot make the certificate")]
    Certificate(#[from] rcgen::Error),
    /// The TLS library refused.
    #[error("cannot set up TLS")]
    Tls(#[from] RustlsError),
}

/// BLAKE3 of a certificate (DER): what clients and join tokens pin.
#[must_use]
pub fn fingerprint(ca_der: &[u8]) -> [u8; 32] {
    *blake3::hash(ca_der).as_bytes()
}

/// The fleet's CA with its key; for the voters. Serialises as hex; whoever reads it can make nodes' certificates.
#[derive(Clone, Serialize, Deserialize)]
pub struct FleetCa {
    #[serde(with = "hex::serde")]
    cert_der: Vec<u8>,
    #[serde(with = "hex::serde")]
    key_der: Vec<u8>,
}

impl std::fmt::Debug for FleetCa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FleetCa({})", hex::encode(fingerprint(&self.cert_der)))
    }
}

impl FleetCa {
    /// A new CA; once per fleet.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub fn create() -> Result<Self, TlsError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let cert = ca_params().self_signed(&key)?;
        Ok(Self { cert_der: cert.der().to_vec(), key_der: key.serialize_der() })
    }

    /// From stored parts.
    ///
    /// # Errors
    /// [`TlsError::Key`], [`TlsError::Mismatch`].
    pub fn from_parts(cert_der: Vec<u8>, key_der: Vec<u8>) -> Result<Self, TlsError> {
        let ca = Self { cert_der, key_der };
        let probe = ca.issue(ApiKey::create()?.public(), &[])?;
        let verifier = verifier(&ca.cert_der)?;
        let checked = verifier.verify_server_cert(&probe.into(), &[], &node_name(), &[], UnixTime::now());
        checked.map(|_| ca).map_err(|_| TlsError::Mismatch)
    }

    /// The CA's certificate, DER: public.
    #[must_use]
    pub fn cert_der(&self) -> &[u8] {
        &self.cert_der
    }

    /// The CA's key, PKCS#8 DER: secret.
    #[must_use]
    pub fn key_der(&self) -> &[u8] {
        &self.key_der
    }

    /// [`fingerprint`] of the certificate.
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        fingerprint(&self.cert_der)
    }

    /// A leaf (DER) for the node that holds the key of `public` ([`ApiKey::public`]), with these IP addresses and host names.
    ///
    /// # Errors
    /// [`TlsError::Key`], [`TlsError::Name`].
    pub fn issue(&self, public: &[u8], names: &[String]) -> Result<Vec<u8>, TlsError> {
        if public.len() != PUBLIC_KEY_BYTES || public[0] != 4 {
            return Err(TlsError::Key("node's API key"));
        }
        let key = key_pair(&self.key_der, "fleet's CA key")?;
        let mut params = CertificateParams::default();
        params.distinguished_name = named(NODE_NAME);
        params.subject_alt_names = alt_names(names)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(2099, 1, 1);
        let issuer = Issuer::new(ca_params(), key);
        Ok(params.signed_by(&RawPublic(public), &issuer)?.der().to_vec())
    }
}

/// A node's key for its HTTPS API; never leaves the node. Serialises as hex.
#[derive(Clone, Serialize, Deserialize)]
pub struct ApiKey {
    #[serde(with = "hex::serde")]
    key_der: Vec<u8>,
    #[serde(with = "hex::serde")]
    public: Vec<u8>,
}

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ApiKey({})", hex::encode(&self.public))
    }
}

impl ApiKey {
    /// A new key.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub fn create() -> Result<Self, TlsError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        Ok(Self { public: key.public_key_raw().to_vec(), key_der: key.serialize_der() })
    }

    /// The public half, which the CA needs: an uncompressed P-256 point of 65 bytes.
    #[must_use]
    pub fn public(&self) -> &[u8] {
        &self.public
    }
}

/// The HTTPS server of a node: its leaf, the CA's certificate (so that a client that has only the fingerprint can check), HTTP/1.1.
///
/// # Errors
/// [`TlsError::Tls`]: leaf and key do not belong together.
pub fn server_config(key: &ApiKey, leaf_der: &[u8], ca_der: &[u8]) -> Result<Arc<ServerConfig>, TlsError> {
    let chain = vec![CertificateDer::from(leaf_der.to_vec()), CertificateDer::from(ca_der.to_vec())];
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.key_der.clone()));
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// What a client trusts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// The CA's certificate.
    Ca(Vec<u8>),
    /// The CA's fingerprint; the server shows the certificate.
    Fingerprint([u8; 32]),
}

/// A client of nodes of one fleet. The server name that it is used with does not matter.
///
/// # Errors
/// [`TlsError::Tls`]: the certificate is none.
pub fn client_config(trust: Trust) -> Result<Arc<ClientConfig>, TlsError> {
    if let Trust::Ca(ca) = &trust {
        verifier(ca)?;
    }
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Pinned { trust, provider: provider() }))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn key_pair(pkcs8: &[u8], what: &'static str) -> Result<KeyPair, TlsError> {
    KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(pkcs8.to_vec()), &PKCS_ECDSA_P256_SHA256)
        .map_err(|_| TlsError::Key(what))
}

fn named(name: &str) -> DistinguishedName {
    let mut out = DistinguishedName::new();
    out.push(DnType::CommonName, name);
    out
}

/// The same for every fleet: the CA's certificate can be rebuilt as an issuer from its key alone.
fn ca_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = named(CA_NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2099, 1, 1);
    params
}

fn alt_names(names: &[String]) -> Result<Vec<SanType>, TlsError> {
    if names.len() > NAMES_MAX {
        return Err(TlsError::Name(format!("{} names", names.len())));
    }
    let mut out = vec![SanType::DnsName(NODE_NAME.try_into()?)];
    for name in names {
        if let Ok(ip) = name.parse::<IpAddr>() {
            out.push(SanType::IpAddress(ip));
        } else {
            let host = ServerName::try_from(name.as_str()).map_err(|_| TlsError::Name(name.clone()))?;
            let text = host.to_str().into_owned();
            out.push(SanType::DnsName(text.try_into().map_err(|_| TlsError::Name(name.clone()))?));
        }
    }
    Ok(out)
}

/// A public key as it came over the wire.
struct RawPublic<'a>(&'a [u8]);

impl PublicKeyData for RawPublic<'_> {
    fn der_bytes(&self) -> &[u8] {
        self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

fn node_name() -> ServerName<'static> {
    ServerName::try_from(NODE_NAME).expect("a constant that is a host name")
}

fn verifier(ca_der: &[u8]) -> Result<Arc<WebPkiServerVerifier>, TlsError> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(ca_der.to_vec()))?;
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
        .build()
        .map_err(|error| TlsError::Tls(RustlsError::General(error.to_string())))
}

#[derive(Debug)]
struct Pinned {
    trust: Trust,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        shown: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, RustlsError> {
        let ca = match &self.trust {
            Trust::Ca(ca) => ca.as_slice(),
            Trust::Fingerprint(pinned) => shown
                .iter()
                .find(|cert| fingerprint(cert) == *pinned)
                .ok_or(RustlsError::InvalidCertificate(CertificateError::UnknownIssuer))?,
        };
        let verifier = verifier(ca).map_err(|_| RustlsError::InvalidCertificate(CertificateError::BadEncoding))?;
        verifier.verify_server_cert(leaf, &[], &node_name(), ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        Err(RustlsError::General("only TLS 1.3 is spoken".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
#[path = "tls_tests.rs"]
mod tests;
