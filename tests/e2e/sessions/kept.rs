//! What clients keep of a session after its end: descriptors, mappings, answers, the socket.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytemuck::Zeroable as _;
use expertd_client::session::{Call, DType, Session, SessionError, SessionOptions};
use expertd_session::socket;
use expertd_session::wire::{RegionLayout, RequestRecord, frame};
use expertd_shm::SharedRegion;
use expertd_shm::region::PAGE;
use expertd_shm::ring::RingProducer;
use rustix::process::Signal;

use super::hostile::{RawSession, raw};
use super::seen::value;
use super::{FAMILY, Host, LOST, Load, runtime};
use crate::reload::reload_to;
use crate::service::load::{Rows, check};
use crate::service::{eventually, fixture, golden, send};

/// Bytes of the row areas.
const ROWS_BYTES: u64 = 4 << 20;
/// Calls in flight when a session ends.
const CALLS: u32 = 8;

/// Bytes of the pages that a region has, whichever process maps it.
fn page_bytes(region: &SharedRegion) -> usize {
    rustix::fs::fstat(region).unwrap().st_blocks as usize * 512
}

/// Writes to every word of the row area.
fn write_rows(session: &RawSession) {
    let (offset, words) = (session.opened.rows_offset as usize, ROWS_BYTES as usize / 4);
    let rows = session.region.slice::<u32>(offset, words).unwrap();
    rows.atomics().iter().for_each(|word| word.store(0x3f80_0000, Ordering::Relaxed));
}

/// Pushes calls of `tokens` rows, and rings.
fn begin_calls(session: &RawSession, calls: u32, tokens: u32) {
    let layout = RegionLayout::new(session.opened.calls, session.opened.rows_bytes as usize).unwrap();
    let ring = layout.requests.memory(&session.region).unwrap();
    let mut requests = RingProducer::<RequestRecord>::new(ring).unwrap();
    let layer = Rows::new(&golden(FAMILY), 1, 1).layers()[0];
    for call in 0..u64::from(calls) {
        let output = (1 << 20) + call * (1 << 18);
        let record =
            RequestRecord { call, rows: 0, output, layer, tokens, dtype: 3, ..RequestRecord::zeroed() };
        assert!(requests.try_push(&record).unwrap());
    }
    let bell = session.region.slice::<u32>(layout.service_bell, 1).unwrap();
    bell.atomics()[0].fetch_add(2, Ordering::SeqCst);
    rustix::thread::futex::wake(&bell.atomics()[0], rustix::thread::futex::Flags::empty(), 1).unwrap();
}

/// Shared memory that a process maps and that has pages.
fn shared_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    1024 * line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
}

/// A client that keeps the descriptor and the mapping of every session that it ends, while other sessions get right answers: without
/// calls, with calls in flight, when a rank is killed, and during a reload.
#[test]
fn pages_of_ended_sessions_go_although_a_client_keeps_them() {
    let runtime = runtime();
    let host = Host::start(FAMILY, 3, &["--max-tokens-per-step", "64", "--max-queued-tokens", "65536"]);
    let load = Load::start(&host, 16);
    load.goes_on();
    host.in_place(&runtime);
    let charged = value(&host, "expertd_session_bytes", "");
    let before = shared_bytes(host.service.pid());
    let mut kept: Vec<Arc<SharedRegion>> = Vec::new();
    for round in 0..8 {
        let sessions: Vec<_> = (0..6).map(|_| raw(&host, CALLS, ROWS_BYTES)).collect();
        sessions.iter().for_each(write_rows);
        // Every other round ends while ranks still attach the memories.
        if round % 2 == 0 {
            host.in_place(&runtime);
        }
        if round >= 2 {
            sessions.iter().for_each(|session| begin_calls(session, CALLS, 64));
        }
        let ranks = host.service.ranks();
        match round {
            4 | 5 => send(ranks[round % 3], Signal::KILL),
            6 => drop(runtime.block_on(reload_to(&host.service, &fixture(FAMILY))).unwrap()),
            _ => {}
        }
        assert!(sessions.iter().all(|session| page_bytes(&session.region) == session.region.len()));
        kept.extend(sessions.into_iter().map(|session| session.region));
        if round == 4 || round == 5 {
            eventually(LOST, "the next generation serves", || {
                let now = host.service.ranks();
                now.len() == 3 && now.iter().all(|pid| !ranks.contains(pid))
            });
            load.goes_on();
        }
    }
    eventually(LOST, "no page is left", || kept.iter().all(|region| page_bytes(region) == 0));
    eventually(LOST, "nothing is charged", || value(&host, "expertd_session_bytes", "") == charged);
    let added = shared_bytes(host.service.pid()).saturating_sub(before);
    assert!(added < ROWS_BYTES, "{added} bytes of {} are left", kept.len() as u64 * ROWS_BYTES);
    // What the client touches now is its own: the service maps none of it.
    for region in &kept {
        let words = region.slice::<u32>(0, region.len() / 4).unwrap();
        assert!(words.atomics().iter().step_by(PAGE / 4).all(|word| word.load(Ordering::Relaxed) == 0));
    }
    let processes = [vec![host.service.pid()], host.service.ranks()].concat();
    for pid in processes {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        assert_eq!(maps.matches("memfd:expertd-session").count(), 2, "those of the load");
    }
    load.goes_on();
    assert!(load.stop().iter().max() >= Some(&4), "two ranks were killed, and one reload succeeded");
}

/// A session that the service ends keeps its memory, and counts, until its client closes the socket: the client may read answers.
#[test]
fn memory_stays_until_the_client_closes_the_socket() {
    let runtime = runtime();
    let host = Host::start(FAMILY, 3, &["--max-sessions", "2"]);
    let RawSession { opened, region, _socket: client } = raw(&host, CALLS, ROWS_BYTES);
    let rows = region.slice::<u32>(opened.rows_offset as usize, ROWS_BYTES as usize / 4).unwrap();
    rows.atomics().iter().for_each(|word| word.store(7, Ordering::Relaxed));
    let is_whole = || {
        page_bytes(&region) == region.len()
            && rows.atomics().iter().all(|word| word.load(Ordering::Relaxed) == 7)
    };
    host.in_place(&runtime);
    socket::send(&client, 77, &[]).unwrap();
    let (kind, _) = socket::receive(&client, 4096).unwrap().unwrap();
    assert_eq!(kind, frame::ENDED);
    eventually(LOST, "ranks detach the memory", || {
        host.service.ranks().iter().all(|pid| {
            !std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().contains("memfd:expertd-session")
        })
    });
    assert!(is_whole());
    client.shutdown(Shutdown::Write).unwrap();
    // A session that ends later is released; this one is not.
    let other = raw(&host, 1, PAGE as u64);
    let error = Session::open(&host.address, &super::patient()).unwrap_err().to_string();
    assert!(error.contains("2 sessions are open or ended"), "{error}");
    let later = Arc::clone(&other.region);
    drop(other);
    eventually(LOST, "the other session is released", || page_bytes(&later) == 0);
    assert!(is_whole());
    drop(client);
    eventually(LOST, "the memory is released", || page_bytes(&region) == 0);
    eventually(LOST, "nothing is charged", || value(&host, "expertd_session_bytes", "") == 0.0);
    eventually(LOST, "no session is open", || host.status(&runtime).sessions.is_empty());
}

/// Answers of the client library outlive the session.
#[test]
fn buffers_keep_their_bytes_after_the_session() {
    let runtime = runtime();
    let host = Host::start(FAMILY, 2, &[]);
    let session = Session::open(&host.address, &super::patient()).unwrap();
    let (request, wanted) = Rows::new(&golden(FAMILY), 3, 8).draw();
    let Some(expertd_proto::v1::forward_request::Payload::Inline(rows)) = &request.payload else {
        panic!("rows are inline")
    };
    let call = Call::new(request.layer, request.tokens as usize, DType::F32);
    let submit = || {
        let mut buffer = session.buffer(rows.len()).unwrap();
        buffer.as_mut_slice().copy_from_slice(rows);
        session.submit(&call, buffer, session.buffer(rows.len()).unwrap()).unwrap()
    };
    let (answer, forgotten, pending) = (submit().wait(LOST).unwrap(), submit(), submit());
    drop(forgotten);
    drop(session);
    let of_session = || host.status(&runtime).sessions;
    eventually(LOST, "ranks detach the memory", || {
        host.service.ranks().iter().all(|pid| {
            !std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().contains("memfd:expertd-session")
        })
    });
    let response =
        expertd_proto::v1::ForwardResponse { rows: answer.output.as_slice().to_vec().into(), receipt: None };
    check(&response, &wanted, &request);
    assert_eq!(of_session().len(), 1, "the session counts while buffers are left");
    // The step loop may have computed the call or given it up by then.
    let ended = pending.wait(LOST);
    assert!(
        matches!(ended, Ok(_) | Err(SessionError::Ended { .. } | SessionError::Status { code: 14, .. })),
        "{ended:?}"
    );
    drop(ended);
    assert_eq!((answer.rows.as_slice(), of_session().len()), (&rows[..], 1));
    drop(answer);
    eventually(LOST, "the memory is released", || of_session().is_empty());
}

/// Clients that connect, end their half of the socket and keep the other one have no session and no place.
#[test]
fn half_closed_sockets_hold_no_place() {
    let host = Host::start(FAMILY, 1, &[]);
    let sockets: Vec<_> = (0..64)
        .map(|_| {
            let socket = UnixStream::connect(host.path()).unwrap();
            socket.shutdown(Shutdown::Write).unwrap();
            socket
        })
        .collect();
    let small = SessionOptions { rows_bytes: PAGE, calls: 1, ..super::patient() };
    eventually(LOST, "a session opens", || Session::open(&host.address, &small).is_ok());
    drop(sockets);
}

/// Clients that ask for sessions while no step ends are refused in time, neither memory nor descriptors gather, and one that waits
/// longer gets its session.
#[test]
fn sessions_that_no_rank_attaches_are_released_although_no_step_ends() {
    let runtime = runtime();
    let timeouts = ["--liveness-timeout-ms", "600000", "--step-timeout-ms", "600000"];
    let host = Host::start(FAMILY, 2, &timeouts);
    let session = host.open();
    let stopped = host.service.ranks()[0];
    send(stopped, Signal::STOP);
    let (request, wanted) = Rows::new(&golden(FAMILY), 5, 8).draw();
    let waiting = std::thread::spawn(move || {
        check(&session.forward(&request, 5 * LOST).unwrap(), &wanted, &request);
        session
    });
    eventually(LOST, "a step is under way", || host.status(&runtime).requests_in_flight == 1);
    let (before, charged) = (host.descriptors(), value(&host, "expertd_session_bytes", ""));
    for _ in 0..2 {
        let opening: Vec<_> = (0..8)
            .map(|_| {
                let address = host.address.clone();
                let options = SessionOptions { timeout: Duration::from_secs(3), ..SessionOptions::default() };
                std::thread::spawn(move || Session::open(&address, &options).unwrap_err())
            })
            .collect();
        for thread in opening {
            let text = thread.join().unwrap().to_string();
            // On a busy machine the service's reason may come later than the client waits for it.
            let (reason, late) = ("have not attached the memory in time", "did not answer within 3s");
            assert!(text.contains(reason) || text.contains(late), "{text}");
        }
    }
    // The stopped rank has been told to attach one of them and does not answer.
    let one = 2 * SessionOptions::default().rows_bytes as u64 * 3;
    let held = || value(&host, "expertd_session_bytes", "") - charged;
    eventually(LOST, "the memory of one session at most is held", || held() <= one as f64);
    eventually(LOST, "the sockets are closed", || host.descriptors() <= before + 4);
    let address = host.address.clone();
    let patient = std::thread::spawn(move || {
        Session::open(&address, &SessionOptions { timeout: 5 * LOST, ..SessionOptions::default() })
    });
    // Longer than the service once waited by itself.
    std::thread::sleep(Duration::from_secs(9));
    assert_eq!(host.status(&runtime).requests_in_flight, 1, "the step has not ended");
    assert!(!patient.is_finished());
    send(stopped, Signal::CONT);
    drop(waiting.join().unwrap());
    drop(patient.join().unwrap().unwrap());
    eventually(LOST, "nothing is charged", || value(&host, "expertd_session_bytes", "") == 0.0);
    eventually(LOST, "no descriptor is left", || host.descriptors() <= before);
}

/// Sessions that end while their calls wait for a step that does not end: the calls leave the queue with their clients, and ranks give
/// the memory back when they go on.
#[test]
fn sessions_that_end_while_their_calls_wait_leave_nothing() {
    let runtime = runtime();
    let timeouts = ["--liveness-timeout-ms", "600000", "--step-timeout-ms", "600000"];
    let host = Host::start(FAMILY, 2, &timeouts);
    let (before, session) = (host.descriptors(), host.open());
    let charged = value(&host, "expertd_session_bytes", "");
    let leaving: Vec<_> = (0..4).map(|_| raw(&host, CALLS, ROWS_BYTES)).collect();
    let stopped = host.service.ranks()[0];
    send(stopped, Signal::STOP);
    let (request, wanted) = Rows::new(&golden(FAMILY), 5, 8).draw();
    let waiting = std::thread::spawn(move || {
        check(&session.forward(&request, 5 * LOST).unwrap(), &wanted, &request);
        session
    });
    eventually(LOST, "a step is under way", || host.status(&runtime).requests_in_flight == 1);
    leaving.iter().for_each(|session| begin_calls(session, CALLS, 8));
    let queued = || host.status(&runtime).requests_queued;
    eventually(LOST, "every call waits", || queued() == 4 * u64::from(CALLS));
    let kept: Vec<_> = leaving.into_iter().map(|session| session.region).collect();
    eventually(LOST, "the calls leave the queue", || queued() == 0);
    eventually(LOST, "the sessions give their places back", || host.status(&runtime).sessions.len() == 1);
    assert_eq!(host.status(&runtime).requests_in_flight, 1, "the step has not ended");
    send(stopped, Signal::CONT);
    let session = waiting.join().unwrap();
    eventually(LOST, "no page is left", || kept.iter().all(|region| page_bytes(region) == 0));
    eventually(LOST, "nothing is charged", || value(&host, "expertd_session_bytes", "") == charged);
    drop(session);
    eventually(LOST, "no descriptor is left", || host.descriptors() <= before);
}
