//! Closed loops of clients against a step loop whose steps take a given time: which requests share a step, and how long they are held
//! back.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use expertd_scheduler::{
    Action, ClientKey, Config, ConnectionKey, Inbox, OnFault, RecoveryPolicy, RequestKey, StepKind, StepLoop,
    Submission, Time,
};
use expertd_types::{Generation, LayerId, StepId, WeightVersion};

/// A client that sends its next request `think_us` after an answer.
#[derive(Clone, Copy)]
struct Client {
    connection: u64,
    starts_us: u64,
    think_us: u64,
    leaves_us: u64,
    /// Its requests go to these layers in turn.
    layers: (u32, u32),
    deadline_us: Option<u64>,
}

const fn client(connection: u64, starts_us: u64, think_us: u64) -> Client {
    Client { connection, starts_us, think_us, leaves_us: 1 << 40, layers: (0, 1), deadline_us: None }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Experts(StepId),
    Done(StepId),
    Send(usize),
}

/// A step: its clients, and how long it was held back although it could have been formed.
struct Formed {
    clients: Vec<usize>,
    held_us: u64,
}

/// The default, and steps that form as soon as they can.
const WAITS: [Option<Duration>; 2] = [None, Some(Duration::ZERO)];

fn at(us: u64) -> Time {
    Time(us * 1000)
}

/// Runs steps that take `step_us(requests)`, of which the last `tail_us` after the experts phase, for `end_us`.
fn run(clients: &[Client], step_us: impl Fn(u64) -> u64, tail_us: u64, end_us: u64) -> Vec<Formed> {
    run_layers(None, clients, |_, requests| step_us(requests), tail_us, end_us)
}

/// The same with steps that take `step_us(layer, requests)`.
fn run_layers(
    max_wait: Option<Duration>,
    clients: &[Client],
    step_us: impl Fn(u32, u64) -> u64,
    tail_us: u64,
    end_us: u64,
) -> Vec<Formed> {
    let mut steps = StepLoop::new(Config {
        ranks: 1,
        slots: 2,
        max_tokens_per_step: 1024,
        max_segments_per_rank: 1024,
        max_wait,
        on_fault: OnFault::Retry,
        recovery: RecoveryPolicy::default(),
        seed: 1,
    });
    let mut inbox: Inbox<usize> = Inbox::new(1 << 20, 1);
    let (first, never_left) = (Generation(1), |_: RequestKey| false);
    while steps.poll(at(0), &never_left).is_some() {}
    steps.group_ready(first, WeightVersion(1), at(0));
    drop(steps.exchange(&mut inbox, at(0)));
    let starts = clients.iter().enumerate().map(|(n, client)| (at(client.starts_us), Event::Send(n)));
    let mut events: BTreeSet<(Time, Event)> = starts.collect();
    let (mut senders, mut formed) = (HashMap::new(), Vec::new());
    let (mut now, mut could_form) = (at(0), at(0));
    let mut sent = vec![0; clients.len()];
    while now < at(end_us) {
        while events.first().is_some_and(|(due, _)| *due <= now) {
            let Some((_, event)) = events.pop_first() else { break };
            match event {
                Event::Experts(step) => {
                    could_form = now;
                    steps.experts_ended(first, step, now);
                }
                Event::Done(step) => steps.step_done(first, step, now),
                Event::Send(n) => {
                    let client = &clients[n];
                    let (first, count) = client.layers;
                    let layer = LayerId(first + sent[n] % count);
                    sent[n] += 1;
                    let submission = Submission {
                        client: ClientKey(1),
                        connection: ConnectionKey(client.connection),
                        kind: StepKind { layer, top_k: 8 },
                        tokens: 1,
                        deadline: client.deadline_us.map(|after| now + Duration::from_micros(after)),
                        expected_version: None,
                        in_place: false,
                    };
                    inbox.submit(now, submission, n).expect("the service is open");
                }
            }
        }
        let delivery = steps.exchange(&mut inbox, now);
        steps.receive(delivery, now, |key, n| {
            senders.insert(key, (n, now));
        });
        while let Some(action) = steps.poll(now, &never_left) {
            match action {
                Action::Launch { step } => {
                    let launched = steps.in_flight().back().expect("a launched step");
                    let takes: Vec<_> = launched.rows.iter().map(|range| senders[&range.key]).collect();
                    let took = step_us(launched.kind.layer.0, takes.len() as u64);
                    events.insert((now + Duration::from_micros(took - tail_us), Event::Experts(step)));
                    events.insert((now + Duration::from_micros(took), Event::Done(step)));
                    let from = takes.iter().map(|(_, sent)| *sent).min().expect("a request").max(could_form);
                    let mut clients: Vec<_> = takes.iter().map(|(n, _)| *n).collect();
                    clients.sort_unstable();
                    formed.push(Formed { clients, held_us: now.since(from).as_micros() as u64 });
                }
                Action::Answer { key, .. } => {
                    let n = senders[&key].0;
                    let next = now + Duration::from_micros(clients[n].think_us);
                    if next < at(clients[n].leaves_us) {
                        events.insert((next, Event::Send(n)));
                    }
                }
                Action::Fail { key, .. } => panic!("request {key} failed"),
                Action::FormGroup { .. } | Action::Show { .. } => {}
                other => panic!("unexpected {other:?}"),
            }
        }
        let next = events.first().map_or(Time(u64::MAX), |(due, _)| *due);
        now = next.min(steps.wake_at(now)).max(Time(now.0 + 1));
    }
    formed
}

fn longest_hold(formed: &[Formed]) -> u64 {
    formed.iter().map(|step| step.held_us).max().unwrap_or(0)
}

/// A step of `n` requests costs less than `n` steps.
const fn shared(n: u64) -> u64 {
    800 + 200 * n
}

#[test]
fn clients_that_come_back_soon_share_every_step() {
    for tail in [0, 20] {
        let clients = [client(1, 0, 60), client(2, 300, 90), client(3, 1100, 40), client(4, 1900, 30)];
        let formed = run(&clients, shared, tail, 100_000);
        assert!(formed.len() > 55, "{}", formed.len());
        assert!(formed[5..].iter().all(|step| step.clients == [0, 1, 2, 3]));
    }
}

#[test]
fn a_connection_does_not_wait_for_itself() {
    let one = run(&[client(1, 0, 60)], shared, 20, 100_000);
    assert!(one.len() > 90 && longest_hold(&one) == 0);
    // With two calls under way, as an engine with two batches has, steps are as early as they can be.
    let two = run(&[client(1, 0, 60), client(1, 500, 60)], shared, 20, 100_000);
    assert!(two.len() > 90 && longest_hold(&two) == 0);
}

#[test]
fn short_steps_are_never_held_back() {
    let formed = run(&[client(1, 0, 5), client(2, 20, 5), client(3, 40, 5)], |n| 100 + n, 10, 100_000);
    assert!(formed.len() > 500 && longest_hold(&formed) == 0);
}

#[test]
fn a_client_that_leaves_is_waited_for_once() {
    let mut clients = [client(1, 0, 60), client(2, 0, 60), client(3, 0, 60)];
    clients[2].leaves_us = 50_000;
    let formed = run(&clients, shared, 0, 100_000);
    let last = formed.iter().rposition(|step| step.clients.contains(&2)).unwrap();
    assert!(last > 20 && formed.len() > last + 20);
    // An eighth of a step of three.
    assert_eq!(formed[last + 1].held_us, 1400 / 8 - 60);
    assert!(formed[last + 2..].iter().all(|step| step.held_us == 0 && step.clients == [0, 1]));
}

#[test]
fn clients_that_need_longer_are_hardly_waited_for() {
    // Two clients whose own work takes longer than a step's eighth take turns.
    let formed = run(&[client(1, 0, 300), client(2, 600, 300)], |_| 1000, 20, 2_000_000);
    let held = formed.iter().filter(|step| step.held_us > 0);
    let all: u64 = held.clone().map(|step| step.held_us).sum();
    assert!(held.clone().count() > 6, "each is tried again now and then");
    assert!(longest_hold(&formed) <= 1000 / 8 && all < 2_000_000 / 400, "{all} us of waits");
}

#[test]
fn of_two_clients_the_quick_one_is_found_whichever_came_first() {
    for (first, second) in [(300, 20), (20, 300)] {
        let formed = run(&[client(1, 0, first), client(2, 600, second)], |_| 1000, 20, 2_000_000);
        let both = formed.iter().filter(|step| step.clients.len() == 2).count();
        assert!(both > 800, "{both} of {} steps are shared", formed.len());
    }
}

#[test]
fn engines_in_different_layers_do_not_hold_each_other_back() {
    for engines in [2, 4] {
        let clients: Vec<_> =
            (0..engines).map(|n| Client { layers: (0, 48), ..client(n, 1300 * n, 30) }).collect();
        let [waits, at_once] = WAITS.map(|wait| run_layers(wait, &clients, |_, _| 402, 0, 2_000_000).len());
        assert!(waits * 100 >= at_once * 99, "{engines} engines: {waits} steps, {at_once} without waits");
    }
}

#[test]
fn short_steps_hardly_wait_between_long_ones() {
    let step_us = |layer: u32, requests: u64| if layer == 0 { 40_000 } else { 200 + 20 * requests };
    let decode = |n, starts_us| Client { layers: (1, 1), ..client(n, starts_us, 5_000) };
    let clients = [client(1, 0, 20_000), decode(2, 900), decode(3, 950)];
    let formed = run_layers(None, &clients, step_us, 20, 4_000_000);
    let held: u64 = formed.iter().map(|step| step.held_us).sum();
    assert!(formed.len() > 100 && held < 4_000_000 / 1000, "{held} us in {} steps", formed.len());
}

#[test]
fn calls_that_were_queued_before_a_wait_do_not_count_as_joined() {
    // One connection has two calls under way; the others take longer than any wait.
    let mut clients = vec![client(1, 0, 300), client(1, 350, 300)];
    clients.extend([client(2, 700, 300), client(3, 900, 300)]);
    let [waits, at_once] =
        WAITS.map(|wait| run_layers(wait, &clients, |_, requests| 600 + 200 * requests, 20, 2_000_000).len());
    assert!(waits * 100 >= at_once * 99, "{waits} steps, {at_once} without waits");
}

#[test]
fn a_request_with_little_time_does_not_wait() {
    // Behind one that has time, in the same layer.
    let late = Client { layers: (1, 1), deadline_us: Some(3_000), ..client(3, 80_950, 1 << 40) };
    let clients = [
        client(1, 0, 60_000),
        client(2, 10, 70_000),
        late,
        Client { deadline_us: None, starts_us: 80_900, ..late },
    ];
    // Two long steps, of the first two clients, come before the short one.
    let step_us = |layer: u32, _| if layer == 0 { 40_000 } else { 220 };
    let formed = run_layers(None, &clients, step_us, 0, 100_000);
    let last = formed.iter().find(|step| step.clients.contains(&2)).expect("it is answered");
    assert_eq!((&last.clients[..], last.held_us), (&[2, 3][..], 50));
}
