//! One call through a session, without a copy of its rows, as `client/c/examples/forward.c` makes it:
//!
//!     cargo run -p expertd-session --example forward unix:/run/expertd/session.sock LAYER TOKENS
//!
//! Row `r` has the value `r + 1` in every element. Prints the receipt and the sum of the output.

use std::error::Error;
use std::time::Duration;

use expertd_session::{Call, DType, Session, SessionOptions};

/// Time limit of the call.
const TIMEOUT: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, layer, tokens] = &arguments[..] else {
        return Err("usage: forward unix:PATH LAYER TOKENS".into());
    };
    println!("{}", forward(address, layer.parse()?, tokens.parse()?)?);
    Ok(())
}

/// Opens a session, makes the call, and describes its answer in a line.
///
/// # Errors
/// If the service refuses the session or the call, or does not answer in time.
pub fn forward(address: &str, layer: u32, tokens: usize) -> Result<String, Box<dyn Error>> {
    let session = Session::open(address, &SessionOptions::default())?;
    let row_bytes = session.hidden() * DType::F32.size();
    // The ranks read the rows here and write the output there.
    let mut rows = session.buffer(tokens * row_bytes)?;
    let output = session.buffer(tokens * row_bytes)?;
    for (value, row) in (1_u16..).zip(rows.as_mut_slice().chunks_exact_mut(row_bytes)) {
        row.as_chunks_mut::<4>().0.fill(f32::from(value).to_le_bytes());
    }
    let call = Call { timeout: Some(TIMEOUT), ..Call::new(layer, tokens, DType::F32) };
    let answer = session.submit(&call, rows, output)?.wait(TIMEOUT)?;
    let values = answer.output.as_slice().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    let sum: f64 = values.map(f64::from).sum();
    let receipt = &answer.receipt;
    Ok(format!(
        "generation {}, weight version {}, step {}, sum of the output {sum:.9e}",
        receipt.generation, receipt.weight_version, receipt.steps.0
    ))
}
