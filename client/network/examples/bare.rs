//! The bare transport: two processes write `BYTES` bytes with a notification to each other in turn, and poll as both ends of a session do
//! while they spin. Prints a line of JSON for each size of a call: rows of 2048 elements in bf16.
//!
//! `cargo run --release -p expertd-network --example bare -- [inline] [SECONDS]`; `UCX_TLS` and `UCX_NET_DEVICES` choose the transport,
//! and with `UCX_LOG_LEVEL=info` UCX says which it uses. By default it is a session's: all but shared memory, on loopback.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use expertd_network::wire::Place;
use expertd_network::{Card, Endpoint, Library, Transports};
use expertd_shm::SharedRegion;

const AREA: usize = 16 << 20;
const ROW: usize = 2048 * 2;
const ROWS: [usize; 5] = [1, 8, 64, 512, 2048];
/// Largest size that is tried within a notification.
const INLINE: usize = 2 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let has = |word: &str| words.iter().any(|given| given == word);
    let (inline, is_child) = (has("inline"), has("child"));
    let seconds = words.iter().find_map(|word| word.parse().ok()).unwrap_or(2.0);
    let library = Library::open(None)?;
    let region = SharedRegion::create("bare", AREA)?;
    region.populate(0, AREA)?;
    let name = if is_child { "child" } else { "parent" };
    let transports =
        Transports { transports: Some("^sm".into()), device: Some("lo".into()), ..Transports::default() };
    let mut end = Endpoint::new(&library, name, &transports, region.slice(0, AREA)?)?;
    if is_child {
        exchange(&mut end, &mut std::io::stdout(), &mut std::io::stdin().lock())?;
        return serve(&mut end, inline);
    }
    let mut command = Command::new(std::env::current_exe()?);
    let mut child = command.args(&words).arg("child").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let (Some(mut to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
        return Err("no pipes".into());
    };
    exchange(&mut end, &mut to, &mut BufReader::new(from))?;
    for rows in ROWS {
        let bytes = rows * ROW;
        if inline && bytes > INLINE {
            break;
        }
        let times = measure(&mut end, bytes, inline, Duration::from_secs_f64(seconds))?;
        let at = |part: usize| times[times.len() * part / 100].as_secs_f64();
        println!(
            "{{\"rows\": {rows}, \"bytes\": {bytes}, \"inline\": {inline}, \"p50_seconds\": {:.9}, \"p99_seconds\": {:.9}, \
             \"round_trips\": {}}}",
            at(50),
            at(99),
            times.len()
        );
    }
    end.send(&[], &[])?;
    while end.is_sending() {
        end.poll(|_| Ok(()))?;
    }
    child.wait()?;
    Ok(())
}

/// Answers until an empty notification comes.
fn serve(end: &mut Endpoint, inline: bool) -> Result<(), Box<dyn Error>> {
    loop {
        let mut got: Option<Vec<u8>> = None;
        end.poll(|bytes| {
            got = Some(bytes.to_vec());
            Ok(())
        })?;
        match got {
            Some(message) if message.is_empty() => return Ok(()),
            Some(message) => answer(end, &message, inline)?,
            None => {}
        }
    }
}

/// Times of round trips, sorted; those of the first tenth are not counted.
fn measure(
    end: &mut Endpoint,
    bytes: usize,
    inline: bool,
    length: Duration,
) -> Result<Vec<Duration>, Box<dyn Error>> {
    let mut message = vec![7_u8; if inline { bytes + 8 } else { 96 }];
    message[..8].copy_from_slice(&(bytes as u64).to_le_bytes());
    let mut times = Vec::new();
    let start = Instant::now();
    while times.is_empty() || start.elapsed() < length {
        let begun = Instant::now();
        answer(end, &message, inline)?;
        let mut arrived = false;
        while !arrived {
            end.poll(|_| {
                arrived = true;
                Ok(())
            })?;
        }
        if start.elapsed() > length / 10 {
            times.push(begun.elapsed());
        }
    }
    times.sort_unstable();
    Ok(times)
}

fn answer(end: &mut Endpoint, message: &[u8], inline: bool) -> Result<(), Box<dyn Error>> {
    let bytes = u64::from_le_bytes(message[..8].try_into()?) as usize;
    if inline {
        end.rows().store_bytes(0, &message[8..]);
        end.send(&[], message)?;
    } else {
        end.send(&[Place { start: 0, bytes }], message)?;
    }
    Ok(())
}

/// Sends this end's card, and connects to the one that comes back.
fn exchange(end: &mut Endpoint, to: &mut impl Write, from: &mut impl BufRead) -> Result<(), Box<dyn Error>> {
    let card = end.card()?;
    let hex: String = card.metadata.iter().map(|byte| format!("{byte:02x}")).collect();
    writeln!(to, "{} {hex}", card.rows_address)?;
    to.flush()?;
    let mut line = String::new();
    from.read_line(&mut line)?;
    let (address, hex) = line.trim().split_once(' ').ok_or("no card")?;
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16);
    let metadata = (0..hex.len()).step_by(2).map(byte).collect::<Result<_, _>>()?;
    Ok(end.connect(&Card { metadata, rows_address: address.parse()? })?)
}
