//! Request bodies, whose messages are charged to the budget before their bytes are taken out of the transport.
//!
//! gRPC has no content length, but every message starts with a flag and its length in five bytes. The request body
//! reads these itself, charges the whole message at once, and only then hands its bytes on. Where there is no room
//! (or the message is too large) a unary call ends at once; on a stream the message is skipped at wire speed and
//! stands in the stream as an empty one with its id, so that the stream goes on and the transport's windows never
//! fill with bytes that nobody takes.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::{BufMut as _, Bytes, BytesMut};
use http_body::{Body, Frame};
use tonic::Status;

use super::apart::{self, APART_BYTES, Gathering};
use super::budget::{Budget, Connection, Stage, Ticket};
use crate::api::service::failure::Failure;
use expertd_types::ChunkedBytes;

/// Flag and length before each message.
pub(in crate::api) const PREFIX: usize = 5;
/// Tag of field 1 and a varint: the id at the start of a `ForwardStreamRequest`.
const ID_FIELD: usize = 11;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A message that has been admitted to the decoder, or refused before it.
pub(in crate::api) enum Arrival {
    /// With rows that stand empty in the message.
    Charged(Ticket, Option<ChunkedBytes>),
    Refused(Status),
}

/// An answer on its way to the encoder.
#[derive(Default)]
pub(in crate::api) struct Leaving {
    /// `None` if the request was refused before it was received.
    pub(in crate::api) ticket: Option<Ticket>,
    /// Rows that are to be sent without a copy; those in the message are empty then.
    pub(in crate::api) rows: Option<Bytes>,
}

/// The charges of one call, in the order of its messages.
#[derive(Default)]
pub(in crate::api) struct Charges {
    lists: Mutex<Lists>,
}

#[derive(Default)]
struct Lists {
    arrived: VecDeque<Arrival>,
    leaving: VecDeque<Leaving>,
    complete_at: Option<Instant>,
}

impl Charges {
    /// When the last byte of the latest message arrived.
    pub(in crate::api) fn complete_at(&self) -> Option<Instant> {
        self.lists().complete_at
    }

    /// What became of the message that was decoded next.
    pub(in crate::api) fn next_arrival(&self) -> Option<Arrival> {
        self.lists().arrived.pop_front()
    }

    /// The next message to be encoded is this one.
    pub(in crate::api) fn leave(&self, leaving: Leaving) {
        self.lists().leaving.push_back(leaving);
    }

    fn arrive(&self, arrival: Arrival) {
        self.lists().arrived.push_back(arrival);
    }

    /// The messages that were encoded last.
    pub(in crate::api) fn take_leaving(&self) -> VecDeque<Leaving> {
        std::mem::take(&mut self.lists().leaving)
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that hold a charge for as long as any slice of them is alive.
pub(in crate::api) fn charged_bytes(bytes: Bytes, ticket: Ticket) -> Bytes {
    struct Owner {
        bytes: Bytes,
        _ticket: Ticket,
    }
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.bytes
        }
    }
    Bytes::from_owner(Owner { bytes, _ticket: ticket })
}

/// What a request body is held to.
#[derive(Clone)]
pub(in crate::api) struct Terms {
    pub(in crate::api) budget: Arc<Budget>,
    pub(in crate::api) connection: Arc<Connection>,
    /// Largest message.
    pub(in crate::api) limit: usize,
    /// Whether several messages are legal.
    pub(in crate::api) streaming: bool,
    /// Whether messages have rows.
    pub(in crate::api) forward: bool,
}

type Wait = Pin<Box<dyn Future<Output = Option<Ticket>> + Send>>;

enum State {
    /// Gathers a prefix that is split over chunks.
    Prefix { bytes: [u8; PREFIX], have: usize },
    /// A prefix was read; there is no room yet.
    Waiting { wait: Wait, prefix: [u8; PREFIX], length: usize, emit: Option<[u8; PREFIX]> },
    /// Hands on what is left of a charged message, prefix included if it lies in one chunk.
    Message { left: usize, ticket: Ticket },
    /// Keeps a charged message until all of it is there, without its prefix.
    Gathering { left: usize, ticket: Ticket, message: Gathering },
    /// Throws away what is left of a refused message.
    Skipping { left: usize, head: BytesMut, status: Status },
    /// Over: the end was reached or an error handed on.
    Done,
}

const fn new_prefix() -> State {
    State::Prefix { bytes: [0; PREFIX], have: 0 }
}

/// A request body that charges each message before handing it on.
pub(in crate::api) struct RequestBody<B> {
    inner: B,
    terms: Terms,
    charges: Arc<Charges>,
    state: State,
    /// Bytes taken from `inner` and not yet handed on.
    pending: Bytes,
    /// What was gathered and is to be handed on before anything else.
    gathered: VecDeque<Bytes>,
    messages: u64,
}

impl<B> RequestBody<B> {
    pub(in crate::api) fn new(inner: B, terms: Terms, charges: Arc<Charges>) -> RequestBody<B> {
        RequestBody {
            inner,
            terms,
            charges,
            state: new_prefix(),
            pending: Bytes::new(),
            gathered: VecDeque::new(),
            messages: 0,
        }
    }

    /// Decides about a message whose prefix is known. `emit` is the prefix if it no longer lies in `pending`.
    fn begin(&mut self, prefix: [u8; PREFIX], emit: Option<[u8; PREFIX]>) -> Result<Option<Bytes>, Status> {
        let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
        self.messages += 1;
        if self.messages > 1 && !self.terms.streaming {
            return Err(Failure::field("body", "a unary call has one message, found a second one").into());
        }
        if length > self.terms.limit {
            let text = format!(
                "the message has {length} bytes, at most {} are accepted (GetModel says so); send fewer tokens per request",
                self.terms.limit
            );
            return self.refuse(Failure::field("body", text).into(), length, emit.is_some());
        }
        match self.terms.budget.try_charge(&self.terms.connection, length) {
            Some(ticket) => Ok(self.admit(ticket, prefix, length, emit)),
            None => {
                let wait = Arc::clone(&self.terms.budget).charge(Arc::clone(&self.terms.connection), length);
                self.state = State::Waiting { wait: Box::pin(wait), prefix, length, emit };
                Ok(None)
            }
        }
    }

    fn admit(
        &mut self,
        ticket: Ticket,
        prefix: [u8; PREFIX],
        length: usize,
        emit: Option<[u8; PREFIX]>,
    ) -> Option<Bytes> {
        // Compressed ones are the decoder's to understand.
        if self.terms.forward && length >= APART_BYTES && prefix[0] == 0 {
            if emit.is_none() {
                let _ = self.pending.split_to(PREFIX);
            }
            self.state = State::Gathering { left: length, ticket, message: Gathering::default() };
            return None;
        }
        self.charges.arrive(Arrival::Charged(ticket.clone(), None));
        // The decoder makes room for a message once it has seen the prefix. Of a message in several chunks it gets the
        // prefix alone first, so that it does not move the first chunk to a larger place.
        let spans_chunks = length + PREFIX > self.pending.len();
        let handed_on = match emit {
            Some(prefix) => Some(Bytes::copy_from_slice(&prefix)),
            None if spans_chunks => Some(self.pending.split_to(PREFIX)),
            None => None,
        };
        let left = if handed_on.is_some() { length } else { length + PREFIX };
        self.state = State::Message { left, ticket };
        self.end_of_message();
        handed_on
    }

    fn refuse(&mut self, status: Status, length: usize, prefix_taken: bool) -> Result<Option<Bytes>, Status> {
        if !self.terms.streaming {
            return Err(status);
        }
        if !prefix_taken {
            let _ = self.pending.split_to(PREFIX);
        }
        self.state = State::Skipping { left: length, head: BytesMut::with_capacity(ID_FIELD), status };
        Ok(self.end_of_skipping())
    }

    /// Leaves the state of a message that is complete.
    fn end_of_message(&mut self) {
        if let State::Message { left: 0, ticket } = &self.state {
            ticket.enter(Stage::Working);
            self.charges.lists().complete_at = Some(Instant::now());
            self.state = new_prefix();
        }
    }

    /// Hands a gathered message on once it is complete: without its rows, or as it came.
    fn end_of_gathering(&mut self) {
        let State::Gathering { left: 0, .. } = &self.state else { return };
        let State::Gathering { ticket, message, .. } = std::mem::replace(&mut self.state, new_prefix())
        else {
            return;
        };
        let message = message.finish();
        let split = apart::split(&message, self.terms.streaming);
        let (message, rows) = match split {
            Some(split) => (split.message.into(), Some(split.rows)),
            None => (message, None),
        };
        let mut prefix = BytesMut::with_capacity(PREFIX);
        prefix.put_u8(0);
        prefix.put_u32(message.len() as u32);
        self.gathered.push_back(prefix.freeze());
        self.gathered.extend(message);
        ticket.enter(Stage::Working);
        self.charges.arrive(Arrival::Charged(ticket, rows));
        self.charges.lists().complete_at = Some(Instant::now());
    }

    /// Puts an empty message with the id of a refused one into the stream once all of it is skipped.
    fn end_of_skipping(&mut self) -> Option<Bytes> {
        let State::Skipping { left: 0, .. } = &self.state else { return None };
        let State::Skipping { head, status, .. } = std::mem::replace(&mut self.state, new_prefix()) else {
            return None;
        };
        self.charges.arrive(Arrival::Refused(status));
        let id = id_field(&head);
        let mut stand_in = BytesMut::with_capacity(PREFIX + ID_FIELD);
        stand_in.put_u8(0);
        stand_in.put_u32(id.len() as u32);
        stand_in.put_slice(id);
        Some(stand_in.freeze())
    }

    /// Moves on without new bytes from the transport. `Ok(None)` asks for more of them.
    fn advance(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Status>> {
        loop {
            if let Some(bytes) = self.gathered.pop_front() {
                return Poll::Ready(Ok(Some(bytes)));
            }
            match &mut self.state {
                State::Done => return Poll::Ready(Ok(None)),
                State::Waiting { wait, .. } => {
                    let ticket = ready!(wait.as_mut().poll(cx));
                    let State::Waiting { prefix, length, emit, .. } =
                        std::mem::replace(&mut self.state, State::Done)
                    else {
                        return Poll::Ready(Ok(None));
                    };
                    let handed_on = match ticket {
                        Some(ticket) => self.admit(ticket, prefix, length, emit),
                        None => self.refuse(Failure::NoRoom.into(), length, emit.is_some())?,
                    };
                    if handed_on.is_some() {
                        return Poll::Ready(Ok(handed_on));
                    }
                }
                _ if self.pending.is_empty() => return Poll::Ready(Ok(None)),
                State::Message { left, .. } => {
                    let take = (*left).min(self.pending.len());
                    *left -= take;
                    let handed_on = self.pending.split_to(take);
                    self.end_of_message();
                    return Poll::Ready(Ok(Some(handed_on)));
                }
                State::Gathering { left, message, .. } => {
                    let take = (*left).min(self.pending.len());
                    *left -= take;
                    message.push(self.pending.split_to(take));
                    self.end_of_gathering();
                }
                State::Skipping { left, head, .. } => {
                    let take = (*left).min(self.pending.len());
                    *left -= take;
                    let skipped = self.pending.split_to(take);
                    let room = ID_FIELD - head.len();
                    head.extend_from_slice(&skipped[..take.min(room)]);
                    if let Some(stand_in) = self.end_of_skipping() {
                        return Poll::Ready(Ok(Some(stand_in)));
                    }
                }
                State::Prefix { have: 0, .. } if self.pending.len() >= PREFIX => {
                    let mut prefix = [0; PREFIX];
                    prefix.copy_from_slice(&self.pending[..PREFIX]);
                    if let Some(handed_on) = self.begin(prefix, None)? {
                        return Poll::Ready(Ok(Some(handed_on)));
                    }
                }
                State::Prefix { bytes, have } => {
                    let take = (PREFIX - *have).min(self.pending.len());
                    let part = self.pending.split_to(take);
                    bytes[*have..*have + take].copy_from_slice(&part);
                    *have += take;
                    if *have == PREFIX {
                        let prefix = *bytes;
                        if let Some(handed_on) = self.begin(prefix, Some(prefix))? {
                            return Poll::Ready(Ok(Some(handed_on)));
                        }
                    }
                }
            }
        }
    }

    /// What is missing when the body ends now.
    fn truncation(&self) -> Option<Status> {
        let missing = match &self.state {
            State::Prefix { have: 0, .. } | State::Done => return None,
            State::Prefix { have, .. } => format!("{} of the {PREFIX} bytes before a message", PREFIX - have),
            State::Waiting { length, .. } => format!("{length} bytes of a message"),
            State::Message { left, .. } | State::Gathering { left, .. } | State::Skipping { left, .. } => {
                format!("{left} bytes of a message")
            }
        };
        Some(Failure::field("body", format!("the call ended early: {missing} are missing")).into())
    }
}

/// The id field at the start of a serialized `ForwardStreamRequest`; empty (id 0) if it does not start with one.
fn id_field(head: &[u8]) -> &[u8] {
    match head {
        [0x08, varint @ ..] => match varint.iter().position(|byte| byte & 0x80 == 0) {
            Some(last) => &head[..last + 2],
            None => &[],
        },
        _ => &[],
    }
}

impl<B> Body for RequestBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        loop {
            match ready!(this.advance(cx)) {
                Ok(Some(bytes)) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                Ok(None) => {}
                Err(status) => {
                    this.state = State::Done;
                    this.pending = Bytes::new();
                    return Poll::Ready(Some(Err(status.into())));
                }
            }
            if matches!(this.state, State::Done) {
                return Poll::Ready(None);
            }
            let Some(frame) = ready!(Pin::new(&mut this.inner).poll_frame(cx)) else {
                let truncation = this.truncation();
                this.state = State::Done;
                return Poll::Ready(truncation.map(|status| Err(status.into())));
            };
            match frame.map_err(Into::into)?.into_data() {
                Ok(data) => this.pending = data,
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.pending.is_empty()
            && self.gathered.is_empty()
            && matches!(self.state, State::Prefix { have: 0, .. })
            && self.inner.is_end_stream()
    }
}

#[cfg(test)]
#[path = "body_tests.rs"]
mod tests;
