//! Clients that lead an agent to a peer which never answers, and strangers who connect and wait.

use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use expertd_network::wire::VERSION;
use expertd_network::{Endpoint, Library, Transports};
use expertd_proto::v1::OpenNetworkSession;
use expertd_shm::SharedRegion;

use super::hostile::{ROWS, open_call};
use super::{FAMILY, LOST, agents, library, open, runtime, sessions, start, try_open, two_ports};
use crate::service::load::{Rows, check};
use crate::service::{alive, eventually, golden};

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
    let rows = SharedRegion::create("rows", ROWS).unwrap().slice(0, ROWS).unwrap();
    let found = (0..20).find_map(|_| {
        let own = two_ports();
        let transports = Transports {
            transports: Some("^sm".into()),
            device: Some("lo".into()),
            ports: Some((own, own)),
            ..Transports::default()
        };
        let endpoint = Endpoint::new(&library, "lies", &transports, rows.clone()).unwrap();
        let card = endpoint.card().unwrap();
        let is_port = |pair: &[u8]| pair == own.to_be_bytes();
        let places = card.metadata.windows(2).enumerate().filter(|(_, pair)| is_port(pair));
        let places: Vec<usize> = places.map(|(at, _)| at).collect();
        assert!(!places.is_empty(), "the metadata has no port");
        // Some ports look like other bytes of the metadata.
        (places.len() == 1).then_some((endpoint, card, places[0]))
    });
    let (_endpoint, card, place) = found.unwrap();
    let mut metadata = card.metadata;
    metadata[place..place + 2].copy_from_slice(&silent.local_addr().unwrap().port().to_be_bytes());
    let open = OpenNetworkSession {
        version: VERSION,
        metadata: metadata.into(),
        rows_address: card.rows_address,
        rows_bytes: ROWS as u64,
        calls: 8,
    };
    let begun = Instant::now();
    let opened = open_call(&runtime, &service, open);
    assert!(begun.elapsed() < LOST, "opening took {:?}", begun.elapsed());
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
    let port = two_ports();
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
