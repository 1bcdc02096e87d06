//! The client's end of a network session: a local host session whose other end is a relay.
//!
//! The relay makes the session's memory in this process, as a service does on its host, takes requests out of its ring and writes their
//! bytes to the service. So a [`Session`] of the network is used like one of the same host.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expertd_session::memory::{ServiceRings, SessionMemory};
use expertd_session::pieces::Pieces;
use expertd_session::wire::{CompletionRecord, MAX_CALLS, MAX_CLIENT_FRAME, RequestRecord, frame};
use expertd_session::{Session, SessionOptions, socket};
use expertd_shm::WaitPolicy;
use expertd_shm::wait::SPIN_TIME;

use crate::endpoint::{Card, Endpoint, Transports};
use crate::library::{Library, NetworkError};
use crate::live::{End, Live};
use crate::random_name;
use crate::relay::{Relay, Spin, Waiting, accept_completion, is_coming};

/// How long the relay sleeps while no call is in flight, unless its client starts one.
const IDLE: Duration = Duration::from_millis(50);

/// Code of gRPC.
const INVALID_ARGUMENT: u32 = 3;

/// Cores of a host from which two threads that spin take nothing.
const SPARE_CORES: usize = 4;

/// The service's description of a session.
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
    /// Rows of a call, at most.
    pub most_rows: u32,
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

    /// The address of this endpoint, for the service's agent.
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

    /// Calls of the service's session: large calls travel as several.
    #[must_use]
    pub fn calls(&self) -> u32 {
        Pieces::of_calls(self.memory.calls(), MAX_CALLS)
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
        let end = End::new(self.memory.service_bell().clone());
        let (watched, of_watcher) = (ours.try_clone()?, end.clone());
        std::thread::Builder::new().name("expertd-net-end".to_owned()).spawn(move || {
            while let Ok(Some(_)) = socket::receive(&watched, MAX_CLIENT_FRAME) {}
            of_watcher.end("the client has ended the session");
        })?;
        let of_relay = end.clone();
        let spin = options.spin.unwrap_or_else(|| own_spin(&opened));
        let live = Live::new(&end);
        std::thread::Builder::new().name("expertd-network".to_owned()).spawn(move || {
            let ours = Shut(ours);
            if let Err(error) = self.serve(&ours.0, &opened, spin, &of_relay) {
                of_relay.end(&error.to_string());
            }
            drop(live);
            let _ = socket::send(&ours.0, frame::ENDED, of_relay.reason().as_bytes());
            drop(ours);
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
        let spin_us = u32::try_from(spin.as_micros()).unwrap_or(u32::MAX);
        let record = memory.opened(opened.session, spin_us, opened.hidden);
        socket::send(client, frame::MODEL, &opened.model)?;
        socket::send(client, frame::OPENED, bytemuck::bytes_of(&record))?;
        socket::send_region(client, memory.region())?;
        let mut relay = Relay::new(endpoint, opened.hidden);
        let in_flight = Pieces::of_calls(memory.calls(), MAX_CALLS);
        let mut pieces = Pieces::new(memory.calls(), in_flight, opened.most_rows);
        let mut waiting = Waiting::new(Spin { computing: spin, between: spin });
        while !end.has_ended() {
            let mut worked = take_completions(&mut relay, &mut pieces, &memory, &mut rings)?;
            while let Some(request) = rings.requests.try_pop()? {
                start(&relay, &mut pieces, &memory, &mut rings, request)?;
                worked = true;
            }
            worked |= send_pieces(&mut relay, &mut pieces)?;
            if worked {
                waiting.restart();
                continue;
            }
            let is_expecting = !pieces.is_empty();
            let Some(mut pause) = waiting.pause(relay.is_moving(), is_expecting) else { continue };
            if !is_expecting {
                pause = IDLE;
            }
            if waiting.asks(is_expecting) {
                relay.send_alive()?;
            }
            let policy = WaitPolicy::within(Duration::ZERO, pause);
            let woken = memory.service_bell().wait_for(policy, || {
                if end.has_ended() {
                    return Some(Ok(None));
                }
                rings.requests.try_pop().map(|request| request.map(Some)).transpose()
            });
            if let Ok(Some(request)) = woken.unwrap_or(Ok(None)) {
                start(&relay, &mut pieces, &memory, &mut rings, request)?;
                send_pieces(&mut relay, &mut pieces)?;
                waiting.restart();
            }
        }
        Ok(())
    }
}

/// A socket that is shut down when its thread ends, also by a panic: another thread holds it open.
struct Shut(UnixStream);

impl Drop for Shut {
    fn drop(&mut self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

/// How long threads of this process spin: as the service says of its cores, and longer where this host has cores to spare.
fn own_spin(opened: &Opened) -> Duration {
    let advised = Duration::from_micros(opened.spin_us.into());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores >= SPARE_CORES { advised.max(SPIN_TIME) } else { advised }
}

/// Takes a call of the client; answers one whose bytes cannot travel.
fn start(
    relay: &Relay,
    pieces: &mut Pieces,
    memory: &SessionMemory,
    rings: &mut ServiceRings,
    request: RequestRecord,
) -> Result<(), NetworkError> {
    if let Some((read, written)) = relay.places.of_request(&request).zip(relay.places.of_answer(&request)) {
        pieces.start(request, &read, &written, Instant::now());
        return Ok(());
    }
    let text = "tokens must not be 0, and rows, routing and output of a call must lie in the session's memory; over a network, k must be given";
    complete(rings, &CompletionRecord::failed(request.call, INVALID_ARGUMENT, text))?;
    memory.client_bell().ring();
    Ok(())
}

/// Sends the calls, or pieces of them, that may travel now. Returns whether there were any.
fn send_pieces(relay: &mut Relay, pieces: &mut Pieces) -> Result<bool, NetworkError> {
    let mut has_sent = false;
    while let Some(piece) = pieces.next(relay.endpoint.is_sending(), Instant::now()) {
        let places = relay.places.of_request(&piece).unwrap_or_default();
        relay.calls.insert(piece.call, piece);
        relay.send(&piece, &places)?;
        has_sent = true;
    }
    Ok(has_sent)
}

fn complete(rings: &mut ServiceRings, completion: &CompletionRecord) -> Result<(), NetworkError> {
    if rings.completions.try_push(completion)? {
        return Ok(());
    }
    Err(NetworkError::Protocol("more completions than there are calls".to_owned()))
}

/// Passes the completions that have arrived to the client. Returns whether anything has.
fn take_completions(
    relay: &mut Relay,
    pieces: &mut Pieces,
    memory: &SessionMemory,
    rings: &mut ServiceRings,
) -> Result<bool, NetworkError> {
    let Relay { endpoint, places, calls, is_receiving, .. } = relay;
    let (mut count, mut is_event) = (0, false);
    endpoint.poll(|message| {
        (*is_receiving, is_event) = (is_coming(message), true);
        if *is_receiving {
            return Ok(());
        }
        let Some(completion) = accept_completion(message, memory.rows(), places, calls)? else {
            return Ok(());
        };
        if let Some(completion) = pieces.complete(&completion, Instant::now()) {
            complete(rings, &completion)?;
            count += 1;
        }
        Ok(())
    })?;
    if count > 0 {
        memory.client_bell().ring();
    }
    Ok(is_event)
}
