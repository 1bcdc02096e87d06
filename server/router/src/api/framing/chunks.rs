//! A request body of given chunks, for tests and fuzz targets.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::body::Terms;
use super::budget::Budget;
use super::connection::Connection;
use crate::backend::ClientKey;

/// A body whose chunks are all there.
pub(in crate::api) struct Chunks(pub(in crate::api) VecDeque<Bytes>);

impl Body for Chunks {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Poll::Ready(self.0.pop_front().map(|chunk| Ok(Frame::data(chunk))))
    }
}

/// Terms of a body with rows, on a connection of its own.
pub(in crate::api) fn terms(budget: &Arc<Budget>, limit: usize, streaming: bool) -> Terms {
    let connection = Connection::new(ClientKey(1), Arc::default(), CancellationToken::new());
    let owner = Arc::clone(&connection.peer);
    Terms { budget: Arc::clone(budget), connection, owner, limit, streaming, forward: true }
}
