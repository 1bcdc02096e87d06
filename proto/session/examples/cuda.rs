//! A call through a CUDA session, captured in a graph and replayed: `cuda unix:PATH [GPU]`. The rows are zeros.
//!
//!     cargo run --release -p expertd-session --features cuda --example cuda -- unix:/run/expertd/session.sock 0

use std::sync::Arc;

use bytemuck::Zeroable as _;
use expertd_session::DType;
use expertd_session::cuda::wire::PreparedCall;
use expertd_session::cuda::{CudaSession, CudaSessionOptions, SessionStream};

const TOKENS: u32 = 8;
const REPLAYS: u32 = 100;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().ok_or("usage: cuda unix:PATH [GPU]")?;
    let device = arguments.next().map_or(Ok(0), |gpu| gpu.parse())?;
    let options = CudaSessionOptions { device, ..CudaSessionOptions::default() };
    let session = Arc::new(CudaSession::open(&address, &options)?);

    let bytes = TOKENS as usize * session.hidden() * DType::Bf16.size();
    let output = bytes.next_multiple_of(64);
    let call = PreparedCall {
        layer: 0,
        dtype: DType::Bf16 as u32,
        max_rows: TOKENS,
        rows: 0,
        output: output as u64,
        ..PreparedCall::zeroed()
    };
    let prepared = session.prepare(&[call])?;
    session.memory().write(0, &vec![0; bytes])?;

    let stream = SessionStream::new(&session, 0)?;
    let graph = stream.capture(|| stream.call(prepared[0], TOKENS))?;
    for _ in 0..REPLAYS {
        stream.replay(&graph)?;
    }
    stream.synchronize()?;
    let status = stream.status()?;
    if let Some(failure) = status.last_failure {
        return Err(format!("call {}: code {}: {}", failure.call, failure.code, failure.message).into());
    }
    let mut row = vec![0; session.hidden() * DType::Bf16.size()];
    session.memory().read(output, &mut row)?;
    let receipt = status.last.ok_or("no call has ended")?;
    println!("{} calls; the last one took {:?} in its step", status.calls, receipt.step_time);
    Ok(())
}
