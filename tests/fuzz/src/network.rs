//! What the two ends of a network session, and the router and an agent, read of each other.

use std::collections::HashMap;
use std::io::Write as _;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use expertd_agent::control;
use expertd_network::wire::Places;
use expertd_network::{Card, Transports, accept_completion, accept_request};
use expertd_proto::v1::{NetworkSessionRequest, NetworkSessionResponse};
use expertd_sessions::NetworkRequest;
use expertd_shm::SharedRegion;
use expertd_shm::region::SharedSlice;
use prost::Message as _;

/// Calls in flight of the session under test.
const CALLS: u32 = 4;
/// Bytes of its row area.
const ROWS: usize = 8 << 10;
/// Elements of a row.
const HIDDEN: usize = 4;

static AREA: LazyLock<SharedSlice<u8>> = LazyLock::new(|| {
    let region = SharedRegion::create("rows", ROWS).expect("memory");
    region.slice(0, ROWS).expect("the whole region")
});

/// Messages of a client and of an agent, each behind its length (u16) and one byte that says which end reads it: bytes are stored at places
/// of the call and nowhere else, and no more calls are in flight than the session allows.
pub fn messages(data: &[u8]) {
    accepted(data);
}

/// The number of messages that are taken.
pub fn accepted(data: &[u8]) -> usize {
    let rows = &*AREA;
    let places = Places { hidden: HIDDEN, rows_bytes: ROWS };
    let mut calls = HashMap::new();
    let (mut rest, mut count) = (data, 0);
    while let Some((&[low, high, end], behind)) = rest.split_first_chunk::<3>() {
        let bytes = usize::from(u16::from_le_bytes([low, high]));
        let Some((message, others)) = behind.split_at_checked(bytes) else { break };
        rest = others;
        rows.store_bytes(0, &[0xa5; ROWS]);
        let known = calls.clone();
        let written = if end == 0 {
            match accept_request(message, rows, &places, &mut calls, CALLS) {
                Ok(Some(request)) => {
                    assert!(!known.contains_key(&request.call) && calls.len() == known.len() + 1);
                    places.of_request(&request)
                }
                Ok(None) => None,
                Err(_) => break,
            }
        } else {
            match accept_completion(message, rows, &places, &mut calls) {
                Ok(Some(completion)) => places.of_answer(&known[&completion.call]),
                Ok(None) => None,
                Err(_) => break,
            }
        };
        assert!(calls.len() <= CALLS as usize, "{} calls in flight", calls.len());
        let mut found = [0; ROWS];
        rows.load_bytes(0, &mut found);
        for place in written.into_iter().flatten() {
            assert!(place.is_within(ROWS), "{place:?}");
            found[place.start..place.start + place.bytes].fill(0xa5);
        }
        assert!(found.iter().all(|&byte| byte == 0xa5), "bytes outside of the call's places");
        count += 1;
    }
    count
}

/// The messages of the call that opens a session, and what an agent is told of one that passes the checks.
pub fn handshake(data: &[u8]) {
    let _ = NetworkSessionResponse::decode(data);
    let Ok(NetworkSessionRequest { open: Some(open) }) = NetworkSessionRequest::decode(data) else { return };
    let client = Card { metadata: open.metadata.to_vec(), rows_address: open.rows_address };
    let (rows_bytes, calls) = (open.rows_bytes, open.calls);
    let asked = NetworkRequest { version: open.version, card: client.clone(), rows_bytes, calls };
    if !expertd_sessions::fuzzing::accepts(&asked) {
        return;
    }
    assert!(calls.is_power_of_two() && calls <= 1024 && rows_bytes > 0 && rows_bytes % 4096 == 0);
    let (router, agent) = UnixStream::pair().expect("sockets");
    let (session, _service) = UnixStream::pair().expect("sockets");
    let transports =
        Transports { transports: Some("^sm".into()), device: None, ports: Some((1, 2)), ipv6: true };
    let setup = control::Setup { client, rows_bytes, calls, transports, library: None };
    control::send_setup(&router, &setup, &session).expect("room in the socket");
    assert_eq!(control::receive_setup(&agent).expect("the same setup").0, setup);
}

/// The frames of an agent that its client controls, and those of a router.
pub fn control(data: &[u8]) {
    let written = || {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        theirs.write_all(data).expect("room in the socket");
        let _ = theirs.shutdown(Shutdown::Write);
        (ours, theirs)
    };
    let (router, _agent) = written();
    let _ = control::receive_ready(&router, Instant::now() + Duration::from_secs(5));
    let _ = control::receive_ended(&router);
    let (agent, _router) = written();
    let _ = control::receive_setup(&agent);
}
