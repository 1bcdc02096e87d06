//! The first layer of every HTTP/2 call: credentials, deadline, charges and routing to a service.

use std::convert::Infallible;
use std::future::Future;
use std::hash::{BuildHasher as _, RandomState};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Instant;

use expertd_proto::transport::CONTROL_MESSAGE_BYTES;
use expertd_proto::v1::moe_server::MoeServer;
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use hyper::service::Service;
use metrics::{Counter, counter};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Code, Status};
use tower::Service as _;

use super::connections::count_end;
use super::table::ConnectionTable;
use crate::api::access::{Access, Peer};
use crate::api::framing::answer::ResponseBody;
use crate::api::framing::body::{RequestBody, Terms};
use crate::api::framing::budget::Budget;
use crate::api::framing::charges::Charges;
use crate::api::framing::connection::{Connection, Owner};
use crate::api::service::call::{Call, deadline};
use crate::api::service::description::ModelDescription;
use crate::api::service::failure::{Failure, code_name};
use crate::api::service::moe::MoeService;
use crate::backend::{Backend, ClientKey};
use crate::telemetry::{RequestMetrics, TraceParent, names};

const FORWARD: &str = "/expertd.v1.Moe/Forward";
const FORWARD_STREAM: &str = "/expertd.v1.Moe/ForwardStream";
const GET_MODEL: &str = "/expertd.v1.Moe/GetModel";
const MOE: &str = "/expertd.v1.Moe/";
/// Largest request of a call without rows, in bytes: names, and reflection requests.
const CONTROL_REQUEST_BYTES: usize = 4 << 10;
/// Admin; its requests carry placements.
const ADMIN: &str = "/expertd.v1.Admin/";
const HEALTH: &str = "/grpc.health.v1.Health/";
/// Bytes charged for an answer of reflection, ListModels or Admin.
const DESCRIPTOR_BYTES: usize = 64 << 10;

/// The services of a listener, and the credentials that they require.
pub(in crate::api) struct Services {
    /// Health, reflection and, on its own listener, Admin.
    routes: Routes,
    moe: Option<Public>,
    pub(super) budget: Arc<Budget>,
    pub(super) access: Arc<Access>,
}

/// The public service with its bounds.
struct Public {
    server: MoeServer<MoeService>,
    message_limit: usize,
    backend: Arc<dyn Backend>,
    metrics: Arc<RequestMetrics>,
    description: Arc<ModelDescription>,
    closing: CancellationToken,
}

impl Services {
    /// The services of the admin listener.
    pub(in crate::api) fn control(routes: Routes, budget: Arc<Budget>, access: Arc<Access>) -> Services {
        Services { routes, moe: None, budget, access }
    }

    /// The services of a public listener.
    pub(in crate::api) fn public(
        routes: Routes,
        backend: Arc<dyn Backend>,
        budget: Arc<Budget>,
        access: Arc<Access>,
        closing: CancellationToken,
    ) -> Services {
        let message_limit = backend.model().limits.max_message_bytes;
        let metrics = Arc::new(RequestMetrics::new("Forward"));
        let description = Arc::new(ModelDescription::default());
        let service = MoeService::new(Arc::clone(&backend), Arc::clone(&metrics), Arc::clone(&description));
        let server = MoeServer::new(service)
            .max_decoding_message_size(message_limit)
            .max_encoding_message_size(usize::MAX);
        let moe = Some(Public { server, message_limit, backend, metrics, description, closing });
        Services { routes, moe, budget, access }
    }
}

/// The HTTP/2 service of one connection.
pub(in crate::api) struct Front {
    services: Arc<Services>,
    connection: Arc<Connection>,
    table: Arc<ConnectionTable>,
    peer: Peer,
    /// The client of the last authenticated call.
    client: Mutex<Option<Client>>,
}

/// An authenticated client of a connection.
#[derive(Clone)]
struct Client {
    name: Arc<str>,
    key: ClientKey,
    owner: Arc<Owner>,
    calls: Counter,
    tokens: Counter,
}

/// The owner that a call is charged to.
struct Caller {
    key: ClientKey,
    owner: Arc<Owner>,
    /// Counts the tokens of a client that has a name.
    tokens: Option<Counter>,
    /// The client's name.
    name: Option<Arc<str>>,
}

/// The key of a named client, which its connections and sessions share.
pub(crate) fn client_key(name: &str) -> ClientKey {
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    ClientKey(HASHER.hash_one(name))
}

impl Front {
    pub(in crate::api) fn new(
        services: Arc<Services>,
        connection: Arc<Connection>,
        table: Arc<ConnectionTable>,
        peer: Peer,
    ) -> Front {
        Front { services, connection, table, peer, client: Mutex::default() }
    }

    /// Identifies the caller by its credentials and checks the client's number of connections.
    fn caller(&self, headers: &HeaderMap) -> Result<Caller, Failure> {
        let Services { access, moe, .. } = &*self.services;
        let name = match moe {
            Some(_) => access.client(headers, &self.peer)?,
            None => Some(access.admin(headers, &self.peer)?),
        };
        let Some(name) = name else {
            let owner = Arc::clone(&self.connection.peer);
            return Ok(Caller { key: self.connection.key, owner, tokens: None, name: None });
        };
        self.table.authenticate(&self.connection);
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        if client.as_ref().is_none_or(|client| client.name != name) {
            let owner = self.table.client(&name);
            let connections = owner.connections.fetch_add(1, Ordering::Relaxed) + 1;
            let calls = counter!(names::CLIENT_CALLS_TOTAL, "client" => name.to_string());
            let tokens = counter!(names::CLIENT_TOKENS_TOTAL, "client" => name.to_string());
            tokens.increment(0);
            let key = client_key(&name);
            let left = client.replace(Client { name, key, owner, calls, tokens });
            left.iter().for_each(Client::leave);
            if connections > self.table.per_client() {
                count_end("client_limit");
                self.connection.close.cancel();
                return Err(Failure::TooManyConnections { limit: self.table.per_client() });
            }
        }
        match &*client {
            Some(client) => {
                client.calls.increment(1);
                let (owner, tokens) = (Arc::clone(&client.owner), Some(client.tokens.clone()));
                Ok(Caller { key: client.key, owner, tokens, name: Some(Arc::clone(&client.name)) })
            }
            None => Err(Failure::Unauthenticated("the credentials were lost")),
        }
    }
}

impl Client {
    fn leave(&self) {
        self.owner.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.client.get_mut().unwrap_or_else(PoisonError::into_inner).iter().for_each(Client::leave);
    }
}

type Answer = Result<Response<ResponseBody>, Infallible>;
type AnswerFuture = Pin<Box<dyn Future<Output = Answer> + Send>>;

impl Service<Request<Incoming>> for Front {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = AnswerFuture;

    fn call(&self, request: Request<Incoming>) -> AnswerFuture {
        let arrived = Instant::now();
        self.connection.note_activity();
        let caller = match self.caller(request.headers()) {
            Ok(caller) => caller,
            Err(failure) => return refused(failure),
        };
        let Services { budget, moe, access, .. } = &*self.services;
        let path = request.uri().path();
        let (streaming, unary) = (path == FORWARD_STREAM, path == FORWARD);
        let forward = streaming || unary;
        let public = moe.as_ref().filter(|_| path.starts_with(MOE));
        let (answer_bytes, limit) = match public {
            Some(public) if forward => (0, public.message_limit),
            // The size of its answer changes with the placement.
            Some(public) if path == GET_MODEL => {
                (public.description.encoded(&public.backend.model()).len(), CONTROL_REQUEST_BYTES)
            }
            None if moe.is_none() && path.starts_with(ADMIN) => (DESCRIPTOR_BYTES, CONTROL_MESSAGE_BYTES),
            None if path.starts_with(HEALTH) => (0, CONTROL_REQUEST_BYTES),
            _ => (DESCRIPTOR_BYTES, CONTROL_REQUEST_BYTES),
        };
        let held_bytes = answer_bytes + header_bytes(request.headers());
        let Ok(charge) = budget.try_call(&self.connection, &caller.owner, held_bytes) else {
            return refused(Failure::NoRoom);
        };
        let terms = Terms {
            budget: Arc::clone(budget),
            connection: Arc::clone(&self.connection),
            owner: caller.owner,
            limit,
            // A reflection stream carries several requests.
            streaming: streaming || public.is_none(),
            forward: public.is_some() && forward,
        };
        let charges = Arc::new(Charges::default());
        let body_charges = Arc::clone(&charges);
        let Some(public) = public else {
            let request =
                request.map(|body| tonic::body::Body::new(RequestBody::new(body, terms, body_charges)));
            let answer = self.services.routes.clone().call(request);
            return Box::pin(
                async move { Ok(answer.await?.map(|body| ResponseBody::plain(body, Some(charge)))) },
            );
        };
        let deadline = match deadline(request.headers(), arrived) {
            Ok(deadline) => deadline,
            Err(failure) => return refused(failure),
        };
        let parent = TraceParent::of(request.headers());
        let trace = parent.as_ref().filter(|_| unary).and_then(|parent| parent.begin("Forward", arrived));
        let call = Call {
            client: caller.key,
            client_tokens: caller.tokens,
            deadline,
            charges: Arc::clone(&charges),
            pass: caller.name.filter(|_| streaming).and_then(|name| access.pass(request.headers(), &name)),
            closing: public.closing.clone(),
            parent: parent.filter(|_| streaming),
            trace: trace.clone(),
        };
        let mut request = request.map(|body| RequestBody::new(body, terms, body_charges));
        request.extensions_mut().insert(call);
        let answer = public.server.clone().call(request);
        if !unary {
            return Box::pin(async move {
                Ok(answer.await?.map(|body| ResponseBody::charged(body, charges, Some(charge), streaming)))
            });
        }
        let metrics = Arc::clone(&public.metrics);
        Box::pin(async move {
            let response = until(deadline, answer).await?;
            let code = code_of(&response);
            metrics.answered(code_name(code), charges.complete_at().unwrap_or(arrived).elapsed());
            if let Some(trace) = trace {
                trace.end(code);
            }
            Ok(response.map(|body| ResponseBody::charged(body, charges, Some(charge), false)))
        })
    }
}

/// Bytes of a call's headers, as HTTP/2 counts them for its limit.
fn header_bytes(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum()
}

fn refused(failure: Failure) -> AnswerFuture {
    let response = Status::from(failure).into_http().map(|body| ResponseBody::plain(body, None));
    Box::pin(async move { Ok(response) })
}

/// The answer, or DEADLINE_EXCEEDED if it is not ready at `deadline`.
async fn until<B: Default>(
    deadline: Option<Instant>,
    answer: impl Future<Output = Result<Response<B>, Infallible>>,
) -> Result<Response<B>, Infallible> {
    let Some(deadline) = deadline else { return answer.await };
    match tokio::time::timeout_at(deadline.into(), answer).await {
        Ok(answer) => answer,
        Err(_) => Ok(Status::from(Failure::DeadlineExceeded).into_http()),
    }
}

/// The status of a unary answer: in the headers of an error, in the trailers of a success.
fn code_of<B>(response: &Response<B>) -> Code {
    match response.headers().get("grpc-status") {
        Some(value) => Code::from_bytes(value.as_bytes()),
        None => Code::Ok,
    }
}
