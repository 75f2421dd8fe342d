//! iroh-blobs' own client reads packs from this provider: the protocol is its, not a dialect.

use super::world::*;
use crate::host::tls::Identity;
use crate::{Keypair, wire::BLOBS};
use bytes::Bytes;
use iroh::endpoint::VarInt;
use iroh_blobs::store::mem::MemStore;
use iroh_blobs::util::{RecvStream, SendStream};
use iroh_blobs::{Hash, HashAndFormat, get};
use ks_proto::ids::PackId;
use std::io;

struct Sending(quinn::SendStream);
struct Receiving(quinn::RecvStream);

fn code(c: VarInt) -> quinn::VarInt {
    quinn::VarInt::from_u64(c.into_inner()).unwrap()
}
fn early(e: quinn::ReadExactError) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, e)
}

impl SendStream for Sending {
    async fn send_bytes(&mut self, bytes: Bytes) -> io::Result<()> {
        Ok(self.0.write_chunk(bytes).await?)
    }
    async fn send(&mut self, buf: &[u8]) -> io::Result<()> {
        Ok(self.0.write_all(buf).await?)
    }
    async fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn reset(&mut self, c: VarInt) -> io::Result<()> {
        self.0.reset(code(c)).map_err(io::Error::other)
    }
    async fn stopped(&mut self) -> io::Result<Option<VarInt>> {
        let stopped = self.0.stopped().await.map_err(io::Error::other)?;
        Ok(stopped.map(|c| VarInt::from_u64(c.into_inner()).unwrap()))
    }
    fn id(&self) -> u64 {
        self.0.id().index()
    }
}
impl RecvStream for Receiving {
    async fn recv_bytes(&mut self, len: usize) -> io::Result<Bytes> {
        let mut buf = vec![0; len];
        match self.0.read_exact(&mut buf).await {
            Ok(()) => {}
            Err(quinn::ReadExactError::FinishedEarly(n)) => buf.truncate(n),
            Err(e) => return Err(early(e)),
        }
        Ok(buf.into())
    }
    async fn recv_bytes_exact(&mut self, len: usize) -> io::Result<Bytes> {
        let mut buf = vec![0; len];
        self.0.read_exact(&mut buf).await.map_err(early)?;
        Ok(buf.into())
    }
    async fn recv_exact(&mut self, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_exact(buf).await.map_err(early)
    }
    fn stop(&mut self, c: VarInt) -> io::Result<()> {
        self.0.stop(code(c)).map_err(io::Error::other)
    }
    fn id(&self) -> u64 {
        self.0.id().index()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn iroh_blobs_own_client_fetches_packs() {
    let tmp = tempfile::tempdir().unwrap();
    let members = Members::default();
    let a = Node::start(&tmp.path().join("a"), &members);
    checkpoint(&a.store, &Image { memory: (1..60).collect(), disk: vec![] }, 40);
    let keypair = Keypair::generate_ed25519();
    members.lock().unwrap().insert(keypair.public().to_peer_id());
    let client = Identity::new(keypair).unwrap().client(a.bulk.peer_id()).unwrap();
    let endpoint = quinn::Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
    let c = endpoint.connect_with(client, a.bulk.local_addr().unwrap(), "any").unwrap().await.unwrap();
    let theirs = MemStore::new();
    // Twice: out of memory at the first read, checked against the kept tree at the second.
    for store in [&theirs, &MemStore::new()] {
        for path in packs(&a.dir) {
            let id: PackId = path.file_stem().unwrap().to_str().unwrap().parse().unwrap();
            let (mut send, recv) = c.open_bi().await.unwrap();
            send.write_all(&[BLOBS]).await.unwrap();
            let pair = get::StreamPair::new(0, Receiving(recv), Sending(send));
            let hash = Hash::from_bytes(id.0);
            store.remote().fetch(pair, HashAndFormat::raw(hash)).complete().await.unwrap();
            assert_eq!(store.blobs().get_bytes(hash).await.unwrap(), std::fs::read(&path).unwrap());
        }
    }
}
