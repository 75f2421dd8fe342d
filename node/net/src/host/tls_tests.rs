//! Handshakes over a pipe: who is trusted, and who is not.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

/// A handshake and one byte; the client's error if it refuses.
async fn meet(server: Arc<ServerConfig>, client: Arc<ClientConfig>, name: &str) -> Result<u8, String> {
    let (near, far) = tokio::io::duplex(16_384);
    let served = tokio::spawn(async move {
        let mut stream = tokio_rustls::TlsAcceptor::from(server).accept(far).await?;
        stream.write_all(&[42]).await?;
        stream.shutdown().await
    });
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let result = async {
        let mut stream = tokio_rustls::TlsConnector::from(client).connect(name, near).await?;
        stream.read_u8().await
    };
    let result = result.await.map_err(|error| error.to_string());
    let _ = served.await;
    result
}

fn node(ca: &FleetCa) -> Arc<ServerConfig> {
    let key = ApiKey::create().unwrap();
    let leaf = ca.issue(key.public(), &["127.0.0.1".into(), "fd00::1".into(), "node-1.example.org".into()]).unwrap();
    server_config(&key, &leaf, ca.cert_der()).unwrap()
}

#[tokio::test]
async fn a_client_trusts_the_nodes_of_its_fleet_wherever_they_are() {
    let ca = FleetCa::create().unwrap();
    for trust in [Trust::Ca(ca.cert_der().to_vec()), Trust::Fingerprint(ca.fingerprint())] {
        for name in ["127.0.0.1", "10.9.8.7", "whatever.example.org"] {
            assert_eq!(meet(node(&ca), client_config(trust.clone()).unwrap(), name).await, Ok(42), "{trust:?} {name}");
        }
    }
}

#[tokio::test]
async fn another_fleet_and_a_self_made_chain_are_refused() {
    let (ca, other) = (FleetCa::create().unwrap(), FleetCa::create().unwrap());
    for trust in [Trust::Ca(ca.cert_der().to_vec()), Trust::Fingerprint(ca.fingerprint())] {
        let refused = meet(node(&other), client_config(trust.clone()).unwrap(), "127.0.0.1").await;
        assert!(refused.is_err(), "{refused:?}");
        // The other fleet's leaf, shown beside the pinned CA's certificate.
        let key = ApiKey::create().unwrap();
        let leaf = other.issue(key.public(), &[]).unwrap();
        let refused = meet(server_config(&key, &leaf, ca.cert_der()).unwrap(), client_config(trust).unwrap(), "127.0.0.1").await;
        assert!(refused.is_err(), "{refused:?}");
    }
}

/// With the CA as a file, any client that checks names the usual way is content with the leaf's own names, and with no other.
#[tokio::test]
async fn an_ordinary_client_with_the_ca_as_root_accepts_the_leafs_names() {
    let ca = FleetCa::create().unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(ca.cert_der().to_vec())).unwrap();
    let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&rustls::version::TLS13]).unwrap();
    let client = Arc::new(builder.with_root_certificates(roots).with_no_client_auth());
    for name in ["127.0.0.1", "fd00::1", "node-1.example.org", NODE_NAME] {
        assert_eq!(meet(node(&ca), client.clone(), name).await, Ok(42), "{name}");
    }
    assert!(meet(node(&ca), client, "10.9.8.7").await.is_err());
}

#[test]
fn stored_parts_come_back_and_wrong_ones_are_refused() {
    let (ca, other) = (FleetCa::create().unwrap(), FleetCa::create().unwrap());
    let again = FleetCa::from_parts(ca.cert_der().to_vec(), ca.key_der().to_vec()).unwrap();
    assert_eq!(again.fingerprint(), *blake3::hash(ca.cert_der()).as_bytes());
    let text = serde_json::to_string(&ca).unwrap();
    assert_eq!(serde_json::from_str::<FleetCa>(&text).unwrap().fingerprint(), ca.fingerprint());
    let mixed = FleetCa::from_parts(ca.cert_der().to_vec(), other.key_der().to_vec());
    assert!(matches!(mixed, Err(TlsError::Mismatch)), "{mixed:?}");
    assert!(matches!(FleetCa::from_parts(ca.cert_der().to_vec(), vec![1, 2, 3]), Err(TlsError::Key(_))));
    assert!(FleetCa::from_parts(vec![1, 2, 3], ca.key_der().to_vec()).is_err());
    let key = ApiKey::create().unwrap();
    for (public, name) in [(&key.public()[1..], "h"), (&[][..], "h"), (key.public(), "a b"), (key.public(), "")] {
        assert!(ca.issue(public, &[name.into()]).is_err(), "{name:?}");
    }
    assert!(ca.issue(key.public(), &vec!["h".into(); NAMES_MAX + 1]).is_err());
    let stranger = ApiKey::create().unwrap();
    let leaf = ca.issue(key.public(), &[]).unwrap();
    assert!(matches!(server_config(&stranger, &leaf, ca.cert_der()), Err(TlsError::Tls(_))));
    assert!(client_config(Trust::Ca(vec![0; 10])).is_err());
    assert!(!format!("{ca:?}{key:?}").contains(&hex::encode(ca.key_der())));
}
