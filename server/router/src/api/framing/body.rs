//! Request bodies, whose messages are charged to the budget as their bytes arrive.
//!
//! gRPC has no content length, but every message starts with a flag and its length in five bytes. The request body
//! parses this prefix, gathers the message, and charges each part before it keeps it. If there is no room, or the message
//! is too large, a unary call ends at once. On a stream the message is discarded as it arrives and replaced by an empty one
//! with its id: the stream continues, and the transport's windows never fill with unread bytes.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{BufMut as _, Bytes, BytesMut};
use http_body::{Body, Frame};
use tonic::Status;

use super::apart::{self, APART_BYTES, Gathering};
use super::budget::{Budget, Ticket};
use super::charges::{Arrival, Charges};
use super::connection::{Connection, Owner, Stage};
use crate::api::service::failure::Failure;
use expertd_types::ChunkedBytes;

/// Length of the prefix of each message: a flag and the message's length.
pub(in crate::api) const PREFIX: usize = 5;
/// Tag of field 1 and a varint: the id at the start of a `ForwardStreamRequest`.
const ID_FIELD: usize = 11;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Limits of a request body, and the accounts that it is charged to.
#[derive(Clone)]
pub(in crate::api) struct Terms {
    pub(in crate::api) budget: Arc<Budget>,
    pub(in crate::api) connection: Arc<Connection>,
    /// Account of the charges.
    pub(in crate::api) owner: Arc<Owner>,
    /// Largest message, in bytes.
    pub(in crate::api) limit: usize,
    /// Whether the call may send several messages.
    pub(in crate::api) streaming: bool,
    /// Whether messages carry rows.
    pub(in crate::api) forward: bool,
}

type Admission = Pin<Box<dyn Future<Output = Option<Ticket>> + Send>>;
type Wait = Pin<Box<dyn Future<Output = bool> + Send>>;

enum State {
    /// Reading a prefix, which may be split over chunks.
    Prefix { bytes: [u8; PREFIX], have: usize },
    /// Gathering a charged message, without its prefix.
    Gathering { left: usize, ticket: Ticket, message: Gathering },
    /// The prefix was read; waiting for room for the message.
    Admitting { admission: Admission, length: usize },
    /// Waiting for room for the next `take` bytes of a message.
    Waiting { wait: Wait, take: usize, left: usize, ticket: Ticket, message: Gathering },
    /// Discarding the rest of a refused message.
    Skipping { left: usize, head: BytesMut, status: Status },
    /// The body ended, or an error was returned.
    Done,
}

const fn new_prefix() -> State {
    State::Prefix { bytes: [0; PREFIX], have: 0 }
}

/// A request body that charges each message before it passes it on.
pub(in crate::api) struct RequestBody<B> {
    inner: B,
    terms: Terms,
    charges: Arc<Charges>,
    state: State,
    /// Bytes read from `inner` and not yet passed on.
    pending: Bytes,
    /// Gathered bytes that are passed on first.
    gathered: VecDeque<Bytes>,
    messages: u64,
}

impl<B> RequestBody<B> {
    pub(in crate::api) fn new(inner: B, terms: Terms, charges: Arc<Charges>) -> RequestBody<B> {
        terms.connection.body_begins();
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

    /// The next message with its prefix, if it is small, complete in `pending`, and can be charged at once.
    fn small_message(&mut self) -> Option<Bytes> {
        let (&[flag, a, b, c, d], rest) = self.pending.split_first_chunk::<PREFIX>()?;
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        let small = length <= self.terms.limit && !(self.terms.forward && length >= APART_BYTES);
        if flag != 0 || !small || rest.len() < length || (self.messages > 0 && !self.terms.streaming) {
            return None;
        }
        let Terms { budget, connection, owner, .. } = &self.terms;
        let ticket = budget.try_message(connection, owner, length).ok()?;
        ticket.try_grow(length).ok()?;
        self.messages += 1;
        self.arrived(ticket, None);
        Some(self.pending.split_to(PREFIX + length))
    }

    /// Notes that a message is complete.
    fn arrived(&self, ticket: Ticket, rows: Option<ChunkedBytes>) {
        ticket.enter(Stage::Working);
        if self.terms.forward {
            self.charges.arrive(Arrival::Charged(ticket, rows));
        }
        self.charges.complete_now();
    }

    /// Decides about a message whose prefix was read from `pending`.
    fn begin(&mut self, prefix: [u8; PREFIX]) -> Result<Option<Bytes>, Status> {
        let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
        self.messages += 1;
        if self.messages > 1 && !self.terms.streaming {
            return Err(Failure::field("body", "a unary call has one message; found a second one").into());
        }
        if prefix[0] != 0 {
            return Err(Status::unimplemented(
                "compressed messages are not accepted; send them uncompressed",
            ));
        }
        if length > self.terms.limit {
            let way_out = match self.terms.forward {
                true => " (GetModel reports it); send fewer tokens per request",
                false => "",
            };
            let text =
                format!("the message has {length} bytes, and the limit is {}{way_out}", self.terms.limit);
            return self.refuse(Failure::field("body", text).into(), length, BytesMut::new());
        }
        let Terms { budget, connection, owner, .. } = &self.terms;
        match budget.try_message(connection, owner, length) {
            Ok(ticket) => {
                self.state = State::Gathering { left: length, ticket, message: Gathering::default() };
                self.end_of_gathering();
                Ok(None)
            }
            Err(_) => {
                let (budget, connection, owner) =
                    (Arc::clone(budget), Arc::clone(connection), Arc::clone(owner));
                let admission = Box::pin(budget.message(connection, owner, length));
                self.state = State::Admitting { admission, length };
                Ok(None)
            }
        }
    }

    /// Ends a unary call; on a stream, starts to discard the remaining `left` bytes of a message that starts with `head`.
    fn refuse(&mut self, status: Status, left: usize, head: BytesMut) -> Result<Option<Bytes>, Status> {
        if !self.terms.streaming || !self.terms.forward {
            return Err(status);
        }
        self.state = State::Skipping { left, head, status };
        Ok(self.end_of_skipping())
    }

    /// Refuses the message that is being gathered.
    fn give_up(&mut self, message: Gathering, left: usize) -> Result<Option<Bytes>, Status> {
        let message = message.finish();
        let mut head = BytesMut::with_capacity(ID_FIELD);
        message.view(0..message.len().min(ID_FIELD)).iter().for_each(|part| head.extend_from_slice(part));
        self.refuse(Failure::NoRoom.into(), left, head)
    }

    /// Passes a message on when it is complete: without its rows if they are large, otherwise unchanged.
    fn end_of_gathering(&mut self) {
        let State::Gathering { left: 0, .. } = &self.state else { return };
        let State::Gathering { ticket, message, .. } = std::mem::replace(&mut self.state, new_prefix())
        else {
            return;
        };
        let message = message.finish();
        let worth_it = self.terms.forward && message.len() >= APART_BYTES;
        let split = if worth_it { apart::split(&message, self.terms.streaming) } else { None };
        let (message, rows) = match split {
            Some(split) => (split.message.into(), Some(split.rows)),
            None => (message, None),
        };
        let mut prefix = BytesMut::with_capacity(PREFIX);
        prefix.put_u8(0);
        prefix.put_u32(message.len() as u32);
        self.gathered.push_back(prefix.freeze());
        self.gathered.extend(message);
        self.arrived(ticket, rows);
    }

    /// Replaces a refused message by an empty one with its id when all of it is discarded.
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

    /// Makes progress without new bytes from the transport. `Ok(None)`: more bytes are needed.
    fn advance(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Status>> {
        loop {
            if let Some(bytes) = self.gathered.pop_front() {
                return Poll::Ready(Ok(Some(bytes)));
            }
            if matches!(self.state, State::Prefix { have: 0, .. })
                && let Some(message) = self.small_message()
            {
                return Poll::Ready(Ok(Some(message)));
            }
            match &mut self.state {
                State::Done => return Poll::Ready(Ok(None)),
                State::Admitting { admission, length } => {
                    let ticket = ready!(admission.as_mut().poll(cx));
                    let left = *length;
                    match ticket {
                        Some(ticket) => {
                            self.state = State::Gathering { left, ticket, message: Gathering::default() };
                            self.end_of_gathering();
                        }
                        None => {
                            let refused = self.refuse(Failure::NoRoom.into(), left, BytesMut::new())?;
                            if let Some(stand_in) = refused {
                                return Poll::Ready(Ok(Some(stand_in)));
                            }
                        }
                    }
                }
                State::Waiting { wait, .. } => {
                    let grown = ready!(wait.as_mut().poll(cx));
                    let State::Waiting { take, left, ticket, mut message, .. } =
                        std::mem::replace(&mut self.state, State::Done)
                    else {
                        return Poll::Ready(Ok(None));
                    };
                    if grown {
                        message.push(self.pending.split_to(take));
                        self.state = State::Gathering { left: left - take, ticket, message };
                        self.end_of_gathering();
                    } else if let Some(stand_in) = self.give_up(message, left)? {
                        return Poll::Ready(Ok(Some(stand_in)));
                    }
                }
                _ if self.pending.is_empty() => return Poll::Ready(Ok(None)),
                State::Gathering { left, ticket, message } => {
                    let take = (*left).min(self.pending.len());
                    if ticket.try_grow(take).is_ok() {
                        *left -= take;
                        message.push(self.pending.split_to(take));
                        self.end_of_gathering();
                    } else {
                        let (left, ticket) = (*left, ticket.clone());
                        let message = std::mem::take(message);
                        let wait = Box::pin(ticket.clone().grow(take));
                        self.state = State::Waiting { wait, take, left, ticket, message };
                    }
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
                State::Prefix { bytes, have } => {
                    let take = (PREFIX - *have).min(self.pending.len());
                    let part = self.pending.split_to(take);
                    bytes[*have..*have + take].copy_from_slice(&part);
                    *have += take;
                    if *have == PREFIX {
                        let prefix = *bytes;
                        if let Some(handed_on) = self.begin(prefix)? {
                            return Poll::Ready(Ok(Some(handed_on)));
                        }
                    }
                }
            }
        }
    }

    /// The error if the body ends in the middle of a message.
    fn truncation(&self) -> Option<Status> {
        let missing = match &self.state {
            State::Prefix { have: 0, .. } | State::Done => return None,
            State::Prefix { have, .. } => format!("{} of the {PREFIX} bytes before a message", PREFIX - have),
            State::Admitting { length: left, .. }
            | State::Waiting { left, .. }
            | State::Gathering { left, .. }
            | State::Skipping { left, .. } => {
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
                Ok(data) => {
                    this.terms.connection.note_taken(data.len(), &this.terms.budget);
                    this.pending = data;
                }
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

impl<B> Drop for RequestBody<B> {
    fn drop(&mut self) {
        self.terms.connection.body_ends(&self.terms.budget);
    }
}

#[cfg(test)]
#[path = "body_tests.rs"]
mod tests;
