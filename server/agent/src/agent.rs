//! The service's end of a network session: a process of its own, which maps one session's memory and holds no secrets.
//!
//! Over TCP, UCX writes where a packet says, so that a peer controls this process. It can do what any client of a host session can do to
//! its own session; [`confine`] keeps it from everything else that the service's user may do.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use expertd_session::wire::{MAX_SERVICE_FRAME, frame};
use expertd_session::{SessionOptions, SessionParts, socket};
use expertd_shm::WaitPolicy;
use expertd_shm::wait::spin_between_steps;

use crate::confine::{confine, limit};
use crate::control::{self, Ready, Setup};
use crate::files::confine_files;
use expertd_network::{
    Endpoint, LONG_PAUSE, Library, NetworkError, Relay, Spin, Waiting, accept_request, is_coming, random_name,
};

/// How long the service may take to open the session.
const OPENING: Duration = Duration::from_secs(10);

/// Serves one client until its session, or the router, has ended. The error is the sentence that the router is told.
///
/// # Errors
/// Why the session cannot be opened or has ended.
pub fn run_agent(control: &UnixStream) -> Result<(), NetworkError> {
    let (setup, session) = control::receive_setup(control)?;
    let served = serve(control, &setup, session);
    if let Err(error) = &served {
        control::send_ended(control, &error.to_string());
    }
    served
}

fn serve(control: &UnixStream, setup: &Setup, session: UnixStream) -> Result<(), NetworkError> {
    // Before any thread is started.
    confine_files(&Library::folders(setup.library.as_deref()))?;
    let library = Library::open(setup.library.as_deref())?;
    let rows_bytes = usize::try_from(setup.rows_bytes).unwrap_or(usize::MAX);
    let options = SessionOptions { rows_bytes, calls: setup.calls, spin: None, timeout: OPENING };
    let mut session = SessionParts::open(session, "of the agent", &options)?;
    if session.rows.len() != rows_bytes || session.opened.calls != setup.calls {
        return Err(NetworkError::Protocol("a session of another size than its client's".to_owned()));
    }
    let mut endpoint =
        Endpoint::new(&library, &random_name("agent"), &setup.transports, session.rows.clone())?;
    let ready = Ready {
        card: endpoint.card()?,
        session: session.opened.session,
        hidden: session.opened.hidden,
        spin_us: session.opened.spin_us,
    };
    end_with_sockets(control.try_clone()?, session.socket.try_clone()?)?;
    limit()?;
    confine()?;
    // From here on the client has a say: its metadata is read, and it can reach this process.
    endpoint.connect(&setup.client)?;
    control::send_ready(control, &ready)?;
    let mut relay = Relay::new(endpoint, session.opened.hidden);
    let computing = Duration::from_micros(session.opened.spin_us.into());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut waiting = Waiting::new(Spin { computing, between: spin_between_steps(computing, cores) });
    loop {
        let mut worked = take_requests(&mut relay, &mut session)?;
        while let Some(completion) = session.completions.try_pop()? {
            answer(&mut relay, &completion)?;
            worked = true;
        }
        if worked {
            waiting.restart();
            continue;
        }
        let is_computing = !relay.calls.is_empty();
        let Some(mut pause) = waiting.pause(relay.is_moving(), is_computing) else { continue };
        if is_computing {
            // The bell wakes this thread for the completion, and the ranks need the cores.
            pause = pause.max(LONG_PAUSE);
        }
        let policy = WaitPolicy::within(Duration::ZERO, pause);
        let completions = &mut session.completions;
        if let Ok(completion) = session.client_bell.wait_for(policy, || completions.try_pop().transpose()) {
            answer(&mut relay, &completion?)?;
            waiting.restart();
        }
    }
}

/// Sends a completion, with the output of a call that was computed.
fn answer(
    relay: &mut Relay,
    completion: &expertd_session::wire::CompletionRecord,
) -> Result<(), NetworkError> {
    // The service answers calls that it was sent, each once.
    let Some(request) = relay.calls.remove(&completion.call) else { return Ok(()) };
    // The places were looked at when the request came.
    let places = if completion.code == 0 { relay.places.of_answer(&request) } else { None };
    relay.send(completion, &places.unwrap_or_default())
}

/// Passes the requests that have arrived to the service. Returns whether anything has.
fn take_requests(relay: &mut Relay, session: &mut SessionParts) -> Result<bool, NetworkError> {
    let Relay { endpoint, places, calls, is_receiving, .. } = relay;
    let SessionParts { opened, rows, requests, .. } = session;
    let (mut count, mut is_event) = (0, false);
    endpoint.poll(|message| {
        *is_receiving = is_coming(message);
        is_event |= *is_receiving;
        if *is_receiving {
            return Ok(());
        }
        // A message that asks nothing is no reason to expect another one soon.
        let Some(request) = accept_request(message, rows, places, calls, opened.calls)? else {
            return Ok(());
        };
        is_event = true;
        if !requests.try_push(&request)? {
            return Err(NetworkError::Protocol("more calls than the session allows".to_owned()));
        }
        count += 1;
        Ok(())
    })?;
    if count > 0 {
        session.service_bell.ring();
    }
    Ok(is_event)
}

/// Starts threads that end this process with the router or the session, whatever the transport does meanwhile.
fn end_with_sockets(control: UnixStream, session: UnixStream) -> Result<(), NetworkError> {
    let of_router = control.try_clone()?;
    std::thread::Builder::new().name("router".to_owned()).spawn(move || {
        while let Ok(Some(_)) = socket::receive(&of_router, 0) {}
        leave();
    })?;
    std::thread::Builder::new().name("session".to_owned()).spawn(move || {
        loop {
            match socket::receive(&session, MAX_SERVICE_FRAME) {
                Ok(Some((frame::ENDED, text))) => {
                    control::send_ended(&control, &String::from_utf8_lossy(&text));
                    leave();
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => {
                    control::send_ended(&control, "the service has closed the session's socket");
                    leave();
                }
            }
        }
    })?;
    Ok(())
}

/// Ends the process at once, without the exit handlers of UCX, which other threads are using.
#[allow(unsafe_code, reason = "ends the process")]
fn leave() -> ! {
    // SAFETY: the function has no precondition and does not return.
    unsafe { libc::_exit(0) }
}
