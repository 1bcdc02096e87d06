use std::thread;

use super::*;

const DEADLINE: Duration = Duration::from_millis(40);

fn layout() -> WindowLayout {
    let shape = WindowShape { ranks: 2, slots: 2, hidden: 3, max_top_k: 2, max_tokens_per_rank: 4 };
    WindowLayout::new(shape).expect("small")
}

fn options(rank: u32, generation: u64) -> ExchangeOptions {
    ExchangeOptions {
        rank: Rank(rank),
        generation: Generation(generation),
        deadline: DEADLINE,
        spin: Duration::from_nanos(100),
        poison: false,
    }
}

/// Rank 0 of two after it has sent its dispatch of exchange 1 in slot 0.
fn waiting(generation: u64) -> Exchange {
    let region = layout().create(Generation(generation)).expect("memory");
    let mut exchange = Exchange::attach(&layout(), &region, options(0, generation)).expect("fresh");
    exchange.begin(Slot(0), 1).expect("idle");
    let head = exchange.outgoing(Slot(0), 0).expect("open").head;
    *head = AreaHeader { rows: 0, k: 1 };
    exchange.send_dispatch(Slot(0)).expect("open");
    exchange
}

fn set_flag(exchange: &Exchange, generation: u64, sequence: u64) {
    let value = flag_value(Generation(generation), Sequence(sequence));
    exchange.windows.flag(0, Slot(0), FlagKind::Dispatch, 1).store(value, Ordering::Release);
}

#[test]
fn flags_of_other_generations_and_earlier_exchanges_are_ignored() {
    for (generation, sequence) in [(4, 1), (4, 2), (4, (1 << 40) - 1), (6, 1), (0, 1), (5, 0)] {
        let mut exchange = waiting(5);
        set_flag(&exchange, generation, sequence);
        let error = exchange.wait_dispatch(Slot(0)).expect_err("rank 1 has not arrived");
        let expected = ExchangeError::Missing {
            phase: "dispatch",
            sequence: Sequence(1),
            peers: vec![Rank(1)],
            waited: DEADLINE,
        };
        assert_eq!(error, expected, "generation {generation}, sequence {sequence}");
    }
    let mut exchange = waiting(5);
    set_flag(&exchange, 5, 2);
    assert!(matches!(exchange.wait_dispatch(Slot(0)), Err(ExchangeError::Ahead { found: Sequence(2), .. })));
}

#[test]
fn error_words_of_other_generations_are_ignored() {
    let exchange = waiting(5);
    let stale = encode_fault(Generation(4), Rank(1), FaultCause::Failed);
    exchange.windows.error(0).store(stale, Ordering::Release);
    assert_eq!(exchange.reported(), None);
    for cause in [FaultCause::Failed, FaultCause::Missed(Rank(0)), FaultCause::Missed(Rank(63))] {
        for rank in [0, 63] {
            let word = encode_fault(Generation((1 << 24) - 1), Rank(rank), cause);
            assert_eq!(decode_fault(Generation((1 << 24) - 1), word), Some((Rank(rank), cause)));
        }
    }
    assert_eq!(decode_fault(Generation(0), 0), None);
}

#[test]
fn announced_counts_are_checked_before_they_are_used() {
    for head in
        [AreaHeader { rows: 5, k: 1 }, AreaHeader { rows: u32::MAX, k: 1 }, AreaHeader { rows: 1, k: 2 }]
    {
        let mut exchange = waiting(0);
        let area = &exchange.windows.incoming[exchange.windows.area(Slot(0), 1)];
        // SAFETY: this test has no rank 1, so nothing else accesses its memory.
        unsafe { area.head.as_mut_slice()[0] = head };
        set_flag(&exchange, 0, 1);
        let error = exchange.wait_dispatch(Slot(0)).expect_err("nonsense");
        assert!(matches!(error, ExchangeError::Head { peer: Rank(1), max_rows: 4, .. }), "{error}");
        assert!(matches!(exchange.received(Slot(0)).err(), Some(ExchangeError::Ended)));
    }
}

#[test]
fn sequences_end_before_they_overflow_into_the_generation() {
    let region = layout().create(Generation(1)).expect("memory");
    let mut exchange = Exchange::attach(&layout(), &region, options(0, 1)).expect("fresh");
    exchange.last = Sequence((1 << 40) - 2);
    assert_eq!(exchange.begin(Slot(0), 1), Ok(Sequence((1 << 40) - 1)));
    assert_eq!(exchange.begin(Slot(1), 1), Err(ExchangeError::Exhausted));
}

#[test]
fn the_first_fault_is_the_one_that_ranks_report() {
    let region = layout().create(Generation(1)).expect("memory");
    let attach = |rank| Exchange::attach(&layout(), &region, options(rank, 1)).expect("fresh");
    let (mut a, mut b) = (attach(0), attach(1));
    thread::scope(|s| {
        s.spawn(|| a.abort());
    });
    b.abort();
    let fault = Some(ExchangeError::Fault { rank: Rank(0), cause: FaultCause::Failed });
    assert_eq!((a.reported(), b.reported()), (fault.clone(), fault));
}
