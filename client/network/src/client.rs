//! The client's end of a network session: a local host session whose other end is a relay.
//!
//! The relay makes the session's memory in this process, as a service does on its host, takes requests out of its ring and writes their
//! bytes to the service. So a [`Session`] of the network is used like one of the same host.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use expertd_session::memory::{ServiceRings, SessionMemory};
use expertd_session::wire::{CompletionRecord, MAX_CLIENT_FRAME, frame};
use expertd_session::{Session, SessionOptions, socket};
use expertd_shm::WaitPolicy;
use expertd_shm::wait::Doorbell;

use crate::endpoint::{Card, Endpoint, Transports};
use crate::library::{Library, NetworkError};
use crate::random_name;
use crate::relay::{Relay, Waiting};
use crate::wire::{decode, store};

/// How long the relay sleeps while no call is in flight, unless its client starts one.
const IDLE: Duration = Duration::from_millis(50);

/// What the service said of a session.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The agent's card.
    pub card: Card,
    /// Number of the session in the service's logs.
    pub session: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// How long threads should spin; 0 where the service's cores are scarce.
    pub spin_us: u32,
    /// An encoded `expertd.v1.GetModelResponse`.
    pub model: Vec<u8>,
}

/// The client's end before the service has opened the session.
#[derive(Debug)]
pub struct ClientEnd {
    // Dropped before the memory that it has registered.
    endpoint: Endpoint,
    memory: SessionMemory,
    rings: ServiceRings,
}

/// Ends a session of the network from outside.
#[derive(Clone, Debug)]
pub struct End(Arc<EndState>);

#[derive(Debug)]
struct EndState {
    reason: Mutex<Option<String>>,
    has_ended: AtomicBool,
    bell: Doorbell,
}

impl End {
    /// Ends the session: waiting calls fail with `reason`, unless it has ended already.
    pub fn end(&self, reason: &str) {
        self.0.reason.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| reason.to_owned());
        self.0.has_ended.store(true, Ordering::Release);
        self.0.bell.ring();
    }

    fn has_ended(&self) -> bool {
        self.0.has_ended.load(Ordering::Acquire)
    }

    fn reason(&self) -> String {
        self.0.reason.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
    }
}

impl ClientEnd {
    /// Makes and registers the memory of a session.
    ///
    /// # Errors
    /// If there is no memory, or no transport.
    pub fn create(
        library: &Arc<Library>,
        transports: &Transports,
        options: &SessionOptions,
    ) -> Result<Self, NetworkError> {
        let (memory, rings) =
            SessionMemory::create(options.calls.clamp(1, 1024).next_power_of_two(), options.rows_bytes)?;
        let endpoint = Endpoint::new(library, &random_name("client"), transports, memory.rows().clone())?;
        Ok(ClientEnd { endpoint, memory, rings })
    }

    /// What the service's agent needs to know.
    ///
    /// # Errors
    /// As [`Endpoint::card`].
    pub fn card(&self) -> Result<Card, NetworkError> {
        self.endpoint.card()
    }

    /// Bytes of the row area.
    #[must_use]
    pub fn rows_bytes(&self) -> usize {
        self.memory.rows().len()
    }

    /// Largest number of calls in flight.
    #[must_use]
    pub const fn calls(&self) -> u32 {
        self.memory.calls()
    }

    /// Connects to the service's agent and starts the relay. `on_end` is called when the session has ended.
    ///
    /// # Errors
    /// If the agent cannot be reached, or a thread not started.
    pub fn start(
        mut self,
        opened: Opened,
        name: &str,
        options: &SessionOptions,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<(Session, End), NetworkError> {
        self.endpoint.connect(&opened.card)?;
        let (ours, theirs) = UnixStream::pair()?;
        let state = EndState {
            reason: Mutex::default(),
            has_ended: AtomicBool::new(false),
            bell: self.memory.service_bell().clone(),
        };
        let end = End(Arc::new(state));
        let (watched, of_watcher) = (ours.try_clone()?, end.clone());
        std::thread::Builder::new().name("expertd-net-end".to_owned()).spawn(move || {
            while let Ok(Some(_)) = socket::receive(&watched, MAX_CLIENT_FRAME) {}
            of_watcher.end("the client has ended the session");
        })?;
        let of_relay = end.clone();
        let spin = options.spin.unwrap_or(Duration::from_micros(opened.spin_us.into()));
        std::thread::Builder::new().name("expertd-network".to_owned()).spawn(move || {
            if let Err(error) = self.serve(&ours, &opened, spin, &of_relay) {
                of_relay.end(&error.to_string());
            }
            let _ = socket::send(&ours, frame::ENDED, of_relay.reason().as_bytes());
            let _ = ours.shutdown(std::net::Shutdown::Both);
            on_end();
        })?;
        let session = Session::over(theirs, name, options);
        if session.is_err() {
            end.end("the session was not opened");
        }
        Ok((session?, end))
    }

    /// Acts as the service of the local session until it ends.
    fn serve(
        self,
        client: &UnixStream,
        opened: &Opened,
        spin: Duration,
        end: &End,
    ) -> Result<(), NetworkError> {
        let ClientEnd { endpoint, memory, mut rings } = self;
        let record = memory.opened(opened.session, opened.spin_us, opened.hidden);
        socket::send(client, frame::MODEL, &opened.model)?;
        socket::send(client, frame::OPENED, bytemuck::bytes_of(&record))?;
        socket::send_region(client, memory.region())?;
        let mut relay = Relay::new(endpoint, opened.hidden);
        let mut waiting = Waiting::new(spin);
        while !end.has_ended() {
            let mut worked = take_completions(&mut relay, &memory, &mut rings)?;
            while let Some(request) = rings.requests.try_pop()? {
                start(&mut relay, request)?;
                worked = true;
            }
            if worked {
                waiting.restart();
                continue;
            }
            let is_expecting = !relay.calls.is_empty();
            let Some(mut pause) = waiting.pause(relay.endpoint.is_sending()) else { continue };
            if !is_expecting {
                pause = IDLE;
            }
            let policy = WaitPolicy::within(Duration::ZERO, pause);
            let woken = memory.service_bell().wait_for(policy, || {
                if end.has_ended() {
                    return Some(Ok(None));
                }
                rings.requests.try_pop().map(|request| request.map(Some)).transpose()
            });
            if let Ok(Some(request)) = woken.unwrap_or(Ok(None)) {
                start(&mut relay, request)?;
                waiting.restart();
            }
        }
        Ok(())
    }
}

/// Sends a call to the service.
fn start(relay: &mut Relay, request: expertd_session::wire::RequestRecord) -> Result<(), NetworkError> {
    relay.calls.insert(request.call, request);
    let places = relay.places.of_request(&request);
    relay.send(&request, &places)
}

/// Passes the completions that have arrived to the client. Returns whether there were any.
fn take_completions(
    relay: &mut Relay,
    memory: &SessionMemory,
    rings: &mut ServiceRings,
) -> Result<bool, NetworkError> {
    let Relay { endpoint, places, calls, .. } = relay;
    let mut count = 0;
    endpoint.poll(|message| {
        let (completion, bytes) = decode::<CompletionRecord>(message)?;
        // A completion of no call is the service's mistake and answers nothing.
        let Some(request) = calls.remove(&completion.call) else { return Ok(()) };
        store(memory.rows(), &places.of_answer(&request), bytes)?;
        if !rings.completions.try_push(&completion)? {
            return Err(NetworkError::Protocol("more completions than there are calls".to_owned()));
        }
        count += 1;
        Ok(())
    })?;
    if count > 0 {
        memory.client_bell().ring();
    }
    Ok(count > 0)
}
