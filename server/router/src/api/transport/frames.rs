//! Meters the HTTP/2 frames of a connection: counts message bytes, and detects floods of frames without useful content.

use std::time::Instant;

/// The client's preface, which precedes the first frame.
const PREFACE: usize = 24;
/// Length of a frame's header.
const HEAD: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const CONTINUATION: u8 = 9;
/// Flag of a DATA or HEADERS frame: the last of its stream.
const END_STREAM: u8 = 1;

/// Burst of control frames (SETTINGS, PING, RST_STREAM, WINDOW_UPDATE, CONTINUATION and similar) that a connection may
/// send.
const BURST: f64 = 200.0;
/// Control frames that a connection may send per second.
const PER_SECOND: f64 = 50.0;
/// Further control frames for each call.
const PER_CALL: f64 = 8.0;
/// Cost of a reset, in control frames: 1.5 times the allowance of its call.
const PER_RESET: f64 = PER_CALL + 0.5;
/// Message bytes below which a DATA frame that is not the last of its stream is small. Encoders write a message in one
/// piece, or in pieces of a frame or a window.
const SMALL_DATA: usize = 64;
/// Cost of a small DATA frame, in control frames: the transport wakes the call for each of them.
const PER_SMALL_DATA: f64 = 4.0;
/// Cost of each byte of headers, in control frames. The allowance of a call pays for 8 KiB.
const PER_HEADER_BYTE: f64 = 1.0 / 1024.0;
/// Further control frames for each message byte in either direction: peers acknowledge received bytes in windows of 64 KiB or
/// less.
const PER_BYTE: f64 = 1.0 / 4096.0;

/// Parses frame headers in the bytes from the socket.
pub(in crate::api) struct FrameMeter {
    /// Bytes left to skip: of the preface or of a payload.
    skip: usize,
    /// Whether the skipped bytes are message bytes.
    data: bool,
    head: [u8; HEAD],
    have: usize,
    allowance: f64,
    refilled: Instant,
}

/// Content of a piece of input.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::api) struct Seen {
    /// Message bytes.
    pub(in crate::api) data_bytes: usize,
    /// Whether the connection exceeded its allowance of control frames.
    pub(super) flood: bool,
}

impl FrameMeter {
    pub(in crate::api) fn new() -> FrameMeter {
        FrameMeter {
            skip: PREFACE,
            data: false,
            head: [0; HEAD],
            have: 0,
            allowance: BURST,
            refilled: Instant::now(),
        }
    }

    /// Notes sent bytes, which the peer will acknowledge.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.allow(bytes as f64 * PER_BYTE);
    }

    fn allow(&mut self, frames: f64) {
        // The allowance over time is capped at a burst; the allowance for answers is not, because acknowledgements may be late.
        self.allowance = (self.allowance + frames).min(100.0 * BURST);
    }

    /// Parses the next bytes from the socket.
    pub(in crate::api) fn read(&mut self, mut bytes: &[u8]) -> Seen {
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
            HEADERS => self.allow(PER_CALL - self.skip as f64 * PER_HEADER_BYTE),
            RST_STREAM => self.allowance -= PER_RESET,
            DATA if self.skip >= SMALL_DATA || flags & END_STREAM != 0 => {}
            DATA => self.allowance -= PER_SMALL_DATA,
            CONTINUATION => self.allowance -= 1.0 + self.skip as f64 * PER_HEADER_BYTE,
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
        // A message in tiny pieces, and calls with headers that no client needs.
        let mut meter = FrameMeter::new();
        meter.read(&[0; PREFACE]);
        assert!((0..100).any(|_| meter.read(&frame(0, 0, 1)).flood));
        let mut meter = FrameMeter::new();
        meter.read(&[0; PREFACE]);
        assert!((0..100).any(|_| meter.read(&frame(HEADERS, 4, 16 << 10)).flood));
        // Calls that are reset at once are a flood, too.
        let mut meter = FrameMeter::new();
        meter.read(&[0; PREFACE]);
        let reset = [frame(HEADERS, 4, 50), frame(RST_STREAM, 0, 4)].concat();
        assert!((0..300).all(|_| !meter.read(&reset).flood));
        assert!((0..300).any(|_| meter.read(&reset).flood));
        let mut meter = FrameMeter::new();
        meter.read(&[0; PREFACE]);
        // Calls with a ping and two window updates each, and answers that are acknowledged in small windows.
        let call =
            [frame(HEADERS, 4, 4000), frame(DATA, 1, 0), frame(6, 0, 8), frame(8, 0, 4), frame(8, 0, 4)]
                .concat();
        assert!((0..20_000).all(|_| !meter.read(&call).flood));
        // Messages on a stream, each with a small rest.
        let messages = [frame(0, 0, 16 << 10), frame(0, 0, 5)].concat();
        assert!((0..20_000).all(|_| !meter.read(&messages).flood));
        for _ in 0..20_000 {
            meter.sent(32 << 10);
            assert!(!meter.read(&[frame(8, 0, 4), frame(8, 0, 4)].concat()).flood);
        }
    }
}
