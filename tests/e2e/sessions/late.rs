//! Memory of a call that passed its deadline belongs to the client again when the completion comes.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytemuck::Zeroable as _;
use expertd_session::wire::{CompletionRecord, RegionLayout, RequestRecord};
use expertd_shm::ring::{RingConsumer, RingProducer};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::hostile::raw;
use super::{FAMILY, Host, LOST, runtime};
use crate::service::golden;
use crate::service::load::Rows;

/// Rows of a step, and of a call that takes two. The second one is not full, so that it waits for the end of the first one.
const STEP: u32 = 4096;
const TOKENS: u32 = STEP + STEP / 2;
/// Bytes of the row area.
const ROWS_BYTES: u64 = 8 << 20;
/// gRPC's code of a call whose deadline passed.
const DEADLINE_EXCEEDED: u32 = 4;
/// Written to the output after the completion.
const MARK: u32 = 0x4d41_524b;
/// Time within which a rank that still computes would write.
const LATE: Duration = Duration::from_millis(10);

/// Calls of two steps with deadlines that pass in either of them. After each completion the client writes to the output; no rank
/// writes there any more.
#[test]
fn nothing_is_written_after_the_completion() {
    let runtime = runtime();
    let step = STEP.to_string();
    let host = Host::start(FAMILY, 2, &["--max-tokens-per-step", &step, "--max-queued-tokens", "65536"]);
    let session = raw(&host, 4, ROWS_BYTES);
    host.in_place(&runtime);
    let hidden = session.opened.hidden as usize;
    let layout = RegionLayout::new(session.opened.calls, session.opened.rows_bytes as usize).unwrap();
    let mut requests =
        RingProducer::<RequestRecord>::new(layout.requests.memory(&session.region).unwrap()).unwrap();
    let mut completions =
        RingConsumer::<CompletionRecord>::new(layout.completions.memory(&session.region).unwrap()).unwrap();
    let bell = session.region.slice::<u32>(layout.service_bell, 1).unwrap();
    let output_at = ROWS_BYTES / 2;
    let words = TOKENS as usize * hidden;
    assert!(words as u64 * 4 <= output_at, "the rows fit into half of the area");
    let output =
        session.region.slice::<u32>((session.opened.rows_offset + output_at) as usize, words).unwrap();
    let layer = Rows::new(&golden(FAMILY), 1, 1).layers()[0];
    let mut rng = SmallRng::seed_from_u64(expertd_test_seed::seed());
    let (began, mut late, mut answered) = (Instant::now(), 0, 0);
    // Deadlines are drawn from the time that a whole call takes.
    let mut whole = Duration::from_millis(50);
    for call in 0.. {
        // On a busy machine fewer are enough.
        let enough = if began.elapsed() < LOST { 40 } else { 5 };
        if late >= enough && answered > 0 {
            break;
        }
        assert!(began.elapsed() < 5 * LOST, "{late} calls passed their deadlines, {answered} were answered");
        let timeout = if answered == 0 { LOST } else { whole.mul_f64(rng.random_range(0.1..1.0)) };
        let record = RequestRecord {
            call,
            rows: 0,
            output: output_at,
            layer,
            tokens: TOKENS,
            dtype: 3,
            timeout_us: timeout.as_micros() as u64,
            ..RequestRecord::zeroed()
        };
        let submitted = Instant::now();
        assert!(requests.try_push(&record).unwrap());
        bell.atomics()[0].fetch_add(2, Ordering::SeqCst);
        rustix::thread::futex::wake(&bell.atomics()[0], rustix::thread::futex::Flags::empty(), 1).unwrap();
        let completion = loop {
            if let Some(completion) = completions.try_pop().unwrap() {
                break completion;
            }
            assert!(submitted.elapsed() < LOST, "call {call} has no completion");
            std::hint::spin_loop();
        };
        assert_eq!(completion.call, call);
        match completion.code {
            0 => {
                answered += 1;
                whole = submitted.elapsed();
            }
            DEADLINE_EXCEEDED => {
                output.atomics().iter().for_each(|word| word.store(MARK, Ordering::Relaxed));
                std::thread::sleep(LATE.max(whole / 2));
                let written =
                    output.atomics().iter().filter(|word| word.load(Ordering::Relaxed) != MARK).count();
                assert_eq!(written, 0, "words written after call {call} had failed, the {late}th late one");
                late += 1;
            }
            code => panic!("call {call} ended with code {code}: {}", completion.text()),
        }
    }
}
