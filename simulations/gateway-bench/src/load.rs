//! Closed-loop clients: each asks for a stream, times its first byte, reads it to its end, and asks again.

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Where and what clients ask.
#[derive(Debug, Clone)]
pub struct Target {
    /// Address.
    pub address: SocketAddr,
    /// Path.
    pub path: &'static str,
    /// Model, with the test provider's faults.
    pub model: String,
    /// Bytes of the prompt.
    pub prompt_bytes: usize,
}

/// What a load found.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// First bytes, milliseconds.
    pub first_ms: Vec<f64>,
    /// Requests that got no whole answer.
    pub failed: u64,
}

/// The value at `p` percent; NaN of nothing.
pub fn percentile(all: &mut [f64], p: f64) -> f64 {
    all.sort_by(f64::total_cmp);
    let at = ((all.len() as f64 - 1.0) * p / 100.0).round();
    all.get(at.max(0.0) as usize).copied().unwrap_or(f64::NAN)
}

impl Found {
    /// p50 and p99, milliseconds.
    pub fn percentiles(&mut self) -> (f64, f64) {
        (percentile(&mut self.first_ms, 50.0), percentile(&mut self.first_ms, 99.0))
    }
}

impl Target {
    fn body(&self, salt: u64) -> Bytes {
        // Not all alike: each is a call of its own.
        let text = format!("{salt:016x} {}", "what a session remembers ".repeat(self.prompt_bytes / 25));
        let v: Value = json!({"model": self.model, "stream": true, "messages": [{"role": "user", "content": text}]});
        Bytes::from(v.to_string())
    }

    /// One request on a connection of its own: milliseconds to the first byte of the body, and the body's length.
    ///
    /// # Errors
    /// If there is no whole answer with status 200.
    pub async fn ask(&self, salt: u64) -> Result<(f64, u64)> {
        let tcp = tokio::net::TcpStream::connect(self.address).await?;
        tcp.set_nodelay(true)?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tcp)).await?;
        let driver = tokio::spawn(connection);
        let request = Request::post(self.path)
            .header("host", "bench")
            .header("authorization", "Bearer sk-bench")
            .header("content-type", "application/json")
            .body(Full::new(self.body(salt)))?;
        let began = Instant::now();
        let answer = sender.send_request(request).await?;
        let status = answer.status();
        let mut body = answer.into_body();
        let (mut first, mut len) = (None, 0);
        while let Some(frame) = body.frame().await {
            let data = frame.context("the body")?.into_data().unwrap_or_default();
            if first.is_none() && !data.is_empty() {
                first = Some(began.elapsed().as_secs_f64() * 1e3);
            }
            len += data.len() as u64;
        }
        driver.abort();
        ensure!(status == 200, "status {status}");
        Ok((first.context("an empty body")?, len))
    }

    /// `clients` at once, each asking `rounds` times; they begin spread over `spread`.
    pub async fn load(&self, clients: usize, rounds: usize, spread: Duration, salt: u64) -> Found {
        let mut tasks = tokio::task::JoinSet::new();
        for c in 0..clients {
            let target = self.clone();
            let wait = spread.mul_f64(c as f64 / clients as f64);
            tasks.spawn(async move {
                tokio::time::sleep(wait).await;
                let mut found = Found::default();
                for r in 0..rounds {
                    let salt = salt + (c * rounds + r) as u64;
                    match tokio::time::timeout(Duration::from_secs(120), target.ask(salt)).await {
                        Ok(Ok((ms, _))) => found.first_ms.push(ms),
                        Ok(Err(_)) | Err(_) => found.failed += 1,
                    }
                }
                found
            });
        }
        let mut all = Found::default();
        while let Some(Ok(one)) = tasks.join_next().await {
            all.first_ms.extend(one.first_ms);
            all.failed += one.failed;
        }
        all
    }
}
