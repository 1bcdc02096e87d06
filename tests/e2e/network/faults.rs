//! Ends of agents, clients, ranks and services.

use std::net::{Shutdown, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use expertd_client::network;
use expertd_client::session::{SessionClient, SessionError};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open};

use super::{FAMILY, LOST, agents, library, open, options, sessions, start, try_open};
use crate::service::load::{Rows, check};
use crate::service::{alive, eventually, golden, send};

const ADDRESS: &str = "NETWORK_CLIENT_ADDRESS";
const SEED: &str = "NETWORK_CLIENT_SEED";

/// Not a test by itself: a client that calls until it is killed.
#[test]
#[ignore = "runs as a child process of another test"]
fn client() {
    let (Ok(address), Ok(seed)) = (std::env::var(ADDRESS), std::env::var(SEED)) else { return };
    let session = SessionClient::over(network::open(&address, &options(4 << 20)).unwrap()).unwrap();
    let mut rows = Rows::new(&golden(FAMILY), seed.parse().unwrap(), 200);
    loop {
        let (request, wanted) = rows.draw();
        check(&session.forward(&request, LOST).unwrap(), &wanted, &request);
    }
}

fn spawn_client(address: &str, seed: u64) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "network::faults::client", "--nocapture"])
        .env(ADDRESS, address)
        .env(SEED, seed.to_string())
        .env("EXPERTD_NIXL", library())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn ends_with_an_error(session: &SessionClient, what: &str) {
    let (request, _) = Rows::new(&golden(FAMILY), 3, 4).draw();
    eventually(LOST, what, || {
        let begun = Instant::now();
        let failed = session.forward(&request, Duration::from_secs(5)).is_err();
        assert!(begun.elapsed() < LOST, "a call outlives its deadline");
        failed
    });
}

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn the_end_of_an_agent_ends_its_session_and_no_other() {
    let service = start(FAMILY, 2, &[]);
    let (first, second) = (open(&service), open(&service));
    let of_first = sessions(&service)[0].pid;
    send(of_first, Signal::KILL);
    ends_with_an_error(&first, "calls of the killed agent fail");
    let (request, wanted) = Rows::new(&golden(FAMILY), 4, 64).draw();
    check(&second.forward(&request, LOST).unwrap(), &wanted, &request);
    eventually(LOST, "the session is released", || sessions(&service).len() == 1);
    let stopped = agents(&service);
    assert_eq!(stopped.len(), 1);
    send(stopped[0], Signal::STOP);
    let waited = second.forward(&request, Duration::from_secs(1)).unwrap_err();
    assert!(matches!(waited, SessionError::TimedOut { .. }), "{waited}");
    drop(second);
    eventually(LOST, "a stopped agent is killed", || !alive(stopped[0]) && sessions(&service).is_empty());
    check(&open(&service).forward(&request, LOST).unwrap(), &wanted, &request);
}

/// Clients that are killed at random times: 12 of them, or `EXPERTD_NETWORK_CLIENTS`. An honest client beside them gets right answers,
/// and nothing stays behind.
#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn clients_that_are_killed_leave_nothing_behind() {
    let clients: u64 = std::env::var("EXPERTD_NETWORK_CLIENTS").map_or(12, |text| text.parse().unwrap());
    let service = start(FAMILY, 2, &[]);
    let session = open(&service);
    let mut rows = Rows::new(&golden(FAMILY), 8, 64);
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", service.pid())).unwrap().count();
    let before = descriptors();
    for seed in 0..clients {
        let mut client = spawn_client(&service.address, seed);
        // From before its session is opened until many calls later.
        let until = Instant::now() + Duration::from_millis(seed * 137 % 1500);
        while Instant::now() < until {
            let (request, wanted) = rows.draw();
            check(&session.forward(&request, LOST).unwrap(), &wanted, &request);
        }
        if seed % 3 == 2 {
            send(client.id(), Signal::STOP);
            std::thread::sleep(Duration::from_millis(100));
        }
        client.kill().unwrap();
        client.wait().unwrap();
    }
    eventually(LOST, "sessions and agents are gone", || {
        sessions(&service).len() == 1 && agents(&service).len() == 1
    });
    eventually(LOST, "descriptors are closed", || descriptors() <= before + 2);
}

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn a_killed_rank_fails_no_call_and_a_killed_service_fails_all() {
    let mut service = start(FAMILY, 3, &[]);
    let session = open(&service);
    let mut rows = Rows::new(&golden(FAMILY), 8, 64);
    for rank in 0..3 {
        let ranks = service.ranks();
        send(ranks[rank], Signal::KILL);
        for _ in 0..10 {
            let (request, wanted) = rows.draw();
            check(&session.forward(&request, LOST).unwrap(), &wanted, &request);
        }
        eventually(LOST, "the next generation serves", || service.ranks().len() == 3);
    }
    let agent = agents(&service);
    service.signal(Signal::KILL);
    service.wait(LOST).unwrap();
    ends_with_an_error(&session, "calls of the killed service fail");
    eventually(LOST, "agents die with the service", || !agent.iter().any(|&pid| alive(pid)));
    assert!(try_open(&service).is_err());
}

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn a_drain_ends_sessions_with_a_reason() {
    let mut service = start(FAMILY, 2, &[]);
    let session = open(&service);
    let (request, wanted) = Rows::new(&golden(FAMILY), 8, 4).draw();
    check(&session.forward(&request, LOST).unwrap(), &wanted, &request);
    service.signal(Signal::TERM);
    assert_eq!(service.wait(LOST).expect("a drained service ends").code(), Some(0));
    eventually(LOST, "the session has ended", || {
        matches!(session.forward(&request, LOST), Err(SessionError::Ended { .. }))
    });
}

/// Shuts down the TCP connections of a process, as a middlebox does that resets them. Returns their number.
fn reset_connections(pid: u32) -> usize {
    let process = pidfd_open(Pid::from_raw(pid.cast_signed()).unwrap(), PidfdFlags::empty()).unwrap();
    let names = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|fd| fd.unwrap().file_name());
    let descriptors = names.filter_map(|name| name.to_str()?.parse().ok());
    let sockets = descriptors.filter_map(|fd| pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()).ok());
    let connections = sockets.map(TcpStream::from).filter(|socket| socket.peer_addr().is_ok());
    connections.map(|socket| socket.shutdown(Shutdown::Both).unwrap()).count()
}

/// The calls that opened the sessions live on.
#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn broken_data_connections_end_their_sessions_long_before_a_deadline() {
    let service = start(FAMILY, 1, &[]);
    let (calling, idle) = (open(&service), open(&service));
    let (request, wanted) = Rows::new(&golden(FAMILY), 4, 64).draw();
    for session in [&calling, &idle] {
        check(&session.forward(&request, LOST).unwrap(), &wanted, &request);
    }
    for agent in agents(&service) {
        assert!(reset_connections(agent) > 0, "agent {agent} has no connection");
    }
    let begun = Instant::now();
    let failed = calling.forward(&request, 2 * LOST);
    assert!(matches!(failed, Err(SessionError::Ended { .. })), "{failed:?}");
    assert!(begun.elapsed() < LOST, "the call failed after {:?}", begun.elapsed());
    eventually(LOST, "a session without calls ends", || {
        sessions(&service).is_empty() && agents(&service).is_empty()
    });
    assert!(matches!(idle.forward(&request, LOST), Err(SessionError::Ended { .. })));
}
