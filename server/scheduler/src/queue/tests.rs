#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use expertd_types::LayerId;

use super::*;

const L0: StepKind = StepKind { layer: LayerId(0), top_k: 2 };
const L7: StepKind = StepKind { layer: LayerId(7), top_k: 2 };

fn push(queue: &mut FairQueue, kind: StepKind, client: u64, key: u64, tokens: usize) {
    queue.push(kind, ClientKey(client), RequestKey(key), tokens);
}

/// Takes rows for a step that is complete at once.
fn take(queue: &mut FairQueue, kind: StepKind, limit: usize) -> Vec<(u64, usize)> {
    let taken = queue.take(kind, limit, usize::MAX, None, |_| false);
    let clients: Vec<ClientKey> =
        queue.clients.iter().flat_map(|(client, state)| vec![*client; state.in_steps]).collect();
    for client in clients {
        queue.release(client);
    }
    taken.takes.iter().map(|take| (take.key.0, take.tokens)).collect()
}

#[test]
fn virtual_time_does_not_pass_a_client_in_a_step() {
    let mut queue = FairQueue::default();
    push(&mut queue, L0, 1, 1, 8);
    queue.take(L0, 8, usize::MAX, None, |_| false);
    for key in 2..10 {
        push(&mut queue, L0, 2, key, 8);
        take_only(&mut queue, ClientKey(2));
    }
    assert_eq!(queue.virtual_now, 8, "client 1 has used 8 rows and comes back");
    queue.release(ClientKey(1));
    push(&mut queue, L0, 1, 20, 8);
    push(&mut queue, L0, 2, 21, 8);
    assert_eq!(take(&mut queue, L0, 8), [(20, 8)]);
}

fn take_only(queue: &mut FairQueue, client: ClientKey) {
    queue.take(L0, 8, usize::MAX, None, |_| false);
    queue.release(client);
}

#[test]
fn small_requests_are_never_split_and_large_ones_fill_steps() {
    let mut queue = FairQueue::default();
    push(&mut queue, L0, 1, 1, 6);
    push(&mut queue, L0, 2, 2, 6);
    push(&mut queue, L0, 3, 3, 25);
    assert_eq!(take(&mut queue, L0, 10), [(1, 6), (3, 4)]);
    assert_eq!(take(&mut queue, L0, 10), [(2, 6), (3, 4)]);
    assert_eq!(take(&mut queue, L0, 10), [(3, 10)]);
    assert_eq!(take(&mut queue, L0, 10), [(3, 7)]);
    assert!(queue.is_empty());
    assert_eq!(queue.tokens(), 0);
}

#[test]
fn the_kind_of_the_smallest_start_tag_comes_first() {
    let mut queue = FairQueue::default();
    for key in 0..10 {
        push(&mut queue, L0, 1, key, 4);
    }
    assert_eq!(take(&mut queue, L0, 8).len(), 2);
    push(&mut queue, L7, 2, 20, 4);
    assert_eq!(queue.kinds().collect::<Vec<_>>(), [L7, L0], "client 2 has used nothing");
    push(&mut queue, L0, 3, 21, 4);
    assert_eq!(take(&mut queue, L0, 4), [(21, 4)]);
}

#[test]
fn clients_share_by_rows_though_their_queues_run_empty() {
    // Each client has one request waiting at a time: 32 rows against 8.
    let mut queue = FairQueue::default();
    let mut rows = BTreeMap::<u64, usize>::new();
    let mut last = 2;
    push(&mut queue, L0, 32, 1, 32);
    push(&mut queue, L0, 8, 2, 8);
    let mut owners = BTreeMap::from([(1, 32), (2, 8)]);
    for _ in 0..100 {
        for (key, tokens) in take(&mut queue, L0, 32) {
            let client = owners.remove(&key).unwrap();
            *rows.entry(client).or_default() += tokens;
            last += 1;
            push(&mut queue, L0, client, last, client as usize);
            owners.insert(last, client);
        }
    }
    assert!(rows[&32].abs_diff(rows[&8]) <= 64, "{rows:?}");
}

#[test]
fn an_idle_client_saves_up_no_credit_and_is_forgotten() {
    let mut queue = FairQueue::default();
    for key in 0..100 {
        push(&mut queue, L0, 1, key, 10);
    }
    push(&mut queue, L0, 9, 100, 3);
    for _ in 0..50 {
        take(&mut queue, L0, 10);
    }
    assert_eq!(queue.idle_clients(), 0, "virtual time has passed client 9's tag");
    for key in 101..150 {
        push(&mut queue, L0, 2, key, 10);
    }
    let mut of_2 = 0;
    for _ in 0..20 {
        of_2 += take(&mut queue, L0, 10).iter().filter(|(key, _)| *key > 100).count();
    }
    assert!((9..=11).contains(&of_2), "client 2 got {of_2} of 20 steps");
}

#[test]
fn clients_that_come_once_do_not_fill_memory() {
    let mut queue = FairQueue::default();
    for client in 0..3 * MAX_IDLE_CLIENTS as u64 {
        push(&mut queue, L0, client, client, 1);
        take(&mut queue, L0, 10);
        assert!(queue.idle_clients() <= MAX_IDLE_CLIENTS);
    }
    queue.end_busy_period();
    assert_eq!((queue.idle_clients(), queue.clients.len()), (0, 0));
}

#[test]
fn rows_that_were_lost_come_first_again() {
    let mut queue = FairQueue::default();
    push(&mut queue, L0, 1, 1, 4);
    push(&mut queue, L0, 1, 2, 30);
    push(&mut queue, L0, 2, 3, 4);
    assert_eq!(take(&mut queue, L0, 10), [(1, 4), (3, 4), (2, 2)]);
    queue.put_back(L0, ClientKey(2), RequestKey(3), 4);
    queue.put_back(L0, ClientKey(1), RequestKey(2), 2);
    queue.put_back(L0, ClientKey(1), RequestKey(1), 4);
    assert_eq!(queue.tokens(), 38);
    assert_eq!(take(&mut queue, L0, 10), [(1, 4), (3, 4), (2, 2)]);
    assert_eq!(queue.remove(L0, ClientKey(1), RequestKey(2)), Some(28));
    assert_eq!(queue.remove(L0, ClientKey(1), RequestKey(2)), None);
    assert!(queue.is_empty() && queue.kinds().next().is_none());
}

#[test]
fn unwanted_requests_leave_the_queue_uncharged() {
    let mut queue = FairQueue::default();
    push(&mut queue, L0, 1, 1, 5);
    push(&mut queue, L7, 1, 2, 6);
    push(&mut queue, L0, 2, 3, 5);
    let taken = queue.take(L0, 10, usize::MAX, None, |key| key.0 == 1);
    assert_eq!(taken.dropped, [RequestKey(1)]);
    assert_eq!(taken.takes, [Take { key: RequestKey(3), tokens: 5 }]);
    assert_eq!((queue.tokens(), queue.tokens_of(L7)), (6, 6));
    assert_eq!(queue.clients[&ClientKey(1)].start_tag, 0);
}

#[test]
fn thousands_of_clients_cost_one_entry_each() {
    let mut queue = FairQueue::default();
    for client in 0..4096 {
        push(&mut queue, L0, client, client, 1);
    }
    let taken = queue.take(L0, 1000, usize::MAX, None, |_| false);
    assert_eq!((taken.takes.len(), taken.examined), (1000, 1000));
    let mut queue = FairQueue::default();
    push(&mut queue, L0, 0, 0, 1);
    for client in 1..4096 {
        push(&mut queue, L0, client, client, 1000);
    }
    let taken = queue.take(L0, 1000, usize::MAX, None, |_| false);
    assert_eq!((taken.takes.len(), taken.examined), (1, 1 + MAX_SKIPPED));
}
