//! A link between this network namespace and another one: packets of two TUN devices, which this process delays, loses and cuts off.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// What the link does to packets.
#[derive(Debug, Default)]
pub(super) struct Wire {
    /// Every packet takes this long, in microseconds, and up to twice as long.
    pub(super) delay_us: AtomicU64,
    /// Packets of 1000 that are lost.
    pub(super) lost: AtomicU32,
    /// Whether all packets are lost but those of connections to or from `spared`.
    pub(super) is_cut: AtomicBool,
    /// A TCP port; 0 for none.
    pub(super) spared: AtomicU32,
    /// Packets that the link has lost.
    pub(super) losses: AtomicU64,
    has_ended: AtomicBool,
}

impl Wire {
    /// Makes the devices `here` and `there`, and carries packets between them until the last owner of the link is gone.
    pub(super) fn start(here: &str, there: &str) -> Arc<Wire> {
        let wire = Arc::new(Wire::default());
        let (here, there) = (device(here), device(there));
        for (seed, from, to) in [(1, &here, &there), (2, &there, &here)] {
            let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            let wire = Arc::clone(&wire);
            std::thread::spawn(move || wire.carry(from, to, SmallRng::seed_from_u64(seed)));
        }
        wire
    }

    /// Lets the threads end, and with them the devices.
    pub(super) fn end(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
    }

    fn carry(&self, mut from: File, mut to: File, mut random: SmallRng) {
        let mut packet = vec![0; 65536];
        let mut waiting: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
        while !self.has_ended.load(Ordering::Relaxed) {
            while waiting.front().is_some_and(|(due, _)| *due <= Instant::now()) {
                // A device without its other end takes nothing.
                let _ = to.write(&waiting.pop_front().unwrap().1);
            }
            let next = waiting.front().map(|(due, _)| due.saturating_duration_since(Instant::now()));
            let patience = next.unwrap_or(Duration::from_millis(50));
            let patience = Timespec { tv_sec: 0, tv_nsec: i64::from(patience.subsec_nanos()) };
            let mut ready = [PollFd::from_borrowed_fd(from.as_fd(), PollFlags::IN)];
            let _ = poll(&mut ready, Some(&patience));
            while let Ok(bytes) = from.read(&mut packet) {
                if self.loses(&packet[..bytes], &mut random) {
                    self.losses.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                let delay = self.delay_us.load(Ordering::Relaxed);
                let delay =
                    Duration::from_micros(delay + if delay > 0 { random.random_range(0..delay) } else { 0 });
                // Packets do not overtake each other.
                let due =
                    waiting.back().map_or_else(Instant::now, |(due, _)| *due).max(Instant::now() + delay);
                if delay.is_zero() && waiting.is_empty() {
                    let _ = to.write(&packet[..bytes]);
                } else {
                    waiting.push_back((due, packet[..bytes].to_vec()));
                }
            }
        }
    }

    fn loses(&self, packet: &[u8], random: &mut SmallRng) -> bool {
        if self.is_cut.load(Ordering::Relaxed) {
            let spared = self.spared.load(Ordering::Relaxed);
            return spared == 0 || !ports(packet).contains(&spared);
        }
        random.random_range(0..1000) < self.lost.load(Ordering::Relaxed)
    }
}

/// The ports of a packet of IPv4 that is one of TCP or UDP.
fn ports(packet: &[u8]) -> [u32; 2] {
    let head = packet.first().map_or(0, |byte| usize::from(byte & 15) * 4);
    let word = |at: usize| {
        packet.get(at..at + 2).map_or(0, |word| u32::from(u16::from_be_bytes([word[0], word[1]])))
    };
    [word(head), word(head + 2)]
}

/// A TUN device of this name, whose packets the file reads and writes without waiting.
#[allow(unsafe_code, reason = "there is no other way to make a TUN device")]
fn device(name: &str) -> File {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    const TUN_WITHOUT_HEADERS: u16 = 0x1001;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .unwrap();
    let mut request = [0_u8; 40];
    request[..name.len()].copy_from_slice(name.as_bytes());
    request[16..18].copy_from_slice(&TUN_WITHOUT_HEADERS.to_ne_bytes());
    // SAFETY: the request has the size of the kernel's `ifreq` and lives during the call.
    let status = unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, request.as_mut_ptr()) };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
    file
}
