//! The bodies of requests, which charge each message as its bytes arrive, and of answers.
//!
//! The bytes of requests go on to the decoder unchanged. Only the five bytes before each message are read here: they say which bytes belong to which
//! message, whether it may use the reserve for small messages, and whether it is too large.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Sleep, sleep};
use tonic::Status;

use super::activity::{Activity, Busy, ConnectionTimeouts, LeavingBytes};
use super::budget::{Budget, Charge, Charges, MESSAGE_BYTES, Owner, guarded};
use crate::status::status_of;
use expertd_core::failure::Failure;

/// Bytes before each message: a flag and the message's length.
const PREFIX: usize = 5;
/// Longest time that a message waits for room before it is refused.
const WAIT_FOR_ROOM: Duration = Duration::from_millis(100);
/// Interval of attempts to find room.
const ROOM_ROUND: Duration = Duration::from_millis(20);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Limits of a request body, and the accounts that it is charged to.
#[derive(Clone)]
pub(crate) struct Terms {
    pub(crate) budget: Arc<Budget>,
    pub(crate) owner: Arc<Owner>,
    pub(crate) activity: Arc<Activity>,
    pub(crate) timeouts: ConnectionTimeouts,
    /// Largest message, in bytes.
    pub(crate) limit: usize,
    /// Whether the call may send several messages.
    pub(crate) streaming: bool,
    /// Whether the service takes the charges of messages.
    pub(crate) forward: bool,
}

/// A message whose bytes are arriving.
struct Message {
    charge: Charge,
    busy: Busy,
    /// Bytes that have not arrived.
    left: usize,
    deadline: Instant,
}

/// A request body that charges each message before it passes it on.
pub(crate) struct RequestBody<B> {
    inner: B,
    terms: Terms,
    charges: Arc<Charges>,
    prefix: [u8; PREFIX],
    /// Bytes of `prefix` that have arrived.
    have: usize,
    message: Option<Message>,
    messages: u64,
    /// Bytes that are not charged yet.
    pending: Bytes,
    /// While there is no room: when to give up, and when to try again.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
    /// The end of the time that the message may take.
    late: Option<Pin<Box<Sleep>>>,
    over: bool,
}

impl<B> RequestBody<B> {
    pub(crate) fn new(inner: B, terms: Terms, charges: Arc<Charges>) -> RequestBody<B> {
        RequestBody {
            inner,
            terms,
            charges,
            prefix: [0; PREFIX],
            have: 0,
            message: None,
            messages: 0,
            pending: Bytes::new(),
            waiting: None,
            late: None,
            over: false,
        }
    }

    /// Begins the message that `prefix` announces. Returns false if there is no room for it.
    fn begin(&mut self) -> Result<bool, Status> {
        let [flag, length @ ..] = self.prefix;
        let length = u32::from_be_bytes(length) as usize;
        let Terms { budget, owner, activity, timeouts, limit, streaming, forward } = &self.terms;
        if self.messages > 0 && !streaming {
            let text = "a unary call has one message; found a second one";
            return Err(status_of(Failure::field("body", text)));
        }
        if flag != 0 {
            return Err(Status::unimplemented(
                "compressed messages are not accepted; send them uncompressed",
            ));
        }
        if length > *limit {
            let way_out = if *forward { " (GetModel reports it); send fewer tokens per request" } else { "" };
            let text = format!("the message has {length} bytes, and the limit is {limit}{way_out}");
            return Err(status_of(Failure::field("body", text)));
        }
        let Some(charge) = budget.charge(owner, length, MESSAGE_BYTES) else { return Ok(false) };
        let deadline = Instant::now() + timeouts.transfer(length);
        self.message = Some(Message { charge, busy: activity.busy(), left: length, deadline });
        self.messages += 1;
        Ok(true)
    }

    /// Charges as many of the pending bytes as there is room for. Returns their number, and whether there was room for all.
    fn charge(&mut self) -> Result<(usize, bool), Status> {
        // `before` is the end of the bytes that go to the decoder. Bytes of a refused message do not: it gets a status of its
        // own.
        let (mut at, mut before) = (0, 0);
        loop {
            if let Some(message) = &mut self.message {
                let take = message.left.min(self.pending.len() - at);
                if !message.charge.try_grow(take) {
                    return Ok((at, false));
                }
                message.left -= take;
                at += take;
                if message.left > 0 {
                    return Ok((at, true));
                }
                (self.have, self.late) = (0, None);
                if let Some(Message { charge, busy, .. }) = self.message.take()
                    && self.terms.forward
                {
                    self.charges.arrive(Arc::new((charge, busy)));
                }
            } else if self.have == PREFIX {
                match self.begin() {
                    Ok(true) => {}
                    Ok(false) => return Ok((at, false)),
                    // The messages before it go first.
                    Err(_) if before > 0 => return Ok((before, true)),
                    Err(status) => return Err(status),
                }
            } else if at == self.pending.len() {
                return Ok((at, true));
            } else {
                let take = (PREFIX - self.have).min(self.pending.len() - at);
                before = at;
                self.prefix[self.have..self.have + take].copy_from_slice(&self.pending[at..at + take]);
                self.have += take;
                at += take;
            }
        }
    }

    /// Waits for the next attempt to find room, or refuses the message.
    fn wait(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Status>> {
        let now = Instant::now();
        let (give_up, again) =
            self.waiting.get_or_insert_with(|| (now + WAIT_FOR_ROOM, Box::pin(sleep(ROOM_ROUND))));
        if now >= *give_up {
            return Poll::Ready(Err(status_of(Failure::NoRoom)));
        }
        ready!(again.as_mut().poll(cx));
        again.as_mut().reset((now + ROOM_ROUND).into());
        Poll::Ready(Ok(()))
    }

    /// The error of a message that takes too long to arrive.
    fn check_progress(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        let Some(message) = &self.message else { return Poll::Pending };
        let late =
            self.late.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(message.deadline.into())));
        ready!(late.as_mut().poll(cx));
        let text = format!("the message arrives too slowly: {} bytes are missing", message.left);
        Poll::Ready(status_of(Failure::field("body", text)))
    }

    /// The error of a body that ends within a message.
    fn truncation(&self) -> Option<Status> {
        let missing = match &self.message {
            Some(message) => format!("{} bytes of a message", message.left),
            None if self.have == 0 => return None,
            None => format!("{} of the {PREFIX} bytes before a message", PREFIX - self.have),
        };
        Some(status_of(Failure::field("body", format!("the call ended early: {missing} are missing"))))
    }

    fn fail(&mut self, status: Status) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        (self.over, self.message, self.pending) = (true, None, Bytes::new());
        Poll::Ready(Some(Err(status.into())))
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
            if this.over {
                return Poll::Ready(None);
            }
            match this.charge() {
                Err(status) => return this.fail(status),
                Ok((0, true)) => {}
                Ok((0, false)) => match ready!(this.wait(cx)) {
                    Ok(()) => continue,
                    Err(status) => return this.fail(status),
                },
                Ok((bytes, _)) => {
                    this.waiting = None;
                    return Poll::Ready(Some(Ok(Frame::data(this.pending.split_to(bytes)))));
                }
            }
            match Pin::new(&mut this.inner).poll_frame(cx) {
                Poll::Pending => {
                    let status = ready!(this.check_progress(cx));
                    return this.fail(status);
                }
                Poll::Ready(None) => {
                    this.over = true;
                    return Poll::Ready(this.truncation().map(|status| Err(status.into())));
                }
                Poll::Ready(Some(frame)) => match frame.map_err(Into::into)?.into_data() {
                    Ok(data) => this.pending = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.pending.is_empty() && self.have == 0 && self.inner.is_end_stream()
    }
}

/// The body of an answer, whose frames keep the charges of the call until the transport has sent them.
pub(crate) struct AnswerBody {
    inner: tonic::body::Body,
    charges: Arc<Charges>,
    activity: Arc<Activity>,
    /// The charge of the call.
    call: Arc<Charge>,
    /// Present while the transport has not taken an answer that is ready, for example because the peer does not read.
    owed: Option<LeavingBytes>,
}

impl AnswerBody {
    pub(crate) fn new(
        inner: tonic::body::Body,
        charges: Arc<Charges>,
        activity: Arc<Activity>,
        call: Arc<Charge>,
    ) -> AnswerBody {
        let owed = Some(activity.leaving(0));
        AnswerBody { inner, charges, activity, call, owed }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        this.owed = None;
        let frame = ready!(Pin::new(&mut this.inner).poll_frame(cx));
        if let Some(Ok(_)) = &frame {
            this.owed = Some(this.activity.leaving(0));
        }
        Poll::Ready(frame.map(|frame| {
            frame.map(|frame| {
                frame.map_data(|bytes| {
                    let leaving = this.activity.leaving(bytes.len());
                    guarded(bytes, (this.charges.take_leaving(), Arc::clone(&this.call), leaving))
                })
            })
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
#[path = "body_tests.rs"]
mod tests;
