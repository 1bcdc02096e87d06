//! `expertd.v1.Network`: the call that opens a session of a client on another host. The session ends with the call.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use expertd_core::backend::{Backend, ClientKey};
use expertd_core::failure::{Failure, one_line};
use expertd_proto::v1::network_server::Network;
use expertd_proto::v1::network_session_response::Message;
use expertd_proto::v1::{
    NetworkSessionOpened, NetworkSessionRequest, NetworkSessionResponse, OpenNetworkSession,
};
use futures_util::stream::unfold;
use futures_util::{Stream, StreamExt as _};
use tokio::sync::oneshot;
use tonic::{Request, Response, Status, Streaming};

use super::call::Call;
use super::convert;
use super::moe::call_of;
use crate::status::status_of;

/// Opens sessions of clients on other hosts.
pub trait NetworkOpener: Send + Sync {
    /// Begins to open a session for a client.
    fn open(&self, client: ClientKey, open: OpenNetworkSession) -> NetworkSession;
}

/// A session that is being opened or is open.
pub struct NetworkSession {
    /// The answer to the client, without the model, or the error message of a refusal.
    pub opened: oneshot::Receiver<Result<NetworkSessionOpened, String>>,
    /// Why the session has ended.
    pub ended: oneshot::Receiver<String>,
    /// Ends the session when it is dropped.
    pub guard: Box<dyn Send + Sync>,
}

/// `expertd.v1.Network` over a backend.
pub(crate) struct NetworkService {
    pub(crate) backend: Arc<dyn Backend>,
    /// `None` without `--network-listen`.
    pub(crate) sessions: Option<Arc<dyn NetworkOpener>>,
}

/// How often the token of an open session is checked.
const CHECK_PASS: Duration = Duration::from_secs(5);

/// The answers of a call.
type Answers = Pin<Box<dyn Stream<Item = Result<NetworkSessionResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Network for NetworkService {
    type SessionStream = Answers;

    async fn session(
        &self,
        request: Request<Streaming<NetworkSessionRequest>>,
    ) -> Result<Response<Answers>, Status> {
        let Some(sessions) = &self.sessions else {
            let text = "this service has no network sessions; start it with --network-listen";
            return Err(Status::failed_precondition(text));
        };
        let call = call_of(&request)?;
        let mut inbound = request.into_inner();
        let first = inbound.next().await.transpose()?.and_then(|message| message.open);
        let Some(asked) = first else {
            return Err(status_of(Failure::field("open", "the first message must open a session")));
        };
        let NetworkSession { opened, ended, guard } = sessions.open(call.client, asked);
        let opened = match opened.await {
            Ok(Ok(opened)) => opened,
            Ok(Err(reason)) => return Err(Status::resource_exhausted(one_line(&reason))),
            Err(_) => return Err(Status::internal("the session's agent could not be started")),
        };
        let model = Some(convert::model(&self.backend.model()));
        let first = Message::Opened(NetworkSessionOpened { model, ..opened });
        let open = OpenSession { first: Some(first), inbound, call, ended, _guard: guard, is_over: false };
        let answers =
            unfold(open, |mut open| async move { open.next().await.map(|answer| (Ok(answer), open)) });
        Ok(Response::new(Box::pin(answers)))
    }
}

/// An open session.
struct OpenSession {
    first: Option<Message>,
    inbound: Streaming<NetworkSessionRequest>,
    call: Call,
    ended: oneshot::Receiver<String>,
    _guard: Box<dyn Send + Sync>,
    is_over: bool,
}

impl OpenSession {
    /// The next answer; `None` once the client has ended the session, or was told its end.
    async fn next(&mut self) -> Option<NetworkSessionResponse> {
        if self.is_over {
            return None;
        }
        if let Some(first) = self.first.take() {
            return Some(NetworkSessionResponse { message: Some(first) });
        }
        let mut checks = tokio::time::interval(CHECK_PASS);
        let reason = loop {
            tokio::select! {
                reason = &mut self.ended => break reason.unwrap_or_else(|_| "its agent has ended".to_owned()),
                () = self.call.closing.cancelled() => break "the service ends".to_owned(),
                // Rows do not travel over this call, so that a client may compute without a word here.
                _ = checks.tick() => if self.call.pass.as_mut().is_some_and(|pass| !pass.is_valid()) {
                    break "the token is no longer known to the service".to_owned();
                },
                message = self.inbound.next() => match message {
                    // The client lives.
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return None,
                },
            }
        };
        self.is_over = true;
        Some(NetworkSessionResponse { message: Some(Message::Ended(one_line(&reason))) })
    }
}
