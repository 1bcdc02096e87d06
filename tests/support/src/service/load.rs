//! Load with known answers: recorded rows are repeated and reordered, and every answer is compared.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use expertd_cli::golden::Golden;
use expertd_client::Client;
use expertd_proto::v1::{self, ForwardRequest, ForwardResponse};
use expertd_types::DType;
use expertd_types::rows::{decode, encode, encode_i32, relative_error};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::task::JoinSet;
use tonic::{Code, Status};

/// Time after which a call counts as lost.
const LOST: Duration = Duration::from_secs(120);
const TOLERANCE: f64 = 1e-5;

/// One call of the load.
#[derive(Clone, Debug)]
pub struct Call {
    pub begun: Instant,
    pub ended: Instant,
    /// `Ok(generation)`, or the status of the failure.
    pub result: Result<u64, (Code, String)>,
}

impl Call {
    pub fn in_flight_at(&self, when: Instant) -> bool {
        self.begun <= when && self.ended >= when
    }
}

/// Recorded rows of one layer, drawn at random.
pub struct Rows {
    tolerance: f64,
    golden: Golden,
    layers: Vec<u32>,
    rng: SmallRng,
    largest: usize,
}

impl Rows {
    pub fn new(path: &Path, seed: u64, largest: usize) -> Rows {
        let golden = Golden::read(path).unwrap();
        let layers = golden.layers.keys().copied().collect();
        Rows { tolerance: TOLERANCE, golden, layers, rng: SmallRng::seed_from_u64(seed), largest }
    }

    /// The same rows with another bound on a row's relative error.
    pub fn within(self, tolerance: f64) -> Rows {
        Rows { tolerance, ..self }
    }

    /// A request of random recorded rows and its right answer.
    pub fn draw(&mut self) -> (ForwardRequest, Vec<f32>) {
        let layer = self.layers[self.rng.random_range(0..self.layers.len())];
        let count = self.rng.random_range(1..=self.largest);
        self.draw_of(layer, count)
    }

    /// Panics unless the answer is right.
    pub fn check(&self, response: &ForwardResponse, wanted: &[f32], request: &ForwardRequest) {
        check_within(self.tolerance, response, wanted, request);
    }

    /// The layers that were recorded.
    pub fn layers(&self) -> &[u32] {
        &self.layers
    }

    /// A request of `count` random recorded rows of `layer` and its right answer.
    pub fn draw_of(&mut self, layer: u32, count: usize) -> (ForwardRequest, Vec<f32>) {
        let rows = &self.golden.layers[&layer];
        let (mut input, mut output, mut ids) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..count {
            let row = self.rng.random_range(0..rows.tokens);
            let span = row * rows.hidden..(row + 1) * rows.hidden;
            input.extend_from_slice(&rows.input[span.clone()]);
            output.extend_from_slice(&rows.output[span]);
            ids.extend(self.golden.token_ids.get(row));
        }
        let payload = encode(&input, DType::F32);
        let request = ForwardRequest::inline(layer, count as u32, v1::DType::DtypeF32, payload)
            .with_token_ids(encode_i32(&ids));
        (request, output)
    }
}

/// Panics unless the answer is right.
pub fn check(response: &ForwardResponse, wanted: &[f32], request: &ForwardRequest) {
    check_within(TOLERANCE, response, wanted, request);
}

/// The same, with another bound on a row's relative error.
pub fn check_within(tolerance: f64, response: &ForwardResponse, wanted: &[f32], request: &ForwardRequest) {
    let got = decode(&response.rows, DType::F32);
    let hidden = wanted.len() / request.tokens as usize;
    assert_eq!(got.len(), wanted.len(), "rows of layer {}", request.layer);
    for (row, (got, wanted)) in got.chunks(hidden).zip(wanted.chunks(hidden)).enumerate() {
        let error = relative_error(got, wanted);
        let receipt = response.receipt.as_ref();
        assert!(error <= tolerance, "layer {} row {row} is off by {error:.1e}: {receipt:?}", request.layer);
    }
}

/// A load that runs until it is stopped: unary callers and streams, each on its own connection.
pub struct Load {
    stop: Arc<AtomicBool>,
    /// Number of right answers so far.
    answered: Arc<AtomicU64>,
    workers: JoinSet<Vec<Call>>,
}

impl Load {
    pub async fn start(address: &str, golden: &Path, largest: usize) -> Load {
        Load::start_within(TOLERANCE, address, golden, largest).await
    }

    pub async fn start_within(tolerance: f64, address: &str, golden: &Path, largest: usize) -> Load {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut workers = JoinSet::new();
        for worker in 0..4 {
            let client = Client::connect(address).await.unwrap();
            let rows = Rows::new(golden, worker, largest).within(tolerance);
            let (stop, answered) = (Arc::clone(&stop), Arc::clone(&answered));
            if worker % 2 == 0 {
                workers.spawn(unary(client, rows, stop, answered));
            } else {
                workers.spawn(streaming(client, rows, stop, answered));
            }
        }
        Load { stop, answered, workers }
    }

    /// Waits until `calls` further calls are answered. Ten calls are in flight at most.
    pub async fn goes_on(&self, calls: u64) {
        let (wanted, begun) = (self.answered.load(Ordering::Relaxed) + calls, Instant::now());
        while self.answered.load(Ordering::Relaxed) < wanted {
            assert!(begun.elapsed() < LOST, "{calls} calls were not answered within {LOST:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Ends the load. Returns every call that it made; all answers have been checked.
    pub async fn stop(self) -> Vec<Call> {
        self.stop.store(true, Ordering::Relaxed);
        let calls = tokio::time::timeout(LOST + LOST, self.workers.join_all()).await;
        calls.expect("calls that never end are lost").concat()
    }
}

fn outcome(
    tolerance: f64,
    result: Result<ForwardResponse, Status>,
    request: &ForwardRequest,
    wanted: &[f32],
) -> Result<u64, (Code, String)> {
    match result {
        Ok(response) => {
            check_within(tolerance, &response, wanted, request);
            Ok(response.receipt.unwrap().generation)
        }
        Err(status) => Err((status.code(), status.message().to_owned())),
    }
}

async fn pause_after(result: &Result<u64, (Code, String)>) {
    if result.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn unary(client: Client, mut rows: Rows, stop: Arc<AtomicBool>, answered: Arc<AtomicU64>) -> Vec<Call> {
    let mut calls = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let (request, wanted) = rows.draw();
        let begun = Instant::now();
        let answer = tokio::time::timeout(LOST, client.forward(request.clone(), None)).await;
        let result = outcome(rows.tolerance, answer.expect("a lost call"), &request, &wanted);
        answered.fetch_add(u64::from(result.is_ok()), Ordering::Relaxed);
        pause_after(&result).await;
        calls.push(Call { begun, ended: Instant::now(), result });
    }
    calls
}

/// Four in flight on a stream; a stream that breaks is opened again.
async fn streaming(
    client: Client,
    mut rows: Rows,
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
) -> Vec<Call> {
    let mut calls = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let mut pending = std::collections::HashMap::new();
        let begun = Instant::now();
        let (sender, mut answers) = match tokio::time::timeout(LOST, client.stream(8)).await.expect("lost") {
            Ok(stream) => stream,
            Err(status) => {
                let result = Err((status.code(), status.message().to_owned()));
                pause_after(&result).await;
                calls.push(Call { begun, ended: Instant::now(), result });
                continue;
            }
        };
        let mut id = 0;
        loop {
            while pending.len() < 4 && !stop.load(Ordering::Relaxed) {
                let (request, wanted) = rows.draw();
                if sender.send(id, request.clone(), None).await.is_err() {
                    break;
                }
                pending.insert(id, (Instant::now(), request, wanted));
                id += 1;
            }
            if pending.is_empty() {
                break;
            }
            match tokio::time::timeout(LOST, answers.next()).await.expect("a lost answer") {
                Ok(Some((id, answer))) => {
                    let (begun, request, wanted) = pending.remove(&id).expect("an id that is in flight");
                    let result = outcome(rows.tolerance, answer, &request, &wanted);
                    let ended = Instant::now();
                    answered.fetch_add(u64::from(result.is_ok()), Ordering::Relaxed);
                    pause_after(&result).await;
                    calls.push(Call { begun, ended, result });
                }
                Ok(None) => {
                    assert!(pending.is_empty(), "the stream ended with {} in flight", pending.len());
                    break;
                }
                Err(status) => {
                    let ended = Instant::now();
                    for (_, (begun, ..)) in pending.drain() {
                        let result = Err((status.code(), status.message().to_owned()));
                        calls.push(Call { begun, ended, result });
                    }
                    break;
                }
            }
        }
    }
    calls
}
