//! Messages and body frames on a stream to the gateway.

use std::io;

use ks_proto::{
    DecodeError,
    relay::{self, BodyFrame, FRAME_HEADER_BYTES, RelayAnswer, RelayAsk},
};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

fn invalid(e: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, e)
}

/// Writes an ask.
pub(crate) async fn write_ask<W: AsyncWrite + Unpin>(w: &mut W, ask: &RelayAsk) -> io::Result<()> {
    w.write_all(&relay::encode_message(ask).map_err(invalid)?).await
}

/// Reads an answer.
pub(crate) async fn read_answer<R: AsyncRead + Unpin>(r: &mut R) -> io::Result<RelayAnswer> {
    let mut length = [0; 4];
    r.read_exact(&mut length).await?;
    let mut json = vec![0; relay::message_length(length).map_err(invalid)?];
    r.read_exact(&mut json).await?;
    relay::decode_message(&json).map_err(invalid)
}

/// Writes bytes of a body, in frames.
pub(crate) async fn write_data<W: AsyncWrite + Unpin>(w: &mut W, data: &[u8]) -> io::Result<()> {
    for piece in data.chunks(relay::PAYLOAD_BYTES_MAX) {
        w.write_all(&BodyFrame::data_header(piece.len())).await?;
        w.write_all(piece).await?;
    }
    Ok(())
}

/// Writes a frame.
pub(crate) async fn write_frame<W: AsyncWrite + Unpin>(w: &mut W, frame: &BodyFrame) -> io::Result<()> {
    w.write_all(&frame.encode()).await
}

/// Reads a frame.
pub(crate) async fn read_frame<R: AsyncRead + Unpin>(r: &mut R) -> io::Result<BodyFrame> {
    let mut header = [0; FRAME_HEADER_BYTES];
    r.read_exact(&mut header).await?;
    let (kind, len) = BodyFrame::header(header).map_err(invalid)?;
    let mut payload = vec![0; len];
    r.read_exact(&mut payload).await?;
    BodyFrame::from_parts(kind, payload).map_err(invalid)
}
