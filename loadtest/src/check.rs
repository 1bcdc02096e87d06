//! Checks of answers.
//!
//! A sampled answer carries the routing that produced it. Some of its rows are sent again with that routing given
//! verbatim, in another order and among other rows, so that they are in another batch, at other positions and mostly on
//! other ranks. The outputs must agree within the tolerance. They would not if rows had been swapped, mixed with rows
//! of another request, reduced twice or read from a stale buffer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::{ForwardRequest, ForwardResponse, Routing};
use tokio::sync::{Mutex, mpsc};
use tonic::Code;

use crate::connect::Client;
use crate::request::{RequestSource, Workload};
use crate::stats::Recorder;
use expertd_types::{DType, rows};

/// Number of rows of an answer that are sent again.
const ROWS: usize = 4;
/// Largest number of extra rows that are sent with them.
pub const EXTRA_ROWS: usize = 4;
/// Time for which a check is retried while the service cannot answer.
const RETRY_TIME: Duration = Duration::from_secs(20);

/// An answered request whose routing was returned.
#[derive(Debug)]
pub struct Sample {
    /// The request.
    pub request: ForwardRequest,
    /// The answer to the request.
    pub response: ForwardResponse,
}

/// The largest relative L2 error of a row in `got`, compared with `wanted`.
#[must_use]
pub fn largest_error(got: &[u8], dtype: DType, wanted: &[f32], hidden: usize) -> f64 {
    let got = rows::decode(got, dtype);
    if got.len() != wanted.len() {
        return f64::INFINITY;
    }
    let pairs = got.chunks(hidden).zip(wanted.chunks(hidden));
    pairs.map(|(got, wanted)| rows::relative_error(got, wanted)).fold(0.0, f64::max)
}

/// Checks samples until their channel closes.
pub async fn run(
    workload: Arc<Workload>,
    recorder: Arc<Recorder>,
    samples: Arc<Mutex<mpsc::Receiver<Sample>>>,
    mut client: Client,
    worker: u64,
    tolerance: f64,
) {
    let mut source = workload.source(worker, 0.0);
    loop {
        let received = samples.lock().await.recv().await;
        let Some(sample) = received else { return };
        let verdict = error_in_another_batch(&workload, &mut client, &mut source, &sample).await;
        let mut stats = recorder.of(worker);
        let (layer, tokens) = (sample.request.layer, sample.request.tokens);
        match verdict {
            Ok(Some(error)) => {
                stats.checked_again += 1;
                stats.largest_error = stats.largest_error.max(error);
                if error > tolerance {
                    stats.wrong(format!(
                        "layer {layer}, {tokens} tokens, steps {:?}: sent again in another batch, rows differ by \
                         {error:.2e}",
                        sample.response.receipt.map(|receipt| receipt.steps).unwrap_or_default()
                    ));
                }
            }
            Ok(None) => stats.unchecked += 1,
            Err(why) => {
                stats.checked_again += 1;
                stats.wrong(format!("layer {layer}, {tokens} tokens: {why}"));
            }
        }
    }
}

/// The largest relative error between the sampled rows and the same rows sent again; `None` if the service did not
/// answer or now has other weights.
async fn error_in_another_batch(
    workload: &Workload,
    client: &mut Client,
    source: &mut RequestSource,
    sample: &Sample,
) -> Result<Option<f64>, String> {
    let Sample { request, response } = sample;
    let tokens = request.tokens as usize;
    let receipt = response.receipt.as_ref().ok_or("no receipt")?;
    let k = applied_k(request, receipt.topk_ids.len(), receipt.topk_weights.len(), tokens)?;
    if let Some(given) = &request.routing
        && (given.topk_ids != receipt.topk_ids || given.topk_weights != receipt.topk_weights)
    {
        return Err("the returned routing differs from the given routing".to_owned());
    }
    let Some(Payload::Inline(input)) = &request.payload else { return Ok(None) };
    let chosen = (0..tokens.min(ROWS)).map(|_| source.below(tokens)).collect::<Vec<_>>();
    // The new request must not exceed the service's limit either.
    let room = (workload.most_tokens as usize).saturating_sub(chosen.len());
    let extra = source.below(EXTRA_ROWS.min(room) + 1);
    let place = source.below(extra + 1);
    let row = |bytes: &Bytes, row: usize| {
        let size = bytes.len() / tokens;
        bytes.slice(row * size..(row + 1) * size)
    };
    // The order is `place` extra rows, the chosen rows, then the other extra rows; extra rows get the routing of
    // sampled rows.
    let fresh = source.rows(extra);
    let fresh_row = |index: usize| {
        let size = fresh.len() / extra;
        fresh.slice(index * size..(index + 1) * size)
    };
    let order = (0..place).map(Err).chain(chosen.iter().copied().map(Ok)).chain((place..extra).map(Err));
    let (mut payload, mut ids, mut weights) = (BytesMut::new(), BytesMut::new(), BytesMut::new());
    let mut token_ids = BytesMut::new();
    for entry in order {
        let source = entry.unwrap_or_else(|index| index % tokens);
        payload.extend_from_slice(&entry.map_or_else(fresh_row, |index| row(input, index)));
        ids.extend_from_slice(&row(&receipt.topk_ids, source));
        weights.extend_from_slice(&row(&receipt.topk_weights, source));
        if !request.token_ids.is_empty() {
            token_ids.extend_from_slice(&row(&request.token_ids, source));
        }
    }
    let asked = ForwardRequest {
        tokens: u32::try_from(extra + chosen.len()).unwrap_or(u32::MAX),
        payload: Some(Payload::Inline(payload.freeze())),
        routing: Some(Routing { topk_ids: ids.freeze(), topk_weights: weights.freeze(), k }),
        token_ids: token_ids.freeze(),
        return_routing: false,
        return_timings: false,
        ..request.clone()
    };
    let Some(answer) = ask(client, asked).await? else { return Ok(None) };
    if answer.receipt.as_ref().is_some_and(|new| new.weight_version != receipt.weight_version) {
        return Ok(None);
    }
    let hidden = workload.model.hidden as usize;
    let size = response.rows.len() / tokens;
    let got = answer.rows.get(place * size..(place + chosen.len()) * size).unwrap_or_default();
    let wanted = chosen.iter().flat_map(|&index| row(&response.rows, index)).collect::<Vec<u8>>();
    Ok(Some(largest_error(got, workload.dtype, &rows::decode(&wanted, workload.dtype), hidden)))
}

/// Number of experts per row in a receipt.
fn applied_k(request: &ForwardRequest, ids: usize, weights: usize, tokens: usize) -> Result<u32, String> {
    if ids == 0 || ids != weights || !ids.is_multiple_of(4 * tokens) {
        return Err(format!(
            "routing was requested, but {} rows came with {ids} bytes of ids and {weights} bytes of weights",
            request.tokens
        ));
    }
    u32::try_from(ids / (4 * tokens)).map_err(|error| error.to_string())
}

/// Calls the service and retries while it cannot answer; `None` if it did not answer within [`RETRY_TIME`].
async fn ask(client: &mut Client, request: ForwardRequest) -> Result<Option<ForwardResponse>, String> {
    let begun = Instant::now();
    while begun.elapsed() < RETRY_TIME {
        match tokio::time::timeout(RETRY_TIME, client.forward(request.clone(), None)).await {
            Ok(Ok(answer)) => return Ok(Some(answer)),
            Ok(Err(status)) if matches!(status.code(), Code::Unavailable | Code::ResourceExhausted) => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Ok(Err(status)) => {
                let (code, message) = (status.code(), status.message());
                return Err(format!(
                    "the same rows with the returned routing were refused: {code:?}: {message}"
                ));
            }
            Err(_) => return Ok(None),
        }
    }
    Ok(None)
}
