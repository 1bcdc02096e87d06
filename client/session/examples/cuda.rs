//! Calls through a CUDA session, captured in a graph and replayed: `cuda unix:PATH [GPU [LAYER [K]]]`. The rows are zeros. With K, the calls
//! are made once more with ids and weights of K experts per token, and once with those of the gate returned if it chooses K.
//!
//!     cargo run --release -p expertd-session --features cuda --example cuda -- unix:/run/expertd/session.sock 0 0 8

use std::sync::Arc;
use std::time::Instant;

use bytemuck::Zeroable as _;
use expertd_session::DType;
use expertd_session::cuda::wire::{PreparedCall, RoutingLayout};
use expertd_session::cuda::{CudaSession, CudaSessionOptions, Prepared, RoutingPlaces, SessionStream};
use expertd_session::wire::RequestRecord;

const TOKENS: u32 = 8;
/// Calls that a graph holds, so that its launch does not count.
const CALLS: u32 = 16;
const REPLAYS: u32 = 100;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().ok_or("usage: cuda unix:PATH [GPU [LAYER [K]]]")?;
    let mut number = || arguments.next().map_or(Ok(0), |text| text.parse::<u32>());
    let (device, layer, k) = (number()?, number()?, number()?);
    let routing = RoutingLayout::new(RequestRecord::GIVEN_ROUTING, TOKENS, k);
    let routing_bytes = routing.bytes as u32;
    let options = CudaSessionOptions { device, routing_bytes, ..CudaSessionOptions::default() };
    let session = Arc::new(CudaSession::open(&address, &options)?);

    let rows = TOKENS as usize * session.hidden() * DType::Bf16.size();
    let output = rows.next_multiple_of(64);
    let call = PreparedCall {
        layer,
        dtype: DType::Bf16 as u32,
        max_rows: TOKENS,
        rows: 0,
        output: output as u64,
        ..PreparedCall::zeroed()
    };
    let memory = session.memory();
    memory.write(0, &vec![0; rows])?;
    run(&session, session.prepare(&[call])?[0], "routed by the gate")?;
    if k > 0 {
        let ids = (output + rows).next_multiple_of(64);
        let weights = ids + routing.weights;
        let places = RoutingPlaces { ids: ids as u64, weights: weights as u64, token_ids: 0 };
        let row: Vec<i32> = (0..k as i32).collect();
        memory.write(ids, bytemuck::cast_slice(&row.repeat(TOKENS as usize)))?;
        memory.write(weights, bytemuck::cast_slice(&vec![1.0 / k as f32; (TOKENS * k) as usize]))?;
        let given = PreparedCall { flags: RequestRecord::GIVEN_ROUTING, k, ..call };
        run(&session, session.prepare_routed(&[(given, places)])?[0], "with ids and weights")?;
        let returned = PreparedCall { flags: RequestRecord::RETURN_ROUTING, k, ..call };
        match session.prepare_routed(&[(returned, places)]) {
            Ok(prepared) => run(&session, prepared[0], "with returned routing")?,
            Err(error) => println!("with returned routing: {error}"),
        }
    }
    Ok(())
}

/// Captures calls, replays them and prints the time of a call.
fn run(session: &Arc<CudaSession>, call: Prepared, what: &str) -> Result<(), Box<dyn std::error::Error>> {
    let stream = SessionStream::new(session, 0)?;
    let graph = stream.capture(|| (0..CALLS).try_for_each(|_| stream.call(call, TOKENS)))?;
    stream.replay(&graph)?;
    stream.synchronize()?;
    let begun = Instant::now();
    for _ in 0..REPLAYS {
        stream.replay(&graph)?;
    }
    stream.synchronize()?;
    let each = begun.elapsed() / (REPLAYS * CALLS);
    let status = stream.status()?;
    if let Some(failure) = status.last_failure {
        return Err(format!("call {}: code {}: {}", failure.call, failure.code, failure.message).into());
    }
    println!("{TOKENS} tokens {what}: {each:?} a call, {} calls so far", status.calls);
    Ok(())
}
