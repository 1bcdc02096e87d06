//! Clients that stall: that read nothing, that lead an agent to a peer which never answers, and strangers who connect and wait.

use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use bytemuck::Zeroable as _;
use expertd_network::wire::{Head, VERSION};
use expertd_network::{Endpoint, Library, Transports};
use expertd_proto::v1::OpenNetworkSession;
use expertd_session::wire::RequestRecord;
use expertd_shm::SharedRegion;

use super::hostile::{Client, ROWS, open_call};
use super::{FAMILY, LOST, agents, anonymous_of, library, open, runtime, sessions, start, try_open};
use crate::service::load::{Rows, check};
use crate::service::{alive, eventually, golden};

/// More than an agent may have, and less than it would have without a limit.
const MOST: u64 = 400 << 20;

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn a_client_that_reads_nothing_ends_its_own_session() {
    let service = start(FAMILY, 2, &[]);
    // Its thread answers pings, so that the session does not end as that of a client which is cut off.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let honest = open(&service);
    let own = agents(&service);
    let mut client = Client::open(&runtime, &Library::open(Some(&library())).unwrap(), &service);
    let agent = agents(&service).into_iter().find(|agent| !own.contains(agent)).unwrap();
    let mut rows = Rows::new(&golden(FAMILY), 8, 64);
    let (layer, hidden) = (rows.layers()[0], honest.session().hidden());
    // As many rows as an answer has within a notification. The rows are written nowhere: the service computes what lies there.
    let tokens = (60 << 10) / (hidden as u32 * 4);
    let until = Instant::now() + Duration::from_secs(300);
    let (mut sent, mut most) = (0, 0);
    while alive(agent) && Instant::now() < until {
        for _ in 0..8 {
            sent += 1;
            let at = (sent - 1) % 8 * (64 << 10);
            let record = RequestRecord {
                call: sent,
                rows: at,
                output: (512 << 10) + at,
                layer,
                tokens,
                dtype: 3,
                ..RequestRecord::zeroed()
            };
            let head = bytemuck::bytes_of(&Head { kind: 1, inline_bytes: 0 }).to_vec();
            let message = [&head[..], bytemuck::bytes_of(&record)].concat();
            if client.endpoint.send(&[], &message).is_err() {
                break;
            }
        }
        // The agent takes no more than eight calls at once.
        let computed = sent;
        eventually(LOST, "calls are computed", || {
            !alive(agent)
                || sessions(&service)
                    .iter()
                    .any(|session| session.pid == agent && session.calls_total >= computed)
                || sessions(&service).len() < 2
        });
        most = most.max(anonymous_or_none(agent));
        assert!(most < MOST, "the agent has {most} bytes after {sent} calls");
        let (request, wanted) = rows.draw();
        check(&honest.forward(&request, LOST).unwrap(), &wanted, &request);
    }
    assert!(
        !alive(agent),
        "after {sent} calls whose answers nobody reads the agent has {most} bytes and lives"
    );
    let reason = client.reason(&runtime);
    println!("{sent} calls, {most} bytes: {reason}");
    // It was not refused for what it sent.
    assert!(sent > 1000 && most > 100 << 20, "{sent} calls, {most} bytes: {reason}");
    eventually(LOST, "its session is gone", || sessions(&service).len() == 1);
    let (request, wanted) = rows.draw();
    check(&honest.forward(&request, LOST).unwrap(), &wanted, &request);
}

/// Memory of a process that may end meanwhile.
fn anonymous_or_none(pid: u32) -> u64 {
    std::fs::read_to_string(format!("/proc/{pid}/status"))
        .map_or(0, |status| anonymous_of(&status).unwrap_or(0))
}

/// The agent connects to where a client's metadata says. A peer that takes the connection and never answers costs nobody else anything.
#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn metadata_that_names_a_silent_listener_harms_nobody() {
    let service = start(FAMILY, 1, &[]);
    let runtime = runtime();
    let honest = open(&service);
    let library = Library::open(Some(&library())).unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    silent.set_nonblocking(true).unwrap();
    let own = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let rows = SharedRegion::create("rows", ROWS).unwrap().slice(0, ROWS).unwrap();
    let transports = Transports {
        transports: Some("^sm".into()),
        device: Some("lo".into()),
        ports: Some((own, own)),
        ..Transports::default()
    };
    let endpoint = Endpoint::new(&library, "lies", &transports, rows).unwrap();
    let card = endpoint.card().unwrap();
    let mut metadata = card.metadata;
    let (from, to) = (own.to_be_bytes(), silent.local_addr().unwrap().port().to_be_bytes());
    let places: Vec<usize> = (0..metadata.len() - 1).filter(|&at| metadata[at..at + 2] == from).collect();
    assert!(!places.is_empty(), "the metadata has no port");
    for at in places {
        metadata[at..at + 2].copy_from_slice(&to);
    }
    let open = OpenNetworkSession {
        version: VERSION,
        metadata: metadata.into(),
        rows_address: card.rows_address,
        rows_bytes: ROWS as u64,
        calls: 8,
    };
    let begun = Instant::now();
    let opened = open_call(&runtime, &service, open);
    assert!(begun.elapsed() < Duration::from_secs(40), "opening took {:?}", begun.elapsed());
    println!("opened: {}, after {:?}", opened.is_ok(), begun.elapsed());
    let mut taken = None;
    eventually(LOST, "the agent connects to where the metadata says", || {
        taken = silent.accept().ok();
        taken.is_some()
    });
    let mut rows = Rows::new(&golden(FAMILY), 8, 64);
    for _ in 0..10 {
        let (request, wanted) = rows.draw();
        check(&honest.forward(&request, LOST).unwrap(), &wanted, &request);
    }
    drop(opened);
    eventually(LOST, "its session is gone", || sessions(&service).len() == 1 && agents(&service).len() == 1);
}

/// Anybody who reaches an agent's port can connect to it. More connections than it may have cost the service nothing.
#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn strangers_who_connect_to_an_agent_harm_no_other_session() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let service = start(FAMILY, 1, &["--network-listen", &format!("127.0.0.1:{port}")]);
    let session = open(&service);
    let agent = agents(&service)[0];
    let descriptors = |pid: u32| std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let before = descriptors(service.pid());
    let mut strangers: Vec<TcpStream> = Vec::new();
    let mut rows = Rows::new(&golden(FAMILY), 8, 64);
    for number in 0..400 {
        strangers
            .extend(TcpStream::connect_timeout(&([127, 0, 0, 1], port).into(), Duration::from_secs(2)).ok());
        if number % 50 == 0 {
            let (request, wanted) = rows.draw();
            match session.forward(&request, LOST) {
                Ok(answer) => check(&answer, &wanted, &request),
                Err(error) => println!("after {number} connections: {error}"),
            }
        }
    }
    if alive(agent) {
        let held = descriptors(agent);
        println!("{} strangers, the agent has {held} descriptors", strangers.len());
        assert!(held <= 256, "the agent has {held} descriptors");
    }
    assert!(descriptors(service.pid()) <= before + 4, "strangers cost the service descriptors");
    for stranger in &mut strangers {
        stranger.set_nonblocking(true).unwrap();
        let _ = stranger.read(&mut [0; 64]);
    }
    drop(strangers);
    drop(session);
    eventually(LOST, "the session is gone", || sessions(&service).is_empty() && agents(&service).is_empty());
    let (request, wanted) = rows.draw();
    // The system keeps the port for a minute after the end of its connections.
    eventually(4 * LOST, "the port is free again", || {
        let Ok(session) = try_open(&service) else { return false };
        check(&session.forward(&request, LOST).unwrap(), &wanted, &request);
        true
    });
}
