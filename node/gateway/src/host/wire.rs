//! Messages and body frames over a stream; the forms are in `ks_proto::relay`.
//!
//! Refuses every length before it allocates. What a peer sends is hostile.

use ks_proto::DecodeError;
use ks_proto::relay::{BodyFrame, FRAME_HEADER_BYTES, PAYLOAD_BYTES_MAX, encode_message, message_length};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Why nothing more comes from a stream.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The stream ended or broke.
    #[error("the stream ended")]
    Io(#[from] io::Error),
    /// The peer sent what it may not send.
    #[error("{0}")]
    Decode(#[from] DecodeError),
}

/// The JSON of the next message; None at the end of the stream.
///
/// # Errors
/// If it is too long, or the stream breaks inside it.
pub async fn read_json(stream: &mut (impl AsyncRead + Unpin)) -> Result<Option<Vec<u8>>, WireError> {
    let mut head = [0; 4];
    match stream.read_exact(&mut head).await {
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(e.into()),
    }
    let mut json = vec![0; message_length(head)?];
    stream.read_exact(&mut json).await?;
    Ok(Some(json))
}

/// The next message; None at the end of the stream.
///
/// # Errors
/// As [`read_json`], and if it is no message of this type.
pub async fn read_message<T: DeserializeOwned>(stream: &mut (impl AsyncRead + Unpin)) -> Result<Option<T>, WireError> {
    let Some(mut json) = read_json(stream).await? else { return Ok(None) };
    let out = ks_proto::relay::decode_message(&json);
    // It may have held a key.
    zeroize::Zeroize::zeroize(&mut json);
    Ok(Some(out?))
}

/// Writes a message.
///
/// # Errors
/// If it is too long or the stream broke.
pub async fn write_message<T: Serialize>(stream: &mut (impl AsyncWrite + Unpin), message: &T) -> Result<(), WireError> {
    let bytes = encode_message(message)?;
    stream.write_all(&bytes).await?;
    Ok(stream.flush().await?)
}

/// The next body frame; None at the end of the stream.
///
/// # Errors
/// If it is no frame, or the stream breaks inside it.
pub async fn read_frame(stream: &mut (impl AsyncRead + Unpin)) -> Result<Option<BodyFrame>, WireError> {
    let mut head = [0; FRAME_HEADER_BYTES];
    match stream.read_exact(&mut head).await {
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(e.into()),
    }
    let (kind, len) = BodyFrame::header(head)?;
    let mut payload = vec![0; len];
    stream.read_exact(&mut payload).await?;
    Ok(Some(BodyFrame::from_parts(kind, payload)?))
}

/// Writes an end or an abort; a reason is cut to what a frame holds.
///
/// # Errors
/// If the stream broke.
pub async fn write_end(stream: &mut (impl AsyncWrite + Unpin), abort: Option<&str>) -> Result<(), WireError> {
    let frame = match abort {
        None => BodyFrame::End,
        Some(why) => BodyFrame::Abort(why.chars().take(PAYLOAD_BYTES_MAX / 4).collect()),
    };
    stream.write_all(&frame.encode()).await?;
    Ok(stream.flush().await?)
}

/// Reads and drops what a peer still sends, so that it reads the refusal before it finds the stream gone. Bounded in bytes and time.
pub async fn drain(stream: &mut (impl AsyncRead + Unpin)) {
    let most = ks_proto::relay::BODY_BYTES_MAX * 2;
    let dropping = async {
        let (mut buf, mut dropped) = (vec![0; 16 * 1024], 0);
        while dropped < most {
            match stream.read(&mut buf).await {
                Ok(n) if n > 0 => dropped += n as u64,
                Ok(_) | Err(_) => return,
            }
        }
    };
    let _ = tokio::time::timeout(crate::limits::LAST_WORDS, dropping).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use ks_proto::relay::RelayAnswer;

    #[tokio::test]
    async fn messages_and_frames_pass_and_lengths_are_refused_before_allocation() {
        let mut out = Vec::new();
        write_message(&mut out, &RelayAnswer::Accepted { seq: 7 }).await.unwrap();
        out.extend(BodyFrame::Data(vec![1, 2, 3]).encode());
        write_end(&mut out, Some("why")).await.unwrap();
        let mut r = &out[..];
        assert_eq!(read_message::<RelayAnswer>(&mut r).await.unwrap(), Some(RelayAnswer::Accepted { seq: 7 }));
        assert_eq!(read_frame(&mut r).await.unwrap(), Some(BodyFrame::Data(vec![1, 2, 3])));
        assert_eq!(read_frame(&mut r).await.unwrap(), Some(BodyFrame::Abort("why".into())));
        assert!(read_frame(&mut r).await.unwrap().is_none());
        let mut huge = &[0xff, 0xff, 0xff, 0xff, 0][..];
        assert!(matches!(read_json(&mut huge).await, Err(WireError::Decode(_))));
        let mut huge = &[0, 0xff, 0xff, 0xff, 0x7f][..];
        assert!(matches!(read_frame(&mut huge).await, Err(WireError::Decode(_))));
    }
}
