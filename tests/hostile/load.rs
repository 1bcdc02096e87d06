//! Honest callers while faults are caused.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use expertd_client::Client;
use expertd_proto::v1::{DType, ForwardRequest};

use crate::attack::honest_client;

/// Deadline of each call, and the time limit for things that must happen.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Four callers, on a thread of their own.
pub struct Load {
    over: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    failed: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    pub fn start(address: &str) -> Load {
        let (over, answered, failed) = (Arc::default(), Arc::default(), Arc::default());
        let mut load = Load { over, answered, failed, thread: None };
        let (over, answered, failed) =
            (Arc::clone(&load.over), Arc::clone(&load.answered), Arc::clone(&load.failed));
        let address = address.to_owned();
        let thread = std::thread::spawn(move || {
            let callers: Vec<_> = (0..4).map(|_| caller(&address, &over, &answered, &failed)).collect();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(futures_util::future::join_all(callers));
        });
        load.thread = Some(thread);
        load
    }

    /// Number of calls that have been answered.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Waits until a few calls that began after this one have been answered. `false`: they are not within [`PATIENCE`].
    pub fn goes_on(&self) -> bool {
        let (before, begun) = (self.answered(), Instant::now());
        while self.answered() < before + 8 {
            if begun.elapsed() > PATIENCE {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// The errors of calls since the last look.
    pub fn take_failed(&self) -> Vec<String> {
        std::mem::take(&mut *self.failed.lock().unwrap())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn caller(address: &str, over: &AtomicBool, answered: &AtomicU64, failed: &Mutex<Vec<String>>) {
    let client = honest_client(address).await.unwrap();
    while !over.load(Ordering::Relaxed) {
        match call(&client).await {
            Ok(()) => _ = answered.fetch_add(1, Ordering::Relaxed),
            Err(error) => {
                failed.lock().unwrap().push(error);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

async fn call(client: &Client) -> Result<(), String> {
    let model = client.model("").await.map_err(|status| status.to_string())?;
    let rows = Bytes::from(vec![0; model.hidden as usize * 4]);
    let request = ForwardRequest::inline(model.moe_layers[0].layer, 1, DType::DtypeF32, rows);
    client.forward(request, Some(PATIENCE)).await.map(drop).map_err(|status| status.to_string())
}

/// Whether `/readyz` says that the service is ready. No answer within a second is a no.
pub fn is_ready(metrics: &str) -> bool {
    let address = metrics.trim_start_matches("http://").trim_end_matches("/metrics");
    let ask = || -> std::io::Result<String> {
        let mut socket = TcpStream::connect(address)?;
        socket.set_read_timeout(Some(Duration::from_secs(1)))?;
        socket.write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
}
