//! Charges: what comes back, and who gets how much.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use tokio_util::sync::CancellationToken;

use super::super::connection::{ConnectionTimeouts, Verdict};
use super::*;
use crate::backend::ClientKey;

fn connection(number: u64) -> Arc<Connection> {
    let connection = Connection::new(ClientKey(number), Arc::default(), CancellationToken::new());
    connection.note_read(100);
    connection
}

/// Charges a whole message.
fn charge(budget: &Arc<Budget>, connection: &Arc<Connection>, length: usize) -> Result<Ticket, Lack> {
    let ticket = budget.try_message(connection, &connection.peer, length)?;
    ticket.try_grow(length)?;
    Ok(ticket)
}

#[test]
fn charges_come_back_when_the_last_clone_goes() {
    let budget = Budget::new(1 << 20, 1 << 10);
    let one = connection(1);
    let ticket = charge(&budget, &one, 1000).unwrap();
    assert_eq!(budget.held(), 1000 + MESSAGE_BYTES);
    let clone = ticket.clone();
    drop(ticket);
    assert_eq!(budget.held(), 1000 + MESSAGE_BYTES);
    drop(clone);
    assert_eq!(budget.held(), 0);
    assert_eq!(one.held.load(Ordering::Relaxed), 0);
    assert_eq!(one.peer.held.load(Ordering::Relaxed), 0);
}

#[test]
fn an_announced_length_costs_nothing() {
    let budget = Budget::new(1 << 30, 256 << 20);
    let (one, two) = (connection(1), connection(2));
    let prefixes: Vec<_> = (0..32)
        .filter_map(|at| {
            let connection = if at % 2 == 0 { &one } else { &two };
            budget.try_message(connection, &connection.peer, 64 << 20).ok()
        })
        .collect();
    // A connection announces no more than its share.
    assert_eq!(prefixes.len(), 14);
    assert_eq!(budget.held(), 14 * MESSAGE_BYTES);
    assert!(charge(&budget, &connection(3), 256 << 20).is_ok());
    drop(prefixes);
}

#[test]
fn one_connection_gets_half_and_one_owner_three_quarters() {
    let budget = Budget::new(8 << 20, 1 << 10);
    let fill = |connection: &Arc<Connection>| {
        let mut tickets = Vec::new();
        while let Ok(ticket) = charge(&budget, connection, 100_000) {
            tickets.push(ticket);
        }
        tickets
    };
    let greedy = connection(1);
    let first = fill(&greedy);
    assert!((4 << 20) - 200_000 < budget.held() && budget.held() <= 4 << 20);
    let again = Connection::new(ClientKey(2), Arc::clone(&greedy.peer), CancellationToken::new());
    let second = fill(&again);
    assert!((6 << 20) - 200_000 < budget.held() && budget.held() <= 6 << 20);
    assert!(charge(&budget, &connection(3), 100_000).is_ok(), "others still have room");
    drop((first, second));
    assert_eq!(budget.held(), 0);
}

#[test]
fn small_messages_of_others_always_have_room() {
    let budget = Budget::new(8 << 20, 1 << 10);
    let mut tickets = Vec::new();
    for number in 0..4 {
        let large = connection(number);
        while let Ok(ticket) = charge(&budget, &large, 100_000) {
            tickets.push(ticket);
        }
    }
    assert_eq!(charge(&budget, &connection(9), 100_000).err(), Some(Lack::Service));
    assert!(charge(&budget, &connection(9), 60_000).is_ok());
    // One owner takes half of that part at most.
    let small = connection(10);
    while let Ok(ticket) = charge(&budget, &small, 1000) {
        tickets.push(ticket);
    }
    assert!(charge(&budget, &connection(11), 60_000).is_ok());
}

#[test]
fn the_largest_message_always_fits_an_idle_service() {
    let budget = Budget::new(10, 1 << 20);
    assert!(charge(&budget, &connection(1), 1 << 20).is_ok());
}

#[test]
fn a_charge_above_4_gib_is_refused_and_leaves_nothing_behind() {
    let budget = Budget::new(64 << 30, 16 << 30);
    let one = connection(1);
    let ticket = budget.try_message(&one, &one.peer, 5 << 30).unwrap();
    assert_eq!(ticket.try_grow(5 << 30), Err(Lack::Service));
    assert_eq!(one.peer.held.load(Ordering::Relaxed), MESSAGE_BYTES);
    // Bytes arrive in frames, so that such a message is charged in parts.
    for _ in 0..5 {
        ticket.try_grow(1 << 30).unwrap();
    }
    drop(ticket);
    assert_eq!(budget.held(), 0);
}

#[tokio::test]
async fn waiting_for_room_ends_and_leaves_nothing_behind() {
    let budget = Budget::new(200_000, 180_000);
    let (one, two) = (connection(1), connection(2));
    let held = charge(&budget, &one, 170_000).unwrap();
    assert!(!budget.is_short());
    let waiting = budget.try_message(&two, &two.peer, 100_000).unwrap();
    assert!(!waiting.clone().grow(100_000).await);
    assert!(budget.is_short());
    assert_eq!(two.peer.held.load(Ordering::Relaxed), MESSAGE_BYTES);

    let growing = tokio::spawn(waiting.grow(100_000));
    tokio::task::yield_now().await;
    drop(held);
    assert!(growing.await.unwrap(), "room that comes back in time is used");
    assert_eq!(budget.held(), 0);
    assert_eq!(two.waiting.load(Ordering::Relaxed), 0);
}

#[test]
fn stalled_transfers_are_ended_and_work_is_not() {
    let timeouts = ConnectionTimeouts {
        stalled: Duration::from_secs(100),
        stalled_when_short: Duration::ZERO,
        min_bytes_per_second: 1 << 20,
        ..ConnectionTimeouts::default()
    };
    let budget = Budget::new(1 << 20, 1 << 10);
    let one = connection(1);
    let ticket = budget.try_message(&one, &one.peer, 10).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(one.verdict(&timeouts, true, false), Verdict::End("stalled_request"));
    assert_eq!(one.verdict(&timeouts, false, false), Verdict::Keep);
    // Bytes that arrive are time.
    ticket.try_grow(1 << 19).unwrap();
    assert_eq!(one.verdict(&timeouts, true, false), Verdict::Keep);
    ticket.enter(Stage::Working);
    assert_eq!(one.verdict(&timeouts, true, false), Verdict::Keep);
    drop(ticket);
    let ticket = budget.try_message(&one, &one.peer, 10).unwrap();
    ticket.enter(Stage::Leaving);
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(one.verdict(&timeouts, true, false), Verdict::End("stalled_answer"));
}

proptest! {
    /// Whatever connections do, no bound is exceeded and everything comes back.
    #[test]
    fn bounds_hold_for_any_order_of_charges(
        total in 10_000usize..1 << 22,
        steps in prop::collection::vec((0usize..6, 0usize..3, 0usize..200_000, any::<bool>()), 1..200),
    ) {
        let budget = Budget::new(total, 5000);
        let owners: Vec<Arc<Owner>> = (0..3).map(|_| Arc::default()).collect();
        let connections: Vec<_> = (0..6)
            .map(|at| Connection::new(ClientKey(at), Arc::clone(&owners[at as usize % 3]), CancellationToken::new()))
            .collect();
        let mut tickets: Vec<Ticket> = Vec::new();
        for (connection, owner, bytes, grow) in steps {
            if grow && !tickets.is_empty() {
                let at = bytes % tickets.len();
                let _ = tickets[at].try_grow(bytes);
            } else if bytes % 5 == 0 && !tickets.is_empty() {
                tickets.swap_remove(bytes % tickets.len());
            } else if let Ok(ticket) = budget.try_message(&connections[connection], &owners[owner], bytes) {
                tickets.push(ticket);
            }
            prop_assert!(budget.held() <= budget.total());
            for connection in &connections {
                prop_assert!(connection.held.load(Ordering::Relaxed) <= budget.per_connection);
            }
            for owner in &owners {
                prop_assert!(owner.held.load(Ordering::Relaxed) <= budget.per_owner);
                prop_assert!(owner.small.load(Ordering::Relaxed) <= budget.small_per_owner);
            }
        }
        tickets.clear();
        prop_assert_eq!(budget.held(), 0);
        for owner in &owners {
            prop_assert_eq!((owner.held.load(Ordering::Relaxed), owner.small.load(Ordering::Relaxed)), (0, 0));
        }
    }
}
