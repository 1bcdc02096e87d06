//! Answers to PREPARE frames, which the thread of the socket passes on.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// The answers of a session. The service answers frames in their order, so answers are counted: the answer to the last frame
/// comes after the answers to all earlier frames, of which some may have come too late for their callers.
#[derive(Debug)]
pub(super) struct Replies {
    receiver: Receiver<Vec<u8>>,
    /// Number of frames that were sent and whose answers were not received.
    awaited: usize,
}

impl Replies {
    pub(super) const fn new(receiver: Receiver<Vec<u8>>) -> Self {
        Replies { receiver, awaited: 0 }
    }

    /// A frame was sent.
    pub(super) const fn sent(&mut self) {
        self.awaited += 1;
    }

    /// The answer to the last frame; `None` if it does not come within `timeout`, or no more answers come.
    pub(super) fn last(&mut self, timeout: Duration) -> Option<Vec<u8>> {
        let began = Instant::now();
        loop {
            let reply = self.receiver.recv_timeout(timeout.saturating_sub(began.elapsed())).ok()?;
            self.awaited = self.awaited.saturating_sub(1);
            if self.awaited == 0 {
                return Some(reply);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const SOON: Duration = Duration::from_millis(1);
    const LATE: Duration = Duration::from_secs(60);

    #[test]
    fn a_late_answer_is_not_taken_for_that_of_the_next_frame() {
        let (sender, receiver) = mpsc::channel();
        let mut replies = Replies::new(receiver);
        for _ in 0..2 {
            replies.sent();
            assert_eq!(replies.last(SOON), None);
        }
        sender.send(b"first".to_vec()).unwrap();
        replies.sent();
        assert_eq!(replies.last(SOON), None);
        for answer in ["second", "third"] {
            sender.send(answer.into()).unwrap();
        }
        assert_eq!(replies.last(LATE).unwrap(), b"third");
        replies.sent();
        sender.send(b"fourth".to_vec()).unwrap();
        assert_eq!(replies.last(LATE).unwrap(), b"fourth");
        drop(sender);
        replies.sent();
        assert_eq!(replies.last(LATE), None);
    }
}
