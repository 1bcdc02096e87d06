//! Which requests wait for the next generation, by the time after which it is expected.

use std::time::Duration;

use expertd_scheduler::{
    ClientKey, Config, ConnectionKey, Fault, FaultKind, Inbox, OnFault, RecoveryPolicy, RequestKey, StepKind,
    StepLoop, Submission, Time,
};
use expertd_types::{Generation, LayerId, WeightVersion};

fn at(seconds: u64) -> Time {
    Time(seconds * 1_000_000_000)
}

fn poll(steps: &mut StepLoop, now: Time) {
    while steps.poll(now, &|_: RequestKey| false).is_some() {}
}

/// Whether a request with this deadline is admitted.
fn admits(inbox: &mut Inbox<()>, now: Time, within: Duration) -> bool {
    let submission = Submission {
        client: ClientKey(1),
        connection: ConnectionKey(1),
        kind: StepKind { layer: LayerId(0), top_k: 8 },
        tokens: 1,
        deadline: Some(now + within),
        expected_version: None,
        in_place: false,
    };
    inbox.submit(now, submission, ()).is_ok()
}

#[test]
fn the_time_of_loading_weights_is_no_time_of_recovery() {
    let mut steps = StepLoop::new(Config {
        ranks: 1,
        slots: 2,
        max_tokens_per_step: 1024,
        max_segments_per_rank: 1024,
        max_wait: None,
        on_fault: OnFault::Retry,
        recovery: RecoveryPolicy::default(),
        seed: 1,
    });
    let mut inbox: Inbox<()> = Inbox::new(1 << 20, 1);
    poll(&mut steps, at(0));
    // Two minutes of loading, then ranks that are ready after four seconds.
    steps.ranks_start(at(120));
    steps.group_ready(Generation(1), WeightVersion(1), at(124));
    poll(&mut steps, at(124));
    // The weights outlive the ranks.
    let fault = Fault { kind: FaultKind::Exit, message: "killed".to_owned() };
    steps.group_ended(Generation(1), &fault);
    steps.group_gone(at(200));
    poll(&mut steps, at(200));
    steps.ranks_start(at(200));
    drop(steps.exchange(&mut inbox, at(200)));
    assert!(admits(&mut inbox, at(200), Duration::from_secs(10)), "it is expected after four seconds");
    assert!(!admits(&mut inbox, at(200), Duration::from_secs(3)), "a deadline before that cannot be kept");
}
