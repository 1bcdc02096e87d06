//! A connection whose calls carry the client's token, and large rows without a copy.

use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{HeaderValue, Request, Response, header};
use tonic::transport;

use super::apart::{ApartBody, RowsApart};

/// A connection to a service. Clones share it.
#[derive(Clone, Debug)]
pub struct Channel {
    inner: transport::Channel,
    authorization: Option<HeaderValue>,
}

impl Channel {
    /// Adds an `authorization` header, if there is one, to every call over `inner`.
    #[must_use]
    pub fn new(inner: transport::Channel, authorization: Option<HeaderValue>) -> Channel {
        Channel { inner, authorization }
    }
}

/// Without a token.
impl From<transport::Channel> for Channel {
    fn from(inner: transport::Channel) -> Channel {
        Channel { inner, authorization: None }
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Body>;
    type Error = transport::Error;
    type Future = transport::channel::ResponseFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(token) = &self.authorization {
            request.headers_mut().insert(header::AUTHORIZATION, token.clone());
        }
        if let Some(rows) = request.extensions_mut().remove::<RowsApart>() {
            request = request.map(|message| Body::new(ApartBody::new(message, rows)));
        }
        self.inner.call(request)
    }
}
