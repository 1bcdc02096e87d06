//! Latency and throughput of calls through a session, whose rows are written once and computed again and again:
//!
//!     latency unix:/run/expertd/session.sock LAYERS SECONDS IN_FLIGHT TOKENS...
//!
//! Calls name the layers 0 to LAYERS - 1 in turn. For each number of tokens it prints, in µs, the median and the 99th percentile
//! of the latency, the median time in the queue and in the step, the medians of the latency less the step and of the latency less the
//! phases on the device, and rows per second. With one call in flight, some answers of each layer must equal its first one; not all,
//! because a comparison of many rows takes longer than the service's threads stay awake between calls.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use expertd_session::{Buffer, Call, PendingCall, Session, SessionError, SessionOptions};
use expertd_types::DType;

/// No call takes this long.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Calls before the measured ones.
const WARM_UP: usize = 50;
/// One in this many rounds over the layers is compared with the first answers.
const ROUNDS_PER_CHECK: usize = 32;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, layers, seconds, in_flight, tokens @ ..] = &arguments[..] else {
        return Err("usage: latency unix:PATH LAYERS SECONDS IN_FLIGHT TOKENS...".into());
    };
    let tokens: Vec<usize> = tokens.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
    let (layers, in_flight): (u32, usize) = (layers.parse()?, in_flight.parse()?);
    let duration = Duration::from_secs_f64(seconds.parse()?);
    println!("tokens calls p50 p99 queue step latency-step latency-phases rows/s");
    for tokens in tokens {
        let measured = measure(address, layers, in_flight, tokens, duration)?;
        println!("{measured}");
    }
    Ok(())
}

/// Values that differ from row to row, as bf16: exponents around 1, mantissas and signs at random.
fn fill(rows: &mut [u8], seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for element in rows.chunks_exact_mut(2) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let value = (state as u16 & 0x807f) | (0x3e80 + ((state >> 20) as u16 & 0x180));
        element.copy_from_slice(&value.to_le_bytes());
    }
}

struct Flight {
    call: PendingCall,
    begun: Instant,
    layer: u32,
}

fn begin(
    session: &Session,
    layer: u32,
    tokens: usize,
    buffers: (Buffer, Buffer),
) -> Result<Flight, SessionError> {
    let begun = Instant::now();
    let call = session.submit(&Call::new(layer, tokens, DType::Bf16), buffers.0, buffers.1)?;
    Ok(Flight { call, begun, layer })
}

fn measure(
    address: &str,
    layers: u32,
    in_flight: usize,
    tokens: usize,
    duration: Duration,
) -> Result<String, Box<dyn std::error::Error>> {
    let bytes = |session: &Session| tokens * session.hidden() * 2;
    let hidden = Session::open(address, &SessionOptions::default())?.hidden();
    let rows_bytes = (tokens * hidden * 2 + 4096) * 2 * in_flight;
    let session = Session::open(address, &SessionOptions { rows_bytes, ..SessionOptions::default() })?;
    let mut layer = 0;
    let mut next_layer = || {
        layer = (layer + 1) % layers;
        layer
    };
    let mut flights = VecDeque::new();
    for seed in 0..in_flight {
        let (mut rows, output) = (session.buffer(bytes(&session))?, session.buffer(bytes(&session))?);
        fill(rows.as_mut_slice(), seed as u64 + 1);
        flights.push_back(begin(&session, next_layer(), tokens, (rows, output))?);
    }
    let mut first_answers: HashMap<u32, Vec<u8>> = HashMap::new();
    let (mut samples, mut calls, mut started) = (Vec::new(), 0, Instant::now());
    while let Some(Flight { call, begun, layer }) = flights.pop_front() {
        let answer = call.wait(TIMEOUT)?;
        let latency = begun.elapsed();
        calls += 1;
        if calls == WARM_UP {
            started = Instant::now();
        } else if calls > WARM_UP {
            let receipt = &answer.receipt;
            let phases: Duration = receipt.phases[1..6].iter().sum();
            samples.push([latency, receipt.queue_time, receipt.step_time, phases]);
        }
        if in_flight == 1 && (calls / layers.max(1) as usize).is_multiple_of(ROUNDS_PER_CHECK) {
            let first = first_answers.entry(layer).or_insert_with(|| answer.output.as_slice().to_vec());
            if first != answer.output.as_slice() {
                return Err(
                    format!("layer {layer}: an answer of call {calls} differs from the first one").into()
                );
            }
        }
        if calls < WARM_UP || started.elapsed() < duration {
            flights.push_back(begin(&session, next_layer(), tokens, (answer.rows, answer.output))?);
        }
    }
    let elapsed = started.elapsed();
    let micros = |values: &mut Vec<f64>, share: f64| {
        values.sort_by(f64::total_cmp);
        values.get((values.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN)
    };
    let of = |value: fn(&[Duration; 4]) -> Duration, share: f64| {
        let mut values: Vec<f64> = samples.iter().map(|sample| value(sample).as_secs_f64() * 1e6).collect();
        micros(&mut values, share)
    };
    Ok(format!(
        "{tokens} {} {:.1} {:.1} {:.1} {:.1} {:.1} {:.1} {:.0}",
        samples.len(),
        of(|s| s[0], 0.5),
        of(|s| s[0], 0.99),
        of(|s| s[1], 0.5),
        of(|s| s[2], 0.5),
        of(|s| s[0].saturating_sub(s[2]), 0.5),
        of(|s| s[0].saturating_sub(s[3]), 0.5),
        (samples.len() * tokens) as f64 / elapsed.as_secs_f64(),
    ))
}
