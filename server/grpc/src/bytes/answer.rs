//! The body of an answer, whose frames keep the charges of the call until the transport has sent them.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tonic::Status;

use super::activity::{Activity, Leaving};
use super::budget::Charge;
use super::charges::{Charges, guarded};

/// The body of an answer.
pub(crate) struct AnswerBody {
    inner: tonic::body::Body,
    charges: Arc<Charges>,
    activity: Arc<Activity>,
    /// The charge of the call.
    call: Arc<Charge>,
    /// Present while the transport has yet to take what is ready: a peer that does not read keeps it.
    owed: Option<Leaving>,
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
