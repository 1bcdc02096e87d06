//! A thin client: it connects with the service's limits, builds requests and, on request, retries them.

use std::time::{Duration, Instant};

use expertd_proto::transport::CONTROL_MESSAGE_BYTES;
use tonic::{Code, Request, Status, Streaming};

use crate::MAX_TIMEOUT;
use crate::loss::{address_hint, connection_loss};
use crate::retry::RetryPolicy;
use crate::transport::{self, Channel, ConnectError, Credentials, RowsApart};
use expertd_proto::v1::moe_client::MoeClient;
use expertd_proto::v1::{
    ForwardRequest, ForwardResponse, ForwardStreamRequest, ForwardStreamResponse, GetModelRequest,
    GetModelResponse, ListModelsRequest, ModelSummary, forward_request, forward_stream_response,
};

/// Time limit of a call that asks what a service holds. A service that neither answers nor closes its connection does not hold
/// its client up.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(15);
/// How much later than its deadline a call ends if neither the service nor the channel ends it.
const GRACE: Duration = Duration::from_millis(100);
/// Largest number of experts per token in an answer that returns the routing.
const MAX_TOP_K: usize = 256;

/// Metadata of a call with the number of its layer, by which proxies can route.
pub const LAYER_METADATA: &str = "expertd-layer";

/// An error that prevents a client from being created.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The service cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// `GetModel` failed.
    #[error("GetModel failed: {} ({:?}){}", .0.message(), .0.code(), address_hint(.0))]
    Model(Box<Status>),
}

/// A connection to one service. Clones share it.
#[derive(Clone, Debug)]
pub struct Client {
    moe: MoeClient<Channel>,
    retry: Option<RetryPolicy>,
}

impl Client {
    /// Connects to `HOST:PORT`, `http://HOST:PORT` or `unix:/PATH`, and adopts the service's message limits.
    ///
    /// # Errors
    /// [`ClientError`] if the service cannot be reached or `GetModel` fails.
    pub async fn connect(address: &str) -> Result<Client, ClientError> {
        Client::connect_with(address, &Credentials::default()).await
    }

    /// Like [`connect`](Self::connect), with TLS and credentials.
    ///
    /// # Errors
    /// [`ClientError`] if a file cannot be used, nothing answers there, or not with a model.
    pub async fn connect_with(address: &str, credentials: &Credentials) -> Result<Client, ClientError> {
        Client::over(transport::connect_with(address, credentials).await?).await
    }

    /// Like [`connect`](Self::connect), over a given channel.
    ///
    /// # Errors
    /// [`ClientError::Model`] if `GetModel` fails.
    pub async fn over(channel: impl Into<Channel>) -> Result<Client, ClientError> {
        let mut moe = MoeClient::new(channel.into()).max_decoding_message_size(CONTROL_MESSAGE_BYTES);
        let model = answer_in_time(moe.get_model(GetModelRequest::default()))
            .await
            .map_err(|status| ClientError::Model(Box::new(status)))?;
        let limit = model.limits.as_ref().map_or(0, |limits| limits.max_message_bytes);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX).max(CONTROL_MESSAGE_BYTES);
        Ok(Client { moe: moe.max_decoding_message_size(limit).max_encoding_message_size(limit), retry: None })
    }

    /// Retries failed calls within the limits of `policy`. Without this, no call is retried.
    #[must_use]
    pub fn with_retry(mut self, policy: RetryPolicy) -> Client {
        self.retry = Some(policy);
        self
    }

    /// The generated client with the limits of this one.
    #[must_use]
    pub fn raw(&self) -> MoeClient<Channel> {
        self.moe.clone()
    }

    /// Dimensions, layers, limits and versions of one model. The name may be empty if only one model is loaded.
    ///
    /// # Errors
    /// The status of the call.
    pub async fn model(&self, name: &str) -> Result<GetModelResponse, Status> {
        let request = GetModelRequest { name: name.to_owned() };
        answer_in_time(self.raw().get_model(request)).await.map_err(connection_loss)
    }

    /// The loaded models.
    ///
    /// # Errors
    /// The status of the call.
    pub async fn models(&self) -> Result<Vec<ModelSummary>, Status> {
        Ok(answer_in_time(self.raw().list_models(ListModelsRequest {})).await?.models)
    }

    /// Sends one token batch through one layer. `timeout` bounds the whole call, retries included.
    ///
    /// # Errors
    /// The status of the last attempt.
    pub async fn forward(
        &self,
        request: ForwardRequest,
        timeout: Option<Duration>,
    ) -> Result<ForwardResponse, Status> {
        let timeout = timeout.map(|timeout| timeout.min(MAX_TIMEOUT));
        let Some(policy) = self.retry else { return self.forward_once(request, timeout).await };
        let start = Instant::now();
        let mut attempt = 1;
        loop {
            let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
            let status = match self.forward_once(request.clone(), left).await {
                Ok(response) => return Ok(response),
                Err(status) => status,
            };
            let Some(pause) = policy.pause(&status, attempt, start.elapsed()) else { return Err(status) };
            if timeout.is_some_and(|timeout| start.elapsed() + pause >= timeout) {
                return Err(status);
            }
            tokio::time::sleep(pause).await;
            attempt += 1;
        }
    }

    async fn forward_once(
        &self,
        message: ForwardRequest,
        timeout: Option<Duration>,
    ) -> Result<ForwardResponse, Status> {
        send_once(self.raw(), message, timeout).await.map_err(connection_loss)
    }

    /// Opens a stream for several token batches at once. `capacity` is the number of requests that may be queued in
    /// this process before [`RequestSender::send`] waits.
    ///
    /// # Errors
    /// The status that the stream was refused with.
    pub async fn stream(&self, capacity: usize) -> Result<(RequestSender, AnswerReceiver), Status> {
        let (sender, receiver) = tokio::sync::mpsc::channel(capacity.max(1));
        let outbound = tokio_stream::wrappers::ReceiverStream::new(receiver);
        #[allow(unused_mut, reason = "only traces change the metadata")]
        let mut outbound = Request::new(outbound);
        #[cfg(feature = "trace")]
        crate::trace::inject(outbound.metadata_mut());
        let inbound = self.raw().forward_stream(outbound).await.map_err(connection_loss)?.into_inner();
        Ok((RequestSender { sender }, AnswerReceiver { inbound }))
    }
}

/// The answer to a question about models within [`QUESTION_TIMEOUT`].
async fn answer_in_time<T>(
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(QUESTION_TIMEOUT, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded(format!("no answer within {QUESTION_TIMEOUT:?}"))),
    }
}

/// Sends one token batch, without retries. The call names its layer in the metadata `expertd-layer` as well, where
/// proxies can read it.
///
/// What the service says about itself decides neither how much of an answer is held nor how many rows the caller gets: the request
/// does.
pub(crate) async fn send_once(
    moe: MoeClient<Channel>,
    message: ForwardRequest,
    timeout: Option<Duration>,
) -> Result<ForwardResponse, Status> {
    let rows = match &message.payload {
        Some(forward_request::Payload::Inline(rows)) => rows.len(),
        None => 0,
    };
    let routing = if message.return_routing { message.tokens as usize * MAX_TOP_K * 8 } else { 0 };
    let moe = moe.max_decoding_message_size(rows + routing + CONTROL_MESSAGE_BYTES);
    let response = send(moe, message, timeout).await?;
    if response.rows.len() != rows {
        let found = response.rows.len();
        return Err(Status::internal(format!(
            "the service answered with {found} bytes of rows, expected {rows}, as many as it was sent"
        )));
    }
    Ok(response)
}

async fn send(
    mut moe: MoeClient<Channel>,
    mut message: ForwardRequest,
    timeout: Option<Duration>,
) -> Result<ForwardResponse, Status> {
    let layer = message.layer;
    let apart = RowsApart::take(&mut message);
    let mut request = Request::new(message);
    if let Some(rows) = apart {
        request.extensions_mut().insert(rows);
    }
    request.metadata_mut().insert(LAYER_METADATA, layer.into());
    #[cfg(feature = "trace")]
    crate::trace::inject(request.metadata_mut());
    let Some(timeout) = timeout else { return Ok(moe.forward(request).await?.into_inner()) };
    request.set_timeout(timeout);
    let start = Instant::now();
    // The channel's own timer does not run while the channel connects again. The service's answer that a deadline has passed comes first.
    match tokio::time::timeout(timeout + GRACE, moe.forward(request)).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        // It reports CANCELLED if it fires before the service's answer arrives.
        Ok(Err(status)) if status.code() != Code::Cancelled || start.elapsed() < timeout => Err(status),
        Ok(Err(_)) | Err(_) => Err(Status::deadline_exceeded(format!("no answer within {timeout:?}"))),
    }
}

/// The sending half of a stream. Dropping it ends the stream once all answers have arrived.
#[derive(Clone, Debug)]
pub struct RequestSender {
    sender: tokio::sync::mpsc::Sender<ForwardStreamRequest>,
}

impl RequestSender {
    /// Sends a request. No other request in flight on this stream may have the same id.
    ///
    /// # Errors
    /// UNAVAILABLE if the stream has ended.
    pub async fn send(
        &self,
        id: u64,
        request: ForwardRequest,
        timeout: Option<Duration>,
    ) -> Result<(), Status> {
        let timeout_ms = timeout.map_or(0, |t| u32::try_from(t.as_millis()).unwrap_or(u32::MAX).max(1));
        let message = ForwardStreamRequest { id, request: Some(request), timeout_ms };
        self.sender.send(message).await.map_err(|_| Status::unavailable("the stream has ended"))
    }
}

/// The receiving half of a stream.
#[derive(Debug)]
pub struct AnswerReceiver {
    inbound: Streaming<ForwardStreamResponse>,
}

impl AnswerReceiver {
    /// The next answer in order of completion: the request's id and its result. `None` at the end of the stream.
    ///
    /// # Errors
    /// The status that the stream as a whole ended with.
    pub async fn next(&mut self) -> Result<Option<(u64, Result<ForwardResponse, Status>)>, Status> {
        let Some(message) = self.inbound.message().await.map_err(connection_loss)? else { return Ok(None) };
        let result = match message.result {
            Some(forward_stream_response::Result::Response(response)) => Ok(response),
            Some(forward_stream_response::Result::Status(status)) => Err(Status::from(status)),
            None => Err(Status::internal("the service sent an answer with neither response nor status")),
        };
        Ok(Some((message.id, result)))
    }
}
