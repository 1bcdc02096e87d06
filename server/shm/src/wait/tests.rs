//! Tests of `wait`.

use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::thread;

use super::super::region::SharedRegion;
use super::*;

fn doorbell() -> Doorbell {
    let region = SharedRegion::create("doorbell", 4096).expect("memfd");
    Doorbell::new(region.slice(0, 1).expect("in bounds"))
}

#[test]
fn a_timeout_clears_the_sleeping_bit() {
    let bell = doorbell();
    let start = Instant::now();
    let limit = Duration::from_millis(30);
    assert_eq!(bell.wait_until(WaitPolicy::within(Duration::ZERO, limit), || false), Err(TimedOut));
    assert!(start.elapsed() >= limit);
    assert_eq!(bell.0.load(Ordering::Relaxed) & SLEEPING, 0);
    // In pieces of the longest sleep, as in one.
    let (start, limit) = (Instant::now(), MAX_SLEEP + limit);
    assert_eq!(bell.wait_running(Duration::ZERO, limit, || None::<()>), Err(TimedOut));
    assert!(start.elapsed() >= limit);
    let is_late = || (start.elapsed() > limit + MAX_SLEEP).then_some(4);
    assert_eq!(bell.wait_running(Duration::ZERO, Duration::from_secs(60), is_late), Ok(4));
    // A value that is available is returned even if the deadline has passed.
    assert_eq!(bell.wait_for(WaitPolicy::within(SPIN_TIME, Duration::ZERO), || Some(3)), Ok(3));
}

/// Waits in vain. Returns the number of polls while the waiter spun and of those between its sleeps, and when it slept first.
fn wait_in_vain(spin: Duration, limit: Duration) -> (u64, u64, Option<Duration>) {
    let bell = doorbell();
    let (mut awake, mut asleep, mut slept) = (0, 0, None);
    let start = Instant::now();
    let timed_out = bell.wait_until(WaitPolicy::within(spin, limit), || {
        let sleeps = bell.0.load(Ordering::Relaxed) & SLEEPING != 0;
        slept = slept.or_else(|| sleeps.then(|| start.elapsed()));
        *(if sleeps { &mut asleep } else { &mut awake }) += 1;
        false
    });
    assert_eq!(timed_out, Err(TimedOut));
    assert!(start.elapsed() >= limit);
    (awake, asleep, slept)
}

#[test]
fn the_waiter_spins_for_its_time_and_then_sleeps() {
    let (spin, limit) = (Duration::from_millis(20), Duration::from_millis(200));
    // A machine without processor time for this thread leaves few polls.
    let spun = (0..10).any(|_| {
        let (awake, asleep, slept) = wait_in_vain(spin, limit);
        assert!(slept.is_some_and(|after| after >= spin), "slept after {slept:?}");
        assert!(asleep < 10, "{asleep} polls between sleeps");
        awake > 100
    });
    assert!(spun, "few polls in each of ten waits");
    // A deadline within the spin time ends the wait.
    let start = Instant::now();
    let policy = WaitPolicy::within(Duration::from_secs(60), Duration::from_millis(10));
    assert_eq!(doorbell().wait_until(policy, || false), Err(TimedOut));
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[test]
fn ping_pong_loses_no_wake_up() {
    // Each lost wake-up would cost a sleep of 250 ms, and the deadline, which covers all rounds together, would pass.
    for spin in [Duration::ZERO, Duration::from_micros(20)] {
        let (a, b) = (doorbell(), doorbell());
        let turn = AtomicU64::new(0);
        let rounds = 5_000;
        let policy = WaitPolicy::within(spin, Duration::from_secs(60));
        thread::scope(|s| {
            s.spawn(|| {
                for i in 0..rounds {
                    a.wait_until(policy, || turn.load(Ordering::Acquire) > 2 * i).expect("rung");
                    turn.store(2 * i + 2, Ordering::Release);
                    b.ring();
                }
            });
            for i in 0..rounds {
                turn.store(2 * i + 1, Ordering::Release);
                a.ring();
                b.wait_until(policy, || turn.load(Ordering::Acquire) == 2 * i + 2).expect("rung");
            }
        });
    }
}

/// Whether a thread of this process sleeps.
fn sleeps(thread: &rustix::process::Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).expect("a thread's state");
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
}

#[test]
fn a_ring_wakes_one_sleeper() {
    let bell = doorbell();
    bell.0.fetch_or(SLEEPING, Ordering::Relaxed);
    let (threads, woken) = (Mutex::new(Vec::new()), AtomicU64::new(0));
    let begun = Instant::now();
    let wait_for = |what: &str, is_so: &dyn Fn() -> bool| {
        while !is_so() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
            thread::sleep(Duration::from_millis(1));
        }
    };
    thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                threads.lock().expect("no panic").push(rustix::thread::gettid());
                bell.0.sleep(SLEEPING, Duration::from_secs(60));
                woken.fetch_add(1, Ordering::Release);
            });
        }
        let all_sleep = || {
            let threads = threads.lock().expect("no panic");
            threads.len() == 4 && threads.iter().all(sleeps)
        };
        wait_for("all sleep", &all_sleep);
        bell.ring();
        wait_for("one is woken", &|| woken.load(Ordering::Acquire) > 0);
        thread::sleep(Duration::from_millis(100));
        assert_eq!(woken.load(Ordering::Acquire), 1);
        (0..3).for_each(|_| bell.0.wake());
    });
}

#[test]
fn many_ringers_one_waiter() {
    let bell = doorbell();
    let sum = AtomicU64::new(0);
    let (ringers, each) = (4, 2_000);
    thread::scope(|s| {
        for _ in 0..ringers {
            s.spawn(|| {
                for _ in 0..each {
                    sum.fetch_add(1, Ordering::Release);
                    bell.ring();
                }
            });
        }
        let mut target = 0;
        while target < ringers * each {
            let reached = || Some(sum.load(Ordering::Acquire)).filter(|&s| s > target);
            target = bell
                .wait_for(WaitPolicy::within(Duration::ZERO, Duration::from_secs(60)), reached)
                .expect("rung");
        }
    });
}
