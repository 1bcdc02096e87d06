//! Watches the HTTP/2 frames of a connection: how many bytes of messages they bring, and whether too many of them are
//! about nothing.

use std::time::Instant;

/// The client's preface, which stands before the first frame.
const PREFACE: usize = 24;
/// Bytes before each frame's payload.
const HEAD: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
/// Flag of a DATA or HEADERS frame: the last of its stream.
const END_STREAM: u8 = 1;

/// Frames about nothing (SETTINGS, PING, RST_STREAM, WINDOW_UPDATE, CONTINUATION, empty DATA and the like) that a
/// connection may send at once.
const BURST: f64 = 200.0;
/// The same per second.
const PER_SECOND: f64 = 50.0;
/// The same for each call.
const PER_CALL: f64 = 8.0;
/// What a reset takes: what its call has brought, and a half more.
const PER_RESET: f64 = PER_CALL + 0.5;
/// The same for each byte of messages, either way: peers acknowledge what they receive in windows of 64 KiB and less.
const PER_BYTE: f64 = 1.0 / 4096.0;

/// Reads frame heads out of the bytes from the socket.
pub(super) struct FrameMeter {
    /// Bytes that are skipped: the preface, or what is left of a payload.
    skip: usize,
    /// Whether the bytes that are skipped are those of messages.
    data: bool,
    head: [u8; HEAD],
    have: usize,
    allowance: f64,
    refilled: Instant,
}

/// What a piece of input brought.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// Bytes of messages.
    pub(super) data_bytes: usize,
    /// More frames about nothing than a connection may send.
    pub(super) flood: bool,
}

impl FrameMeter {
    pub(super) fn new() -> FrameMeter {
        FrameMeter {
            skip: PREFACE,
            data: false,
            head: [0; HEAD],
            have: 0,
            allowance: BURST,
            refilled: Instant::now(),
        }
    }

    /// Notes bytes that were sent, which the peer acknowledges.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.allow(bytes as f64 * PER_BYTE);
    }

    fn allow(&mut self, frames: f64) {
        // More than a burst is not saved up by silence, but what answers may bring is: windows may be taken late.
        self.allowance = (self.allowance + frames).min(100.0 * BURST);
    }

    /// Takes the next bytes from the socket.
    pub(super) fn read(&mut self, mut bytes: &[u8]) -> Seen {
        let mut seen = Seen::default();
        while !bytes.is_empty() {
            if self.skip > 0 {
                let skipped = self.skip.min(bytes.len());
                if self.data {
                    seen.data_bytes += skipped;
                }
                self.skip -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            let taken = (HEAD - self.have).min(bytes.len());
            self.head[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            self.have += taken;
            bytes = &bytes[taken..];
            if self.have == HEAD {
                self.have = 0;
                self.begin();
            }
        }
        self.allow(seen.data_bytes as f64 * PER_BYTE);
        if self.allowance < 0.0 {
            let elapsed = self.refilled.elapsed().as_secs_f64();
            self.refilled = Instant::now();
            self.allowance = (self.allowance + elapsed * PER_SECOND).min(BURST);
        }
        seen.flood = self.allowance < 0.0;
        seen
    }

    fn begin(&mut self) {
        let [a, b, c, kind, flags, ..] = self.head;
        self.skip = u32::from_be_bytes([0, a, b, c]) as usize;
        self.data = kind == DATA;
        match kind {
            HEADERS => self.allow(PER_CALL),
            RST_STREAM => self.allowance -= PER_RESET,
            DATA if self.skip > 0 || flags & END_STREAM != 0 => {}
            _ => self.allowance -= 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let length = (payload as u32).to_be_bytes();
        let mut bytes = vec![length[1], length[2], length[3], kind, flags, 0, 0, 0, 1];
        bytes.resize(HEAD + payload, 7);
        bytes
    }

    proptest! {
        #[test]
        fn data_bytes_are_counted_however_the_input_is_cut(
            frames in prop::collection::vec((0u8..10, 0usize..3000), 0..40),
            sizes in prop::collection::vec(1usize..500, 1..8),
        ) {
            let mut input = vec![b'P'; PREFACE];
            let mut expected = 0;
            for &(kind, payload) in &frames {
                input.extend(frame(kind, 0, payload));
                expected += if kind == DATA { payload } else { 0 };
            }
            let mut meter = FrameMeter::new();
            let (mut found, mut rest) = (0, &input[..]);
            for size in sizes.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (now, later) = rest.split_at((*size).min(rest.len()));
                let seen = meter.read(now);
                prop_assert!(!seen.flood);
                found += seen.data_bytes;
                rest = later;
            }
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn floods_are_seen_and_work_is_none() {
        for kind in [4, 6, 3, 8, 9, 2, 0] {
            let mut meter = FrameMeter::new();
            meter.read(&[0; PREFACE]);
            let frames = frame(kind, 0, 0).repeat(100);
            let few = frame(kind, 0, 0).repeat(20);
            assert!(!meter.read(&few).flood, "a burst of kind {kind}");
            assert!((0..5).any(|_| meter.read(&frames).flood), "a flood of kind {kind}");
        }
        // A call that is reset at once is work about nothing, too.
        let mut meter = FrameMeter::new();
        meter.read(&[0; PREFACE]);
        let reset = [frame(HEADERS, 4, 50), frame(RST_STREAM, 0, 4)].concat();
        assert!((0..300).all(|_| !meter.read(&reset).flood));
        assert!((0..300).any(|_| meter.read(&reset).flood));
        let mut meter = FrameMeter::new();
        meter.read(&[0; PREFACE]);
        // Calls, each with a ping and two window updates, and answers that are taken in small windows.
        let call = [frame(HEADERS, 4, 50), frame(DATA, 1, 0), frame(6, 0, 8), frame(8, 0, 4), frame(8, 0, 4)]
            .concat();
        assert!((0..20_000).all(|_| !meter.read(&call).flood));
        for _ in 0..20_000 {
            meter.sent(32 << 10);
            assert!(!meter.read(&[frame(8, 0, 4), frame(8, 0, 4)].concat()).flood);
        }
    }
}
