//! Network sessions of the real service over loopback: the same answers as over gRPC, faults, and clients that do what they should not.
//!
//! They need NIXL: `EXPERTD_NIXL` names its folder. Without it they are ignored.

mod access;
mod c;
mod faults;
mod fleet;
mod hostile;
mod link;
mod stalls;
mod wire;

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use expertd_client::Client;
use expertd_client::network::{self, NetworkOptions};
use expertd_client::session::{SessionClient, SessionError, SessionOptions};
use expertd_proto::v1::GetStatusRequest;
use expertd_proto::v1::SessionStatus;
use expertd_proto::v1::admin_client::AdminClient;

use crate::service::load::{Rows, check};
use crate::service::{Service, alive, children, families, golden, with_patience};

const FAMILY: &str = "qwen3_moe";
/// Nothing should take this long.
const LOST: Duration = Duration::from_secs(120);

/// Where NIXL is.
fn library() -> PathBuf {
    std::env::var_os("EXPERTD_NIXL").expect("EXPERTD_NIXL names the folder of NIXL").into()
}

fn start(family: &str, ranks: u32, more: &[&str]) -> Service {
    let library = library();
    let mut flags = vec!["--network-library", library.to_str().unwrap()];
    if !more.contains(&"--network-listen") {
        flags.extend(["--network-listen", "127.0.0.1"]);
    }
    flags.extend(more);
    Service::start(family, ranks, &with_patience(&flags))
}

fn options(rows_bytes: usize) -> NetworkOptions {
    let session = SessionOptions { rows_bytes, timeout: LOST, ..SessionOptions::default() };
    NetworkOptions { session, library: Some(library()), ..NetworkOptions::default() }
}

fn open(service: &Service) -> SessionClient {
    try_open(service).unwrap()
}

fn try_open(service: &Service) -> Result<SessionClient, SessionError> {
    SessionClient::over(network::open(&service.address, &options(16 << 20))?)
}

fn sessions(service: &Service) -> Vec<SessionStatus> {
    runtime().block_on(async {
        let channel = expertd_client::transport::connect(&service.admin).await.unwrap();
        AdminClient::new(channel).get_status(GetStatusRequest {}).await.unwrap().into_inner().sessions
    })
}

/// Two ports side by side that nothing listens on and no other test takes. They lie below those that the system chooses for sockets.
fn two_ports() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    static FIRST: OnceLock<u16> = OnceLock::new();
    let first = *FIRST.get_or_init(|| rand::random_range(0..5000));
    let is_free = |port: u16| std::net::TcpListener::bind(("127.0.0.1", port)).is_ok();
    (0..5000)
        .map(|_| 20_000 + 2 * ((first + NEXT.fetch_add(1, Ordering::Relaxed)) % 5000))
        .find(|&port| is_free(port) && is_free(port + 1))
        .unwrap()
}

/// The agents of a service.
fn agents(service: &Service) -> Vec<u32> {
    let is_agent = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|&byte| byte == 0).any(|word| word == b"network-agent") && alive(*pid)
    };
    children(service.pid()).into_iter().filter(is_agent).collect()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn answers_equal_those_of_grpc() {
    let runtime = runtime();
    for family in families() {
        let service = start(&family, 2, &["--max-tokens-per-step", "512"]);
        let client = runtime.block_on(Client::connect(&service.address)).unwrap();
        let session = open(&service);
        assert_eq!(session.model(), &runtime.block_on(client.model("")).unwrap());
        let mut rows = Rows::new(&golden(&family), 1, 32);
        for round in 0..10 {
            // Every third call has more bytes than a notification takes.
            let (mut request, wanted) = match round % 3 {
                2 => rows.draw_of(rows.layers()[0], 700),
                _ => rows.draw(),
            };
            request.return_routing = true;
            let over_grpc = runtime.block_on(client.forward(request.clone(), None)).unwrap();
            let over_network = session.forward(&request, LOST).unwrap();
            check(&over_network, &wanted, &request);
            assert_eq!(over_network.rows, over_grpc.rows, "{family}, round {round}");
            let (a, b) = (over_grpc.receipt.unwrap(), over_network.receipt.unwrap());
            assert_eq!((&a.topk_ids, &a.topk_weights), (&b.topk_ids, &b.topk_weights));
            assert_eq!((a.weight_version, a.weight_fingerprint), (b.weight_version, b.weight_fingerprint));
            let k = (a.topk_ids.len() / 4) as u32 / request.tokens;
            request.routing =
                Some(expertd_proto::v1::Routing { topk_ids: a.topk_ids, topk_weights: a.topk_weights, k });
            let given = session.forward(&request, LOST).unwrap();
            assert_eq!(given.rows, over_grpc.rows, "{family}, given routing, round {round}");
        }
        let status = sessions(&service);
        assert_eq!((status.len(), status[0].calls_total), (1, 20));
        assert_eq!(agents(&service), [status[0].pid]);
        assert_confined(status[0].pid);
    }
}

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn large_calls_travel_in_pieces_and_larger_ones_are_refused() {
    const ROWS: usize = 20_000;
    let service = start(FAMILY, 2, &["--max-tokens-per-request", "20000", "--max-tokens-per-step", "4096"]);
    let session = open(&service);
    let mut rows = Rows::new(&golden(FAMILY), 5, 4);
    let layer = rows.layers()[0];
    for _ in 0..4 {
        let (request, wanted) = rows.draw_of(layer, ROWS);
        check(&session.forward(&request, LOST).unwrap(), &wanted, &request);
    }
    let calls = sessions(&service)[0].calls_total;
    assert!(calls >= 8, "{calls} calls of the service for four of the client");
    let (request, _) = rows.draw_of(layer, ROWS + 1);
    let error = session.forward(&request, LOST).unwrap_err();
    assert!(matches!(&error, SessionError::Status { code: 3, .. }), "{error}");
}

/// Every thread of an agent has a filter of system calls.
fn assert_confined(agent: u32) {
    let threads = std::fs::read_dir(format!("/proc/{agent}/task")).unwrap();
    // A thread may end meanwhile.
    let status = |thread: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(thread.unwrap().path().join("status")).ok()
    };
    let statuses: Vec<String> = threads.filter_map(status).collect();
    assert!(!statuses.is_empty());
    for status in statuses {
        assert!(status.contains("Seccomp:\t2\n") && status.contains("NoNewPrivs:\t1\n"), "{status}");
    }
}

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn calls_that_are_invalid_fail_alone() {
    let service = start(FAMILY, 2, &[]);
    let session = open(&service);
    let (mut request, wanted) = Rows::new(&golden(FAMILY), 7, 4).draw();
    request.layer = 9999;
    let error = session.forward(&request, LOST).unwrap_err();
    assert!(matches!(&error, SessionError::Status { code: 5, .. }), "{error}");
    let (request, _) = (Rows::new(&golden(FAMILY), 7, 4).draw(), wanted);
    check(&session.forward(&request.0, LOST).unwrap(), &request.1, &request.0);
}

/// Bytes of memory of a process that no file holds.
fn anonymous(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Calls of random sizes from 64 threads over four sessions: 10^4 by default, `EXPERTD_NETWORK_CALLS` of them otherwise. Memory is read
/// after each tenth: at the end no process may have 8 MiB more than after the first tenth, or than after the fifth.
#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn memory_stays_flat_over_calls_of_random_sizes() {
    const SESSIONS: usize = 4;
    const THREADS: u64 = 64;
    let asked: Option<u64> = std::env::var("EXPERTD_NETWORK_CALLS").ok().map(|text| text.parse().unwrap());
    let calls = asked.unwrap_or(10_000);
    let service = start(FAMILY, 2, &["--max-sessions", "8"]);
    let all: [SessionClient; SESSIONS] = std::array::from_fn(|_| open(&service));
    let run = |part: u64| {
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let session = &all[thread as usize % SESSIONS];
                let mut rows = Rows::new(&golden(FAMILY), part * THREADS + thread, 48);
                scope.spawn(move || {
                    for round in 0..calls.div_ceil(10 * THREADS) {
                        let (request, wanted) = match (thread + round) % 50 {
                            49 => rows.draw_of(rows.layers()[0], 600),
                            _ => rows.draw(),
                        };
                        check(&session.forward(&request, LOST).unwrap(), &wanted, &request);
                    }
                });
            }
        });
    };
    let mut processes = agents(&service);
    assert_eq!(processes.len(), SESSIONS);
    processes.extend(service.ranks());
    processes.push(service.pid());
    // By default other tests run in this process at the same time, and their memory is its memory, too.
    processes.extend(asked.map(|_| std::process::id()));
    let mut seen: Vec<Vec<u64>> = Vec::new();
    for part in 0..10 {
        run(part);
        seen.push(processes.iter().map(|&pid| anonymous(pid)).collect());
        println!(
            "{}0 % of {calls} calls: agents, ranks, router (and client) have {:?} bytes",
            part + 1,
            seen[part as usize]
        );
    }
    for early in [&seen[0], &seen[4]] {
        for (early, last) in early.iter().zip(&seen[9]) {
            assert!(*last < early + (8 << 20), "{early} bytes became {last}");
        }
    }
    assert!(sessions(&service).iter().map(|session| session.calls_total).sum::<u64>() >= calls);
}
