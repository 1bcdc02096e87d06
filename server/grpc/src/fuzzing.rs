//! Entry points for fuzz targets; not part of the interface.

use std::sync::Arc;
use std::time::{Duration, Instant};

use expertd_core::backend::{
    Answer, Backend, ClientKey, DrainFuture, DrainReport, ModelInfo, Pending, ReloadFuture, ReloadRequest,
    Request, RequestId, ServiceState, ServiceStatus, SubmitError,
};
use expertd_core::fuzzing::{check_request, model, receipt};
use expertd_core::listen::Address;
use expertd_core::validate::Envelope;
use expertd_proto::v1::ForwardRequest;
use http::{HeaderMap, HeaderValue};
use prost::Message as _;
use tokio::sync::{oneshot, watch};

use crate::access::tokens;
use crate::service::call::deadline;
use crate::service::forward::validate;
use crate::status::status_of;

/// Decodes and validates a `ForwardRequest`.
///
/// # Panics
/// If an accepted request breaks a promise of [`Request`].
pub fn request(data: &[u8]) {
    if let Ok(message) = ForwardRequest::decode(data) {
        check(message);
    }
}

fn check(message: ForwardRequest) {
    let model = model();
    let envelope = Envelope { id: RequestId(1), client: ClientKey(1), deadline: None };
    let request = match validate(&model, message, envelope) {
        Ok(Some(request)) => request,
        Ok(None) => return,
        Err(failure) => {
            let status = status_of(failure);
            assert!(status.message().len() <= 4096, "a status message of {} bytes", status.message().len());
            return;
        }
    };
    assert_eq!(request.rows.len(), request.tokens * model.hidden * request.dtype.size());
    check_request(&model, &request);
}

/// Parses a text as a `grpc-timeout`, an address and a token file.
///
/// # Panics
/// If a deadline lies in the past, or an address changes when it is printed and parsed again.
pub fn texts(data: &[u8]) {
    if let Ok(value) = HeaderValue::from_bytes(data) {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", value);
        let now = Instant::now();
        if let Ok(Some(at)) = deadline(&headers, now) {
            assert!(at >= now, "a deadline before the call");
        }
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(address) = text.parse::<Address>() {
        let again = address.to_string().parse::<Address>();
        assert_eq!(again.ok(), Some(address), "{text:?} changes when it is printed");
    }
    let _ = tokens::parse(text);
}

/// A backend that returns the rows of every request.
struct Echo {
    model: Arc<ModelInfo>,
    state: watch::Sender<ServiceState>,
}

/// Makes a backend that returns the rows of every request of the targets' model.
#[must_use]
pub fn echo() -> Arc<dyn Backend> {
    echo_of(model())
}

/// Makes a backend that returns the rows of every request of a model.
#[must_use]
pub fn echo_of(model: ModelInfo) -> Arc<dyn Backend> {
    Arc::new(Echo { model: Arc::new(model), state: watch::channel(ServiceState::Serving).0 })
}

impl Backend for Echo {
    fn model(&self) -> Arc<ModelInfo> {
        Arc::clone(&self.model)
    }

    fn submit(&self, request: Request) -> Result<Pending, SubmitError> {
        let (sender, pending) = oneshot::channel();
        let receipt = receipt(&request);
        let _ = sender.send(Ok(Answer { rows: request.rows, receipt }));
        Ok(pending)
    }

    fn status(&self) -> ServiceStatus {
        ServiceStatus::default()
    }

    fn watch_state(&self) -> watch::Receiver<ServiceState> {
        self.state.subscribe()
    }

    fn reload(&self, _: ReloadRequest) -> ReloadFuture {
        Box::pin(std::future::ready(Err("there are no other weights".to_owned())))
    }

    fn drain(&self, _: Option<Duration>) -> DrainFuture {
        Box::pin(std::future::ready(DrainReport { requests_dropped: 0 }))
    }
}
