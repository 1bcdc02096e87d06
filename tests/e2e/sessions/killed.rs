//! A thousand clients, killed at each point of the protocol in turn.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytemuck::Zeroable as _;
use expertd_ipc::SharedRegion;
use expertd_ipc::ring::{RingConsumer, RingProducer};
use expertd_session::socket;
use expertd_session::wire::{
    CompletionRecord, FrameHeader, Open, Opened, RegionLayout, RequestRecord, VERSION, frame,
};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::{Signal, getpid, kill_process};

use super::{FAMILY, Host, LOST, Load, runtime};
use crate::service::load::Rows;
use crate::service::{eventually, golden};

/// Clients that are killed.
const CLIENTS: usize = 1000;
/// Clients that run at once.
const AT_ONCE: usize = 8;
const SOCKET: &str = "SESSION_KILLED_SOCKET";
const POINT: &str = "SESSION_KILLED_POINT";
const SEED: &str = "SESSION_KILLED_SEED";

/// Where a client is killed.
const POINTS: [&str; 12] = [
    "connected",
    "within OPEN",
    "OPEN sent",
    "OPENED received",
    "descriptor received",
    "mapped",
    "request written, not pushed",
    "pushed, bell not rung",
    "rung",
    "calls in flight",
    "completion pushed, not popped",
    "completion popped",
];

fn die() -> ! {
    kill_process(getpid(), Signal::KILL).unwrap();
    unreachable!("the signal ends the process");
}

/// Not a test by itself: the client, which kills itself at the point that its environment names.
#[test]
#[ignore = "runs as a child process of another test"]
fn client() {
    let (Ok(path), Ok(point), Ok(seed)) = (std::env::var(SOCKET), std::env::var(POINT), std::env::var(SEED))
    else {
        return;
    };
    let mut rng = SmallRng::seed_from_u64(seed.parse().unwrap());
    let at = |name: &str| {
        assert!(POINTS.contains(&name), "{name}");
        if name == point {
            die();
        }
    };
    let (calls, rows_bytes) = (8, 1 << 18);
    let stream = UnixStream::connect(path).unwrap();
    at("connected");
    let open = Open { version: VERSION, kind: 1, rows_bytes, calls, reserved: 0 };
    if point == "within OPEN" {
        let header = FrameHeader { kind: frame::OPEN, bytes: size_of::<Open>() as u32 };
        (&stream).write_all(bytemuck::bytes_of(&header)).unwrap();
        (&stream).write_all(&bytemuck::bytes_of(&open)[..5]).unwrap();
        die();
    }
    socket::send(&stream, frame::OPEN, bytemuck::bytes_of(&open)).unwrap();
    at("OPEN sent");
    let (kind, payload) = socket::receive(&stream, 1 << 20).unwrap().unwrap();
    assert_eq!(kind, frame::OPENED, "{}", String::from_utf8_lossy(&payload));
    at("OPENED received");
    let opened: Opened = socket::record(&payload).unwrap();
    let fd = socket::receive_region(&stream).unwrap();
    at("descriptor received");
    let region = SharedRegion::from_fd(fd, opened.region_bytes as usize).unwrap();
    at("mapped");
    let layout = RegionLayout::new(opened.calls, opened.rows_bytes as usize).unwrap();
    let bell = region.slice::<u32>(layout.service_bell, 1).unwrap();
    let record = |call: u64, rng: &mut SmallRng| RequestRecord {
        call,
        rows: 0,
        output: (1 << 17) + call * (1 << 14),
        layer: Rows::new(&golden(FAMILY), 1, 1).layers()[0],
        tokens: rng.random_range(1..64),
        dtype: 3,
        ..RequestRecord::zeroed()
    };
    assert!(opened.hidden as usize * 4 * 64 <= 1 << 14, "outputs do not overlap");
    if point == "request written, not pushed" {
        let cell = layout.requests.offset() + 128;
        let words = region.slice::<u64>(cell, size_of::<RequestRecord>() / 8 + 1).unwrap();
        let record = record(1, &mut rng);
        let values = bytemuck::cast_slice::<u8, u64>(bytemuck::bytes_of(&record));
        for (to, value) in words.atomics().iter().zip(values.iter().chain(&[1])) {
            to.store(*value, Ordering::Relaxed);
        }
        die();
    }
    let mut requests = RingProducer::<RequestRecord>::new(layout.requests.memory(&region).unwrap()).unwrap();
    let in_flight = if point == "calls in flight" { calls.into() } else { 1 };
    for call in 0..in_flight {
        assert!(requests.try_push(&record(call, &mut rng)).unwrap());
    }
    at("pushed, bell not rung");
    bell.atomics()[0].fetch_add(2, Ordering::SeqCst);
    rustix::thread::futex::wake(&bell.atomics()[0], rustix::thread::futex::Flags::empty(), 1).unwrap();
    at("rung");
    if point == "calls in flight" {
        std::thread::sleep(Duration::from_micros(rng.random_range(0..3000)));
        die();
    }
    let mut completions =
        RingConsumer::<CompletionRecord>::new(layout.completions.memory(&region).unwrap()).unwrap();
    let pushed = region.slice::<u64>(layout.completions.offset(), 1).unwrap();
    eventually(LOST, "a completion comes", || pushed.atomics()[0].load(Ordering::Acquire) > 0);
    at("completion pushed, not popped");
    let completion = completions.try_pop().unwrap().unwrap();
    assert_eq!((completion.code, completion.call), (0, 0), "{}", completion.text());
    at("completion popped");
    panic!("{point} is no point of the protocol");
}

/// Mappings of sessions' memories in a process.
fn mappings(pid: u32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().filter(|line| line.contains("memfd:expertd-session")).count()
}

#[test]
#[ignore = "starts a thousand processes; run it on many cores with `-- --ignored`"]
fn a_thousand_clients_killed_at_every_point_leave_nothing_behind() {
    let runtime = runtime();
    let host = Host::start(FAMILY, 2, &[]);
    let load = Load::start(&host, 64);
    load.goes_on();
    host.in_place(&runtime);
    let processes = || [vec![host.service.pid()], host.service.ranks()].concat();
    let held =
        || processes().into_iter().map(|pid| (pid, mappings(pid), descriptors(pid))).collect::<Vec<_>>();
    let before = held();
    assert!(before.iter().all(|(_, mappings, _)| *mappings == 2), "{before:?}");
    std::thread::scope(|scope| {
        for worker in 0..AT_ONCE {
            let host = &host;
            scope.spawn(move || {
                for number in (worker..CLIENTS).step_by(AT_ONCE) {
                    let status = Command::new(std::env::current_exe().unwrap())
                        .args(["--exact", "sessions::killed::client", "--ignored", "--nocapture"])
                        .env(SOCKET, host.path())
                        .env(POINT, POINTS[number % POINTS.len()])
                        .env(SEED, number.to_string())
                        .stdout(Stdio::null())
                        .status()
                        .unwrap();
                    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
                    assert_eq!(signal, Some(9), "{}: {status}", POINTS[number % POINTS.len()]);
                }
            });
        }
    });
    load.goes_on();
    eventually(LOST, "only the sessions of the load are open", || host.status(&runtime).sessions.len() == 2);
    eventually(LOST, "nothing else is mapped or open", || {
        held().iter().zip(&before).all(|(now, before)| now.1 == before.1 && now.2 <= before.2)
    });
    let status = host.status(&runtime);
    assert_eq!(status.generation, 1, "no generation ended: {}", status.reason);
    load.stop();
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}
