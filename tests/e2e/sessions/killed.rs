//! Clients that end at each point of the protocol in turn: killed; stopped, and killed later; starved of processor time, after which
//! they go on. Ten of each by default; EXPERTD_SESSION_CLIENTS asks for another number in all.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytemuck::Zeroable as _;
use expertd_session::socket;
use expertd_session::wire::{
    CompletionRecord, FrameHeader, Open, Opened, RegionLayout, RequestRecord, VERSION, frame,
};
use expertd_shm::SharedRegion;
use expertd_shm::ring::{RingConsumer, RingProducer};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, waitpid};

use super::{FAMILY, Host, LOST, Load, runtime};
use crate::service::load::Rows;
use crate::service::{eventually, golden};

/// Clients that run at once.
const AT_ONCE: usize = 6;
/// Longest time for which a client is stopped or starved.
const STILL: Duration = Duration::from_millis(300);
/// Anonymous memory that the router may gain while the clients come and go.
const MEMORY: u64 = 4 << 20;
const SOCKET: &str = "SESSION_CLIENT_SOCKET";
const POINT: &str = "SESSION_CLIENT_POINT";
const END: &str = "SESSION_CLIENT_END";
const SEED: &str = "SESSION_CLIENT_SEED";

/// What happens to a client at a point of the protocol.
const ENDS: [&str; 3] = ["killed", "stopped", "starved"];

/// Where it happens.
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

/// Not a test by itself: the client, which ends itself at the point that its environment names, or stops there until it is continued.
#[test]
#[ignore = "runs as a child process of another test"]
fn client() {
    let (Ok(path), Ok(point), Ok(seed)) = (std::env::var(SOCKET), std::env::var(POINT), std::env::var(SEED))
    else {
        return;
    };
    let signal = if std::env::var(END).unwrap() == "killed" { Signal::KILL } else { Signal::STOP };
    let mut rng = SmallRng::seed_from_u64(seed.parse().unwrap());
    let at = |name: &str| {
        assert!(POINTS.contains(&name), "{name}");
        if name == point {
            kill_process(getpid(), signal).unwrap();
        }
    };
    let (calls, rows_bytes) = (8, 1 << 18);
    let stream = UnixStream::connect(path).unwrap();
    at("connected");
    let open = Open { version: VERSION, kind: 1, rows_bytes, calls, reserved: 0 };
    let header = FrameHeader { kind: frame::OPEN, bytes: size_of::<Open>() as u32 };
    let bytes = [bytemuck::bytes_of(&header), bytemuck::bytes_of(&open)].concat();
    (&stream).write_all(&bytes[..13]).unwrap();
    at("within OPEN");
    (&stream).write_all(&bytes[13..]).unwrap();
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
    let cell = layout.requests.offset() + 128;
    let words = region.slice::<u64>(cell, size_of::<RequestRecord>() / 8 + 1).unwrap();
    let first = record(0, &mut rng);
    let values = bytemuck::cast_slice::<u8, u64>(bytemuck::bytes_of(&first));
    for (to, value) in words.atomics().iter().zip(values.iter().chain(&[1])) {
        to.store(*value, Ordering::Relaxed);
    }
    at("request written, not pushed");
    let mut requests = RingProducer::<RequestRecord>::new(layout.requests.memory(&region).unwrap()).unwrap();
    let in_flight = if point == "calls in flight" { calls.into() } else { 1 };
    assert!(requests.try_push(&first).unwrap());
    for call in 1..in_flight {
        assert!(requests.try_push(&record(call, &mut rng)).unwrap());
    }
    at("pushed, bell not rung");
    bell.atomics()[0].fetch_add(2, Ordering::SeqCst);
    rustix::thread::futex::wake(&bell.atomics()[0], rustix::thread::futex::Flags::empty(), 1).unwrap();
    at("rung");
    if point == "calls in flight" {
        std::thread::sleep(Duration::from_micros(rng.random_range(0..3000)));
    }
    at("calls in flight");
    let mut completions =
        RingConsumer::<CompletionRecord>::new(layout.completions.memory(&region).unwrap()).unwrap();
    let pushed = region.slice::<u64>(layout.completions.offset(), 1).unwrap();
    eventually(LOST, "completions come", || pushed.atomics()[0].load(Ordering::Acquire) == in_flight);
    at("completion pushed, not popped");
    for _ in 0..in_flight {
        let completion = completions.try_pop().unwrap().unwrap();
        assert_eq!(completion.code, 0, "{}", completion.text());
    }
    at("completion popped");
}

/// Starts a client and causes its end. A starved client gets its answers.
fn one_client(host: &Host, number: usize) {
    let (point, end) = (POINTS[number % POINTS.len()], ENDS[number / POINTS.len() % ENDS.len()]);
    let mut client = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sessions::killed::client", "--ignored", "--nocapture"])
        .envs([(END, end), (POINT, point)])
        .env(SOCKET, host.path())
        .env(SEED, number.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    if end != "killed" {
        let pid = Pid::from_child(&client);
        let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped(), "{end} at {point}: {status:?}");
        std::thread::sleep(STILL.mul_f64((number % 10) as f64 / 10.0));
        kill_process(pid, if end == "stopped" { Signal::KILL } else { Signal::CONT }).unwrap();
    }
    let status = client.wait().unwrap();
    match end {
        "starved" => assert!(status.success(), "starved at {point}: {status}"),
        _ => assert_eq!(status.signal(), Some(9), "{end} at {point}: {status}"),
    }
}

/// What a process holds: mappings of sessions' memories, descriptors, threads of sessions.
fn held(pid: u32) -> [usize; 3] {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    [mappings(pid), descriptors(pid), names.filter(|name| name.starts_with("session")).count()]
}

fn anonymous_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    1024 * line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
}

/// Mappings of sessions' memories in a process.
fn mappings(pid: u32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().filter(|line| line.contains("memfd:expertd-session")).count()
}

#[test]
fn clients_that_end_at_any_point_leave_nothing_behind() {
    let all = std::env::var("EXPERTD_SESSION_CLIENTS").map_or(360, |number| number.parse().unwrap());
    let runtime = runtime();
    let host = Host::start(FAMILY, 2, &[]);
    let load = Load::start(&host, 64);
    load.goes_on();
    // What the first clients make the router allocate for good does not count.
    (0..6).for_each(|number| one_client(&host, number * 7));
    eventually(LOST, "only the sessions of the load are open", || host.status(&runtime).sessions.len() == 2);
    host.in_place(&runtime);
    let processes = [vec![host.service.pid()], host.service.ranks()].concat();
    let all_held = || processes.iter().map(|&pid| held(pid)).collect::<Vec<_>>();
    eventually(LOST, "the sessions of the load alone are mapped", || {
        all_held().iter().all(|[mappings, ..]| *mappings == 2)
    });
    let (before, memory) = (all_held(), anonymous_bytes(processes[0]));
    std::thread::scope(|scope| {
        for worker in 0..AT_ONCE {
            let host = &host;
            scope.spawn(move || (worker..all).step_by(AT_ONCE).for_each(|number| one_client(host, number)));
        }
    });
    load.goes_on();
    eventually(LOST, "only the sessions of the load are open", || host.status(&runtime).sessions.len() == 2);
    eventually(LOST, "nothing else is mapped, open or running", || {
        all_held().iter().flatten().zip(before.iter().flatten()).all(|(now, before)| now <= before)
    });
    let now = anonymous_bytes(processes[0]);
    println!("{all} clients; anonymous memory of the router: {memory} bytes before, {now} after");
    eventually(LOST, "the router's memory is as before", || anonymous_bytes(processes[0]) <= memory + MEMORY);
    let status = host.status(&runtime);
    assert_eq!(status.generation, 1, "no generation ended: {}", status.reason);
    load.stop();
    eventually(LOST, "no call is left", || {
        let status = host.status(&runtime);
        (status.sessions.len(), status.requests_queued, status.requests_in_flight) == (0, 0, 0)
    });
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}
