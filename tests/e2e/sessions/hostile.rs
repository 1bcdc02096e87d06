//! Clients that die or scribble, and clients that are refused.

use std::io::{ErrorKind, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use expertd_client::session::{Call, DType, Session, SessionError, SessionOptions};
use expertd_session::socket;
use expertd_session::wire::{Open, Opened, RequestRecord, VERSION, frame};
use expertd_shm::SharedRegion;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::{FAMILY, Host, LOST, Load, runtime};
use crate::service::load::Rows;
use crate::service::{eventually, golden};

/// Names the session socket to the process that is killed.
const VICTIM: &str = "SESSION_VICTIM_SOCKET";

/// Not a test by itself: the client process that `killed_clients_leave_nothing_behind` kills.
#[test]
#[ignore = "runs as a child process of another test"]
fn victim() {
    let Ok(address) = std::env::var(VICTIM) else { return };
    let mut rows = Rows::new(&golden(FAMILY), 99, 64);
    loop {
        let session = Session::open(&address, &super::patient()).unwrap();
        for _ in 0..5 {
            let calls: Vec<_> = (0..3)
                .map(|_| {
                    let (request, _) = rows.draw();
                    let bytes = request.tokens as usize * session.hidden() * 4;
                    let call = Call::new(request.layer, request.tokens as usize, DType::F32);
                    session
                        .submit(&call, session.buffer(bytes).unwrap(), session.buffer(bytes).unwrap())
                        .unwrap()
                })
                .collect();
            for call in calls {
                call.wait(LOST).unwrap();
            }
        }
    }
}

#[test]
fn killed_clients_leave_nothing_behind() {
    let runtime = runtime();
    let host = Host::start(FAMILY, 2, &[]);
    let load = Load::start(&host, 64);
    load.goes_on();
    let descriptors = host.descriptors();
    let mut rng = SmallRng::seed_from_u64(expertd_test_seed::seed());
    for _ in 0..40 {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sessions::hostile::victim", "--ignored", "--nocapture"])
            .env(VICTIM, &host.address)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(rng.random_range(1_000..60_000)));
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
    load.goes_on();
    eventually(LOST, "only the sessions of the load are open", || host.status(&runtime).sessions.len() == 2);
    eventually(LOST, "no descriptor is left", || host.descriptors() <= descriptors);
    let status = host.status(&runtime);
    assert_eq!(status.generation, 1, "no generation ended");
    load.stop();
    eventually(LOST, "no session is open", || host.status(&runtime).sessions.is_empty());
}

/// A session whose memory the test writes itself.
pub(super) struct RawSession {
    pub(super) opened: Opened,
    pub(super) region: Arc<SharedRegion>,
    pub(super) _socket: UnixStream,
}

pub(super) fn raw(host: &Host, calls: u32, rows_bytes: u64) -> RawSession {
    let stream = UnixStream::connect(host.path()).unwrap();
    let open = Open { version: VERSION, kind: 1, rows_bytes, calls, reserved: 0 };
    socket::send(&stream, frame::OPEN, bytemuck::bytes_of(&open)).unwrap();
    let (kind, payload) = socket::receive(&stream, 1 << 20).unwrap().unwrap();
    assert_eq!(kind, frame::OPENED, "{}", String::from_utf8_lossy(&payload));
    RawSession::join(socket::record(&payload).unwrap(), stream)
}

impl RawSession {
    /// The session that the service has opened on `socket`.
    pub(super) fn join(opened: Opened, socket: UnixStream) -> RawSession {
        let fd = socket::receive_region(&socket).unwrap();
        let region = SharedRegion::from_fd(fd, opened.region_bytes as usize).unwrap();
        RawSession { opened, region, _socket: socket }
    }
}

#[test]
fn scribbling_clients_harm_nobody() {
    let runtime = runtime();
    let host = Host::start(FAMILY, 2, &[]);
    let load = Load::start(&host, 64);
    let hidden = host.open().session().hidden();
    load.goes_on();
    let begun = Instant::now();
    let (mut rng, mut sessions) = (SmallRng::seed_from_u64(expertd_test_seed::seed()), 0);
    let layer = Rows::new(&golden(FAMILY), 1, 1).layers()[0];
    while begun.elapsed() < Duration::from_secs(10) || sessions <= 10 {
        assert!(begun.elapsed() < 5 * LOST, "{sessions} sessions");
        let session = raw(&host, 16, 1 << 16);
        host.in_place(&runtime);
        let control = session.region.slice::<u64>(0, session.opened.rows_offset as usize / 8).unwrap();
        let rows = session
            .region
            .slice::<u32>(session.opened.rows_offset as usize, session.opened.rows_bytes as usize / 4)
            .unwrap();
        let bell = session.region.slice::<u32>(session.opened.service_bell_offset as usize, 1).unwrap();
        let words = size_of::<RequestRecord>() / 8;
        let random = sessions % 2 == 1;
        sessions += 1;
        for n in 0..200_u64 {
            // Requests that are mostly valid, with given routing, so that steps read memory that changes meanwhile.
            let tokens = rng.random_range(1..9);
            let mut record = RequestRecord {
                call: n,
                rows: 64 * rng.random_range(0..8),
                output: 32768 + (n % 8) * 4096,
                ids: 16384,
                weights: 16384 + 2048,
                token_ids: 0,
                weight_version: 0,
                timeout_us: rng.random_range(0..3) * 500,
                layer,
                tokens,
                dtype: rng.random_range(1..4),
                k: 0,
                flags: rng.random_range(0..4),
                reserved: 0,
            };
            assert!(tokens as usize * hidden * 4 <= 4096, "outputs do not overlap");
            if random {
                let bytes = bytemuck::bytes_of_mut(&mut record);
                let at = rng.random_range(0..bytes.len());
                bytes[at] = rng.random();
            }
            let cell = 16 + (n % 16) as usize * (words + 1);
            for (at, word) in bytemuck::cast_slice::<u8, u64>(bytemuck::bytes_of(&record)).iter().enumerate()
            {
                control.atomics()[cell + at].store(*word, Ordering::Relaxed);
            }
            control.atomics()[cell + words].store(n + 1, Ordering::Relaxed);
            control.atomics()[0].store(n + 1, Ordering::Release);
            // All completions count as read.
            let completions = session.opened.completions_offset as usize / 8;
            let pushed = control.atomics()[completions].load(Ordering::Acquire);
            control.atomics()[completions + 8].store(pushed, Ordering::Release);
            bell.atomics()[0].fetch_add(2, Ordering::SeqCst);
            let _ = rustix::thread::futex::wake(
                &bell.atomics()[0],
                rustix::thread::futex::Flags::empty(),
                u32::MAX >> 1,
            );
            for _ in 0..200 {
                rows.atomics()[rng.random_range(0..rows.len())].store(rng.random(), Ordering::Relaxed);
            }
            if random && rng.random_range(0..50) == 0 {
                control.atomics()[rng.random_range(0..control.len())].store(rng.random(), Ordering::Relaxed);
            }
        }
    }
    load.goes_on();
    let status = host.status(&runtime);
    assert_eq!(status.generation, 1, "no generation ended: {}", status.reason);
    load.stop();
    eventually(LOST, "no session is open", || host.status(&runtime).sessions.is_empty());
}

#[test]
fn refusals_say_why() {
    let host = Host::start(FAMILY, 2, &["--max-sessions", "2", "--max-session-bytes", "100000000"]);
    let refused = |kind: u32, payload: &[u8]| {
        let stream = UnixStream::connect(host.path()).unwrap();
        socket::send(&stream, kind, payload).unwrap();
        let (kind, text) = socket::receive(&stream, 1 << 20).unwrap().unwrap();
        assert_eq!(kind, frame::REFUSED);
        String::from_utf8(text).unwrap()
    };
    let open = Open { version: VERSION, kind: 1, rows_bytes: 4096, calls: 4, reserved: 0 };
    let with = |open: Open| refused(frame::OPEN, bytemuck::bytes_of(&open));
    // The client of an earlier release.
    let old = with(Open { version: VERSION - 1, ..open });
    let (client, service) =
        (format!("speaks version {}", VERSION - 1), format!("this service version {VERSION};"));
    assert!(old.contains(&client) && old.contains(&service) && old.contains("the same release"), "{old}");
    assert!(with(Open { version: 9, ..open }).contains("version 9"));
    assert!(with(Open { reserved: 7, ..open }).contains("ends with 7, expected 0"));
    assert!(refused(frame::OPEN, &[0; 300]).contains("announces 300 bytes; at most 256 fit"));
    let short = refused(frame::OPEN, &bytemuck::bytes_of(&open)[..20]);
    assert!(short.contains("a frame has 20 bytes, expected 24"), "{short}");
    assert!(with(Open { kind: 7, ..open }).contains("kind 7"));
    assert!(with(Open { calls: 0, ..open }).contains("0 calls"));
    assert!(with(Open { rows_bytes: 1 << 30, ..open }).contains("max-session-bytes"));
    assert!(with(Open { rows_bytes: u64::MAX - 5, ..open }).contains("address space"));
    assert!(refused(frame::OPEN, b"").contains("version none"));
    assert!(refused(77, b"").contains("kind 77"));
    // An open session has no other frames than GET_MODEL, and ends with a reason.
    for (kind, bytes, wanted) in
        [(frame::OPEN, 24, "kind 1 on the socket of an open session"), (77, 300, "announces 300 bytes")]
    {
        let session = raw(&host, 1, 1 << 12);
        socket::send(&session._socket, kind, &vec![0; bytes]).unwrap();
        let (kind, text) = socket::receive(&session._socket, 1 << 20).unwrap().unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(kind == frame::ENDED && text.contains(wanted), "{kind}: {text}");
    }
    let small = SessionOptions { rows_bytes: 1 << 16, ..super::patient() };
    let mut sessions = Vec::new();
    eventually(LOST, "places of ended sessions are free", || {
        let opened = (0..2).map(|_| Session::open(&host.address, &small)).collect::<Result<Vec<_>, _>>();
        opened.map(|opened| sessions = opened).is_ok()
    });
    let error = Session::open(&host.address, &small).unwrap_err();
    assert!(error.to_string().contains("max-sessions"), "{error}");
    drop(sessions);
    // Descriptors that a client sends are not taken.
    let stream = UnixStream::connect(host.path()).unwrap();
    let file = tempfile::tempfile().unwrap();
    // Linux 6.16 and newer refuse them.
    let _ = expertd_shm::descriptors::send_fds(&stream, &[file.as_fd()]);
    drop(stream);
    let before = host.descriptors();
    eventually(LOST, "the next session opens", || Session::open(&host.address, &small).is_ok());
    eventually(LOST, "no descriptor is left", || host.descriptors() <= before);

    let other = Host::start(FAMILY, 1, &["--session-allow-uid", "4242"]);
    let error = Session::open(&other.address, &small).unwrap_err();
    let own = rustix::process::geteuid().as_raw();
    assert!(error.to_string().contains(&format!("user {own} may not open sessions")), "{error}");
    assert!(matches!(error, SessionError::Refused { .. }), "{error}");
}

#[test]
fn as_many_sessions_as_allowed_open_beside_clients_that_never_open_one() {
    let runtime = runtime();
    let host = Host::start(FAMILY, 1, &["--max-sessions", "40"]);
    let small = SessionOptions { rows_bytes: 1 << 12, calls: 1, ..super::patient() };
    // Half an OPEN frame, and nothing at all.
    let mut half_open: Vec<_> = (0..12).map(|_| UnixStream::connect(host.path()).unwrap()).collect();
    half_open.iter_mut().step_by(2).for_each(|socket| socket.write_all(&[1, 0, 0]).unwrap());
    let sessions: Vec<_> = (0..40).map(|_| Session::open(&host.address, &small).unwrap()).collect();
    assert_eq!(host.status(&runtime).sessions.len(), 40);
    drop(sessions);
    // As many as may be connected without a session. The service counts each a moment after it has connected.
    eventually(LOST, "no more clients may be connected without a session", || {
        half_open.push(UnixStream::connect(host.path()).unwrap());
        let refused = Session::open(&host.address, &small).err().map(|error| error.to_string());
        refused.is_some_and(|text| text.contains("connected without a session"))
    });
    // They are turned away although each keeps sending.
    let over = Arc::new(AtomicBool::new(false));
    let of_sender = Arc::clone(&over);
    let sender = std::thread::spawn(move || {
        while !of_sender.load(Ordering::Relaxed) {
            half_open.retain_mut(|socket| socket.write_all(&[0]).is_ok());
            std::thread::sleep(Duration::from_secs(2));
        }
    });
    eventually(LOST, "sessions open again", || Session::open(&host.address, &small).is_ok());
    over.store(true, Ordering::Relaxed);
    sender.join().unwrap();
}

#[test]
fn floods_of_descriptors_are_not_taken() {
    let host = Host::start(FAMILY, 1, &[]);
    let small = SessionOptions { rows_bytes: 1 << 12, calls: 1, ..super::patient() };
    let before = host.descriptors();
    let file = tempfile::tempfile().unwrap();
    let session = raw(&host, 1, 1 << 12);
    let (mut sent, mut refused) = (0, 0);
    for _ in 0..100 {
        let opening = UnixStream::connect(host.path()).unwrap();
        for socket in [&session._socket, &opening] {
            match expertd_shm::descriptors::send_fds(socket, &[file.as_fd(); 8]) {
                Ok(()) => sent += 1,
                // By the kernel, from Linux 6.16 on.
                Err(error) if error.kind() == ErrorKind::PermissionDenied => refused += 1,
                Err(_) => {}
            }
        }
        // Sockets of 16 clients that open sessions and of 64 that are turned away may be open at a time.
        assert!(host.descriptors() <= before + 100, "the service took descriptors");
    }
    assert!(sent + refused > 50, "{sent} messages with descriptors were sent, {refused} were refused");
    drop(session);
    eventually(LOST, "sessions open", || Session::open(&host.address, &small).is_ok());
    eventually(LOST, "no descriptor is left", || host.descriptors() <= before);
}
