//! The bare transport: two processes write `BYTES` bytes with a notification to each other in turn, and poll. Prints the time of a
//! round trip.
//!
//! `cargo run --release -p expertd-network --example bare -- [inline]`; `UCX_TLS` chooses the transport.

use std::error::Error;
use std::io::BufReader;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use expertd_network::wire::Place;
use expertd_network::{Card, Endpoint, Library, Transports};
use expertd_shm::SharedRegion;

const AREA: usize = 32 << 20;
const SIZES: [usize; 6] = [4096, 32 << 10, 256 << 10, 2 << 20, 8 << 20, 16 << 20];

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let inline = words.iter().any(|word| word == "inline");
    let is_child = words.iter().any(|word| word == "child");
    let library = Library::open(None)?;
    let region = SharedRegion::create("bare", AREA)?;
    region.populate(0, AREA)?;
    let name = if is_child { "child" } else { "parent" };
    let mut end = Endpoint::new(&library, name, &Transports::default(), region.slice(0, AREA)?)?;
    if is_child {
        exchange(&mut end, &mut std::io::stdout(), &mut std::io::stdin().lock())?;
        loop {
            let mut got: Option<Vec<u8>> = None;
            end.poll(|bytes| {
                got = Some(bytes.to_vec());
                Ok(())
            })?;
            let Some(message) = got else { continue };
            if message.is_empty() {
                return Ok(());
            }
            answer(&mut end, &message, inline)?;
        }
    }
    let mut command = Command::new(std::env::current_exe()?);
    let mut child = command.args(&words).arg("child").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let (Some(mut to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
        return Err("no pipes".into());
    };
    exchange(&mut end, &mut to, &mut BufReader::new(from))?;
    println!("{}, {}", library.describe(), if inline { "bytes in the notification" } else { "written" });
    for bytes in SIZES {
        if inline && bytes > 2 << 20 {
            break;
        }
        let mut message = vec![7_u8; if inline { bytes + 8 } else { 96 }];
        message[..8].copy_from_slice(&(bytes as u64).to_le_bytes());
        let mut times = Vec::new();
        let until = Instant::now() + Duration::from_secs(2);
        while Instant::now() < until {
            let begun = Instant::now();
            answer(&mut end, &message, inline)?;
            let mut arrived = false;
            while !arrived {
                end.poll(|_| {
                    arrived = true;
                    Ok(())
                })?;
            }
            times.push(begun.elapsed());
        }
        times.sort_unstable();
        let at = |part: usize| times[times.len() * part / 100].as_secs_f64() * 1e6;
        println!(
            "{bytes:>9} bytes: p50 {:8.1} us, p99 {:8.1} us, {} round trips",
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

fn exchange(
    end: &mut Endpoint,
    to: &mut impl std::io::Write,
    from: &mut impl std::io::BufRead,
) -> Result<(), Box<dyn Error>> {
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
