//! What the stream of a replayed graph finds when its service ends, in every order. Words are memory of this process; no GPU takes part.

use std::net::Shutdown;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Instant;

use bytemuck::Zeroable as _;

use super::*;
use crate::cuda::wire::{DONE, FAILED, RELEASED, Ring, StatusRecord};
use crate::wire::CompletionRecord;

const RING: Ring = Ring { prepared: 3, rows: 7 };
const DOORBELLS: u32 = 3;

/// A service's end of a session, and the client's.
struct Pair {
    service: ControlMemory,
    socket: UnixStream,
    client: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
    statuses: Vec<StatusRecord>,
}

impl Pair {
    fn new() -> Pair {
        let service = ControlMemory::create(DOORBELLS, 64).unwrap();
        let fd = service.region().try_clone_fd().unwrap();
        let control = ControlMemory::join(fd, &service.opened(1, 64)).unwrap();
        control.raise_idle();
        let client = Arc::new(Shared::new(control));
        let (socket, reading) = UnixStream::pair().unwrap();
        let watching = Arc::clone(&client);
        let watcher = std::thread::spawn(move || watching.watch(&reading, &mpsc::channel().0));
        let statuses = vec![StatusRecord::zeroed(); DOORBELLS as usize];
        Pair { service, socket, client, watcher: Some(watcher), statuses }
    }

    /// Ends the service as a kill does.
    fn kill(&self) {
        self.socket.shutdown(Shutdown::Both).unwrap();
    }

    /// Takes a ring and ends its call with a code of gRPC.
    fn answer(&mut self, doorbell: u32, code: u32) {
        let record = CompletionRecord { code, ..CompletionRecord::zeroed() };
        assert_eq!(self.service.take(doorbell, 0), Some(RING));
        self.service.complete(doorbell, &record, &mut self.statuses[doorbell as usize]);
    }

    /// A call of a stream: rings, and waits for the completion word.
    fn call(&self, doorbell: u32) -> u32 {
        self.client.control.ring(doorbell, RING);
        self.wait(doorbell)
    }

    fn wait(&self, doorbell: u32) -> u32 {
        until("the word is raised", || self.client.control.completion(doorbell) != PENDING);
        self.client.control.completion(doorbell)
    }

    fn released(&self) -> Vec<u64> {
        (0..DOORBELLS).map(|doorbell| self.client.released(doorbell)).collect()
    }

    fn has_ended(&self) -> bool {
        matches!(self.client.check(), Err(SessionError::Ended { .. }))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.client.stop();
        self.kill();
        if let Some(watcher) = self.watcher.take() {
            watcher.join().unwrap();
        }
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        std::hint::spin_loop();
    }
}

#[test]
fn a_service_that_dies_between_replays_fails_the_next_ones() {
    let mut pair = Pair::new();
    pair.client.control.ring(0, RING);
    pair.answer(0, 0);
    assert_eq!((pair.wait(0), pair.released(), pair.has_ended()), (DONE, vec![0; 3], false));
    pair.kill();
    until("the end", || pair.has_ended());
    assert_eq!(pair.released(), [0; 3], "no call was in flight");
    for replay in 1..4 {
        assert_eq!(pair.call(0), RELEASED);
        assert_eq!(pair.released(), [replay, 0, 0]);
    }
}

#[test]
fn a_service_that_dies_during_a_replay_of_several_layers_and_doorbells_fails_what_is_left_of_it() {
    let mut pair = Pair::new();
    pair.client.control.ring(0, RING);
    pair.answer(0, 0);
    assert_eq!(pair.wait(0), DONE);
    // The second layer's calls, one of which the service has taken.
    pair.client.control.ring(0, RING);
    pair.client.control.ring(2, RING);
    assert_eq!(pair.service.take(0, 0), Some(RING));
    pair.kill();
    assert_eq!((pair.wait(0), pair.wait(2)), (RELEASED, RELEASED));
    // The stream has gone on: the failure is seen by now.
    assert!(pair.has_ended());
    assert_eq!(pair.released(), [1, 0, 1]);
    // The third layer's.
    assert_eq!(pair.call(0), RELEASED);
    assert_eq!(pair.released(), [2, 0, 1]);
}

#[test]
fn a_released_stream_always_finds_the_session_ended() {
    for _ in 0..50 {
        let pair = Pair::new();
        pair.client.control.ring(1, RING);
        std::thread::scope(|scope| {
            scope.spawn(|| pair.kill());
            assert_eq!(pair.wait(1), RELEASED);
            assert!(pair.has_ended());
            assert_eq!(pair.client.released(1), 1);
        });
    }
}

#[test]
fn a_call_that_the_service_fails_is_counted_when_its_stream_goes_on() {
    let mut pair = Pair::new();
    for (code, failures) in [(0, 0), (14, 1), (0, 1), (3, 2)] {
        pair.client.control.ring(1, RING);
        pair.answer(1, code);
        assert_eq!(pair.wait(1), if code == 0 { DONE } else { FAILED });
        assert_eq!(pair.client.failures(1).unwrap(), failures);
        assert_eq!(pair.client.failures(0).unwrap(), 0);
    }
    assert!(pair.client.failures(DOORBELLS).is_err());
}

/// A handler that a test of its own uses, with what it was called with and the word at that time.
macro_rules! handler {
    ($handler:ident, $calls:ident) => {
        static $calls: Mutex<Vec<String>> = Mutex::new(Vec::new());
        fn $handler(reason: &str) {
            $calls.lock().unwrap().push(reason.to_owned());
        }
    };
}

#[test]
fn a_handler_is_called_before_the_stream_of_its_doorbell_goes_on() {
    handler!(handler, CALLS);
    let pair = Pair::new();
    Shared::on_failure(&pair.client, 1, handler).unwrap();
    pair.client.control.ring(0, RING);
    socket::send(&pair.socket, frame::ENDED, b"the service drains").unwrap();
    assert_eq!(pair.wait(0), RELEASED);
    std::thread::sleep(10 * INTERVAL);
    assert!(CALLS.lock().unwrap().is_empty(), "its doorbell has no call in flight");
    assert_eq!(pair.call(1), RELEASED);
    assert_eq!(*CALLS.lock().unwrap(), ["the service drains"]);
}

#[test]
fn a_handler_is_called_once_the_service_has_failed_a_call() {
    handler!(handler, CALLS);
    let mut pair = Pair::new();
    pair.client.control.ring(2, RING);
    pair.answer(2, 14);
    // A failure before the handler was set is known.
    Shared::on_failure(&pair.client, 2, handler).unwrap();
    Shared::on_failure(&pair.client, 2, |_| panic!("the second handler")).unwrap();
    std::thread::sleep(10 * INTERVAL);
    assert!(CALLS.lock().unwrap().is_empty());
    pair.client.control.ring(2, RING);
    pair.answer(2, 14);
    until("the handler", || !CALLS.lock().unwrap().is_empty());
    // A draining service ends the session at once.
    handler!(other, OTHERS);
    let mut pair = Pair::new();
    Shared::on_failure(&pair.client, 0, other).unwrap();
    pair.client.control.ring(0, RING);
    pair.answer(0, 14);
    pair.kill();
    until("the handler", || !OTHERS.lock().unwrap().is_empty());
}
