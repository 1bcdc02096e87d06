use std::os::fd::AsFd as _;

use expertd_shm::SharedRegion;
use expertd_shm::descriptors::send_fds;
use expertd_types::DType;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::memory::{ServiceRings, SessionMemory};

const SECOND: Duration = Duration::from_secs(10);

/// A session over a socketpair, with the service's end of its memory.
fn opened(calls: u32) -> (Session, Arc<SessionMemory>, ServiceRings, UnixStream) {
    let (client, service) = UnixStream::pair().unwrap();
    let (memory, rings) = SessionMemory::create(calls, 1 << 16).unwrap();
    let opened = memory.opened(1, 0, 8);
    socket::send(&service, frame::MODEL, b"model").unwrap();
    socket::send(&service, frame::OPENED, bytemuck::bytes_of(&opened)).unwrap();
    socket::send_region(&service, memory.region()).unwrap();
    let session = Session::over(client, "unix:/test", &SessionOptions::default()).unwrap();
    assert_eq!((session.model(), session.hidden()), (&b"model"[..], 8));
    (session, Arc::new(memory), rings, service)
}

/// Answers `calls` requests: the output is the rows with every bit inverted.
fn serve(memory: &SessionMemory, rings: &mut ServiceRings, calls: usize) {
    for _ in 0..calls {
        let policy = expertd_shm::WaitPolicy::within(Duration::ZERO, SECOND);
        let found = memory.service_bell().wait_for(policy, || rings.requests.try_pop().transpose());
        let record = found.unwrap().unwrap();
        let words = record.tokens as usize * 8;
        let rows = memory.copy_words(record.rows as usize, words).unwrap();
        let output: Vec<u8> = rows.iter().map(|byte| !byte).collect();
        memory.write_words(record.output as usize, &output).unwrap();
        let done = CompletionRecord { call: record.call, generation: 3, ..CompletionRecord::zeroed() };
        assert!(rings.completions.try_push(&done).unwrap());
        memory.client_bell().ring();
    }
}

#[test]
fn many_threads_share_a_session() {
    let (session, memory, mut rings, _socket) = opened(16);
    let (threads, each) = (4_usize, 200_usize);
    let service = std::thread::spawn(move || serve(&memory, &mut rings, threads * each * 2));
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let session = &session;
            scope.spawn(move || {
                for round in 0..each {
                    // Two in flight, waited for in the other order.
                    let pending = [1_usize, 2].map(|tokens| {
                        let mut rows = session.buffer(tokens * 32).unwrap();
                        rows.as_mut_slice().fill((thread * 64 + round + tokens) as u8);
                        let output = session.buffer(tokens * 32).unwrap();
                        session.submit(&Call::new(0, tokens, DType::F32), rows, output).unwrap()
                    });
                    for (pending, tokens) in pending.into_iter().zip([1_usize, 2]).rev() {
                        let answer = pending.wait(SECOND).unwrap();
                        assert_eq!(answer.receipt.generation, 3);
                        let expected = !((thread * 64 + round + tokens) as u8);
                        assert!(answer.output.as_slice().iter().all(|&byte| byte == expected));
                    }
                }
            });
        }
    });
    service.join().unwrap();
    assert_eq!(session.arena.lock().unwrap().largest(), 1 << 16, "all buffers came back");
}

#[test]
fn calls_are_bounded_in_number_and_time() {
    let (session, memory, mut rings, _socket) = opened(2);
    let submit = || {
        let (rows, output) = (session.buffer(32)?, session.buffer(32)?);
        session.submit(&Call::new(0, 1, DType::F32), rows, output)
    };
    let (first, second) = (submit().unwrap(), submit().unwrap());
    assert!(matches!(submit(), Err(SessionError::TooManyCalls { calls: 2 })));
    let late = first.wait(Duration::from_millis(1)).unwrap_err();
    assert!(matches!(late, SessionError::TimedOut { .. }), "{late}");
    drop(second);
    assert!(session.arena.lock().unwrap().largest() < 1 << 16, "calls in flight keep their buffers");
    serve(&memory, &mut rings, 2);
    let third = submit().unwrap();
    serve(&memory, &mut rings, 1);
    third.wait(SECOND).unwrap();
    assert_eq!(session.arena.lock().unwrap().largest(), 1 << 16);
}

#[test]
fn a_call_can_be_waited_for_again() {
    let (session, memory, mut rings, _socket) = opened(2);
    let (rows, output) = (session.buffer(32).unwrap(), session.buffer(32).unwrap());
    let mut pending = session.submit(&Call::new(0, 1, DType::F32), rows, output).unwrap();
    for _ in 0..3 {
        assert!(pending.try_wait(Duration::from_millis(1)).unwrap().is_none());
    }
    serve(&memory, &mut rings, 1);
    assert_eq!(pending.try_wait(SECOND).unwrap().unwrap().receipt.generation, 3);
    assert_eq!(session.arena.lock().unwrap().largest(), 1 << 16, "the answer's buffers came back");
}

#[test]
fn buffers_of_another_session_are_refused() {
    let (own, memory, mut rings, _socket) = opened(2);
    let (other, ..) = opened(2);
    let call = Call::new(0, 1, DType::F32);
    let error = own.submit(&call, other.buffer(32).unwrap(), own.buffer(32).unwrap()).unwrap_err();
    assert!(matches!(error, SessionError::ForeignBuffer { what: "rows" }), "{error}");
    let error = own.submit(&call, own.buffer(32).unwrap(), other.buffer(32).unwrap()).unwrap_err();
    assert!(matches!(error, SessionError::ForeignBuffer { what: "output" }), "{error}");
    let pending = own.submit(&call, own.buffer(32).unwrap(), own.buffer(32).unwrap()).unwrap();
    serve(&memory, &mut rings, 1);
    pending.wait(SECOND).unwrap();
}

/// The child only fails: it starts no call, takes no completion, and does not end the session of its parent.
#[test]
#[allow(unsafe_code, reason = "forks")]
fn a_fork_cannot_use_the_session() {
    let (session, memory, mut rings, _socket) = opened(4);
    let submit = || {
        let (rows, output) = (session.buffer(32)?, session.buffer(32)?);
        session.submit(&Call::new(0, 1, DType::F32), rows, output)
    };
    let mut pending = submit().unwrap();
    let buffers = (session.buffer(32).unwrap(), session.buffer(32).unwrap());
    serve(&memory, &mut rings, 1);
    // SAFETY: the child takes no lock, and ends without running anything of its parent's.
    match unsafe { libc::fork() } {
        0 => {
            let is_refused =
                |error: Option<SessionError>| matches!(error, Some(SessionError::OtherProcess { .. }));
            let call = Call::new(0, 1, DType::F32);
            let refusals = [
                session.buffer(32).err(),
                session.submit(&call, buffers.0, buffers.1).err(),
                pending.try_wait(SECOND).err(),
                session.wait_places(1, SECOND).err(),
            ];
            drop(pending);
            let failed = refusals.into_iter().position(|error| !is_refused(error));
            // SAFETY: ends the child.
            unsafe { libc::_exit(failed.map_or(0, |at| at as i32 + 1)) }
        }
        child => {
            let mut status = -1;
            // SAFETY: the argument is valid for writes.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(libc::WEXITSTATUS(status), 0, "the refusal that is missing");
        }
    }
    assert!(pending.try_wait(SECOND).unwrap().is_some());
    let pending = submit().unwrap();
    serve(&memory, &mut rings, 1);
    assert_eq!(pending.wait(SECOND).unwrap().receipt.generation, 3);
}

#[test]
#[allow(unsafe_code, reason = "chooses places")]
fn a_wait_for_no_call_is_an_error_at_once() {
    let (session, memory, mut rings, _socket) = opened(2);
    let submit = || {
        let record = RequestRecord { output: 64, tokens: 1, ..RequestRecord::zeroed() };
        // SAFETY: the session has no buffers.
        unsafe { session.submit_places(record) }.unwrap()
    };
    let is_missing = |call| matches!(session.wait_places(call, SECOND), Err(SessionError::NoSuchCall { .. }));
    assert!(is_missing(1));
    let (answered, forgotten) = (submit(), submit());
    session.forget_places(forgotten);
    assert!(is_missing(forgotten));
    serve(&memory, &mut rings, 2);
    assert_eq!(session.wait_places(answered, SECOND).unwrap().call, answered);
    assert!(is_missing(answered) && is_missing(forgotten));
    assert!(session.table.is_empty());
}

#[test]
fn lengths_that_do_not_fit_and_long_timeouts() {
    let (session, memory, mut rings, _socket) = opened(2);
    let submit =
        |call: &Call<'_>| session.submit(call, session.buffer(128).unwrap(), session.buffer(128).unwrap());
    let (ids, weights) = ([0; 3], [1.0; 3]);
    let given = |ids, weights| Call {
        routing: Some(GivenRouting { k: 1, ids, weights }),
        ..Call::new(0, 2, DType::F32)
    };
    for (ids, weights, what) in
        [(&ids[..], &weights[..2], "routing.ids"), (&ids[..2], &weights[..], "routing.weights")]
    {
        let error = submit(&given(ids, weights)).unwrap_err().to_string();
        assert!(error.contains(&format!("{what} has 12 bytes, but the call needs 8")), "{error}");
    }
    let error = submit(&Call { token_ids: Some(&ids), ..Call::new(0, 2, DType::F32) }).unwrap_err();
    assert!(error.to_string().contains("token_ids has 12 bytes"), "{error}");
    let pending = submit(&Call { timeout: Some(Duration::MAX), ..Call::new(0, 2, DType::F32) }).unwrap();
    let record = rings.requests.try_pop().unwrap().unwrap();
    assert_eq!(record.timeout_us, u64::MAX);
    let done = CompletionRecord { call: record.call, ..CompletionRecord::zeroed() };
    assert!(rings.completions.try_push(&done).unwrap());
    memory.client_bell().ring();
    pending.wait(Duration::MAX).unwrap();
    let options = SessionOptions { timeout: Duration::MAX, ..SessionOptions::default() };
    assert!(matches!(Session::open("unix:/nonexistent", &options), Err(SessionError::Socket { .. })));
}

#[test]
fn the_model_is_there_without_a_session() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let service = std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        let (kind, payload) = socket::receive(&socket, MAX_SERVICE_FRAME).unwrap().unwrap();
        assert_eq!((kind, payload.len()), (frame::GET_MODEL, 0));
        socket::send(&socket, frame::MODEL, b"model").unwrap();
        let (socket, _) = listener.accept().unwrap();
        socket::send(&socket, frame::REFUSED, b"user 7 may not").unwrap();
    });
    let address = format!("unix:{}", path.display());
    assert_eq!(super::fetch_model(&address, SECOND).unwrap(), b"model");
    let refused = super::fetch_model(&address, SECOND).unwrap_err().to_string();
    assert!(refused.contains("user 7 may not"), "{refused}");
    service.join().unwrap();
}

#[test]
fn statuses_and_small_buffers_are_errors() {
    let (session, memory, mut rings, _socket) = opened(2);
    let call = Call::new(0, 2, DType::F32);
    let error = session.submit(&call, session.buffer(64).unwrap(), session.buffer(63).unwrap()).unwrap_err();
    assert!(error.to_string().contains("output has 63 bytes, but the call needs 64"), "{error}");
    assert!(matches!(session.buffer(1 << 20), Err(SessionError::NoRoom { largest: 65536, .. })));
    let pending = session.submit(&call, session.buffer(64).unwrap(), session.buffer(64).unwrap()).unwrap();
    let record = rings.requests.try_pop().unwrap().unwrap();
    let failed = CompletionRecord::failed(record.call, 14, "no");
    rings.completions.try_push(&CompletionRecord { retry_after_ns: 5, ..failed }).unwrap();
    memory.client_bell().ring();
    match pending.wait(SECOND).unwrap_err() {
        SessionError::Status { code: 14, message, retry_after, .. } => {
            assert_eq!((message.as_str(), retry_after), ("no", Some(Duration::from_nanos(5))));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn the_services_end_frees_waiting_threads() {
    let (session, _memory, _rings, socket) = opened(4);
    let submit = || {
        let (rows, output) = (session.buffer(32).unwrap(), session.buffer(32).unwrap());
        session.submit(&Call::new(0, 1, DType::F32), rows, output)
    };
    let pending = [submit().unwrap(), submit().unwrap()];
    std::thread::scope(|scope| {
        let waiting = pending.map(|call| scope.spawn(move || call.wait(Duration::from_secs(600))));
        socket::send(&socket, frame::ENDED, b"the service drains").unwrap();
        drop(socket);
        for waiting in waiting {
            let error = waiting.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("the service drains"), "{error}");
        }
    });
    assert!(matches!(submit(), Err(SessionError::Ended { .. })));
}

#[test]
fn foreign_small_and_unsealed_descriptors_are_refused() {
    let open = |send: &dyn Fn(&UnixStream, &SessionMemory)| {
        let (client, service) = UnixStream::pair().unwrap();
        let (memory, _) = SessionMemory::create(4, 4096).unwrap();
        socket::send(&service, frame::MODEL, b"").unwrap();
        socket::send(&service, frame::OPENED, bytemuck::bytes_of(&memory.opened(1, 0, 8))).unwrap();
        send(&service, &memory);
        Session::over(client, "unix:/test", &SessionOptions::default()).unwrap_err().to_string()
    };
    let small = SharedRegion::create("small", 4096).unwrap();
    let error = open(&|socket, _| send_fds(socket, &[small.as_fd()]).unwrap());
    assert!(error.contains("has 4096 bytes, expected"), "{error}");
    let error = open(&|socket, memory| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(memory.region().len() as u64).unwrap();
        send_fds(socket, &[file.as_fd()]).unwrap();
    });
    assert!(error.contains("cannot be used"), "{error}");
    let error = open(&|socket, memory| {
        let fd = memory.region().as_fd();
        send_fds(socket, &[fd, fd]).unwrap();
    });
    assert!(error.contains("2 descriptors"), "{error}");
}

#[test]
fn a_refusal_reaches_the_caller() {
    let (client, service) = UnixStream::pair().unwrap();
    socket::send(&service, frame::REFUSED, b"version 9 is not served").unwrap();
    let error = Session::over(client, "unix:/test", &SessionOptions::default()).unwrap_err();
    assert!(matches!(error, SessionError::Refused { .. }), "{error}");
    let error = Session::open("127.0.0.1:1", &SessionOptions::default()).unwrap_err();
    assert!(error.to_string().contains("unix:PATH"), "{error}");
}

#[test]
fn a_refusal_is_read_although_the_service_has_closed_the_socket() {
    let (client, service) = UnixStream::pair().unwrap();
    socket::send(&service, frame::REFUSED, b"not you").unwrap();
    drop(service);
    let error = Session::over(client, "unix:/test", &SessionOptions::default()).unwrap_err();
    assert!(matches!(&error, SessionError::Refused { reason } if reason == "not you"), "{error}");
}

/// Whether the client has ended its half of the socket, and whether it has closed the socket.
fn ends(service: &UnixStream) -> (bool, bool) {
    let mut polled = [PollFd::new(service, PollFlags::RDHUP)];
    poll(&mut polled, Some(&Timespec::default())).unwrap();
    (polled[0].revents().contains(PollFlags::RDHUP), polled[0].revents().contains(PollFlags::HUP))
}

#[test]
fn the_socket_is_closed_with_the_last_buffer() {
    let (session, memory, mut rings, service) = opened(8);
    let submit = |session: &Session| {
        let (rows, output) = (session.buffer(32).unwrap(), session.buffer(32).unwrap());
        session.submit(&Call::new(0, 1, DType::F32), rows, output).unwrap()
    };
    let (answered, abandoned, waiting, pending) =
        (submit(&session), submit(&session), submit(&session), submit(&session));
    serve(&memory, &mut rings, 1);
    let answer = answered.wait(SECOND).unwrap();
    drop(abandoned);
    assert_eq!(ends(&service), (false, false));
    drop(session);
    assert_eq!(ends(&service), (true, false), "the session has ended, and its memory is used");
    assert!(matches!(waiting.wait(SECOND), Err(SessionError::Ended { .. })));
    drop(answer.rows);
    assert!(answer.output.as_slice().iter().all(|byte| *byte == 0xff), "inverted zeros");
    drop(answer.output);
    assert_eq!(ends(&service), (true, false), "a call is left");
    drop(pending);
    assert_eq!(ends(&service), (true, true));

    let (session, _memory, _rings, service) = opened(2);
    let abandoned = submit(&session);
    drop(abandoned);
    drop(session);
    assert_eq!(ends(&service), (true, true), "nothing is left of a session without answers");
}
