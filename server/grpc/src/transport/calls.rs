//! What happens to every call before its service: its caller is identified, then it is charged and gets its deadline and metrics.

use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use expertd_proto::transport::CONTROL_MESSAGE_BYTES;
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use metrics::{Counter, counter};
use prost::Message as _;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::body::Body;
use tonic::service::Routes;

use super::places::{ConnectionPlace, ConnectionPlaces, Origin, Seat, count_end};
use crate::access::{Access, Peer};
use crate::bytes::activity::{Activity, ConnectionTimeouts};
use crate::bytes::body::{AnswerBody, RequestBody, Terms};
use crate::bytes::budget::{Budget, CALL_BYTES, Charges, Owner};
use crate::service::call::{Call, deadline};
use crate::service::convert;
use crate::status::status_of;
use expertd_core::backend::{Backend, ClientKey, ConnectionKey, client_key, next_connection};
use expertd_core::failure::Failure;
use expertd_telemetry::{RequestMetrics, TraceParent, code_name, names};

const FORWARD: &str = "/expertd.v1.Moe/Forward";
const FORWARD_STREAM: &str = "/expertd.v1.Moe/ForwardStream";
const NETWORK_SESSION: &str = "/expertd.v1.Network/Session";
const GET_MODEL: &str = "/expertd.v1.Moe/GetModel";
const MOE: &str = "/expertd.v1.Moe/";
const HEALTH: &str = "/grpc.health.v1.Health/";
/// Largest request of a call without rows, in bytes: names, and reflection requests.
const CONTROL_REQUEST_BYTES: usize = 4 << 10;
/// Largest message of a call that opens a network session: the metadata of an agent with many network devices.
const NETWORK_REQUEST_BYTES: usize = 64 << 10;
/// Bytes charged for an answer of reflection, ListModels or Admin.
const DESCRIPTOR_BYTES: usize = 64 << 10;

/// The services of a listener, and the credentials that they require.
pub(crate) struct Services {
    pub(super) routes: TowerToHyperService<Routes>,
    pub(super) access: Arc<Access>,
    pub(super) budget: Arc<Budget>,
    /// `None` for the admin listener.
    pub(super) public: Option<Public>,
}

/// What calls of the public service need besides.
pub(crate) struct Public {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) metrics: Arc<RequestMetrics>,
    pub(super) closing: CancellationToken,
}

impl Services {
    /// Whether a connection from `origin` has to authenticate itself.
    pub(super) fn must_authenticate(&self, origin: Origin) -> bool {
        matches!(origin, Origin::Address(_)) && (self.public.is_none() || self.access.required())
    }
}

/// The peer of a connection and, once it has called, its client.
pub(crate) struct ServedConnection {
    pub(super) key: ConnectionKey,
    /// Ends the connection once its calls have finished.
    pub(super) close: CancellationToken,
    services: Arc<Services>,
    peer: Peer,
    activity: Arc<Activity>,
    timeouts: ConnectionTimeouts,
    places: Arc<ConnectionPlaces>,
    /// Owner of calls without an authenticated client.
    owner: Arc<Owner>,
    known: Mutex<Known>,
}

/// The client of the last authenticated call.
enum Known {
    Nobody,
    Named(Named),
    /// The client had too many connections; this one stays refused.
    Refused(usize),
}

struct Named {
    name: Arc<str>,
    key: ClientKey,
    seat: Seat,
    calls: Counter,
    tokens: Counter,
}

/// The caller of one call.
struct CallIdentity {
    key: ClientKey,
    owner: Arc<Owner>,
    /// Counts the tokens of a client that has a name.
    tokens: Option<Counter>,
    name: Option<Arc<str>>,
}

impl ServedConnection {
    pub(super) fn new(
        services: &Arc<Services>,
        peer: Peer,
        activity: &Arc<Activity>,
        timeouts: ConnectionTimeouts,
        places: &Arc<ConnectionPlaces>,
        place: &ConnectionPlace,
    ) -> ServedConnection {
        ServedConnection {
            key: next_connection(),
            close: CancellationToken::new(),
            services: Arc::clone(services),
            peer,
            activity: Arc::clone(activity),
            timeouts,
            places: Arc::clone(places),
            owner: Arc::clone(place.owner()),
            known: Mutex::new(Known::Nobody),
        }
    }

    /// Identifies the caller by its credentials and checks the client's number of connections.
    fn caller(&self, headers: &HeaderMap) -> Result<CallIdentity, Failure> {
        let Services { access, public, .. } = &*self.services;
        self.activity.call();
        let name = match public {
            Some(_) => access.client(headers, &self.peer)?,
            None => Some(access.admin(headers, &self.peer)?),
        };
        let Some(name) = name else {
            return Ok(CallIdentity {
                key: ClientKey(self.key.0),
                owner: Arc::clone(&self.owner),
                tokens: None,
                name: None,
            });
        };
        self.activity.authenticate();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let named = match &*known {
            Known::Refused(limit) => return Err(Failure::TooManyConnections { limit: *limit }),
            Known::Named(named) if named.name == name => named,
            _ => match self.places.join(&name) {
                Ok(seat) => {
                    *known = Known::Named(Named::new(name, seat));
                    let Known::Named(named) = &*known else { return Err(Failure::Draining) };
                    named
                }
                Err(limit) => {
                    *known = Known::Refused(limit);
                    count_end("client_limit");
                    self.close.cancel();
                    return Err(Failure::TooManyConnections { limit });
                }
            },
        };
        named.calls.increment(1);
        let (owner, tokens) = (Arc::clone(named.seat.owner()), Some(named.tokens.clone()));
        Ok(CallIdentity { key: named.key, owner, tokens, name: Some(Arc::clone(&named.name)) })
    }

    /// Answers a call. It is charged before this returns, and its charge is held until the body of the answer has ended.
    pub(super) fn answer(
        &self,
        request: Request<Incoming>,
    ) -> impl Future<Output = HttpAnswer> + Send + use<> {
        let caller = self.caller(request.headers());
        let admitted = caller.and_then(|caller| self.admit(caller, request));
        async move {
            match admitted {
                Ok(answer) => answer.await,
                Err(failure) => Ok(status_of(failure).into_http()),
            }
        }
    }

    /// Charges a call and its messages, and passes it to its service. The answer is DEADLINE_EXCEEDED if it is not ready in time.
    fn admit(
        &self,
        caller: CallIdentity,
        mut request: Request<Incoming>,
    ) -> Result<impl Future<Output = HttpAnswer> + Send + use<>, Failure> {
        let arrived = Instant::now();
        let Services { budget, public, access, .. } = &*self.services;
        let path = request.uri().path();
        let (streaming, unary) = (path == FORWARD_STREAM, path == FORWARD);
        let public = public.as_ref().filter(|_| path.starts_with(MOE) || path == NETWORK_SESSION);
        let forward = public.is_some() && (streaming || unary);
        let network = public.is_some() && path == NETWORK_SESSION;
        let (answer_bytes, limit) = match public {
            Some(public) if forward => (0, public.backend.model().limits.max_message_bytes),
            Some(public) if path == GET_MODEL => {
                (convert::model(&public.backend.model()).encoded_len(), CONTROL_REQUEST_BYTES)
            }
            _ if network => (DESCRIPTOR_BYTES, NETWORK_REQUEST_BYTES),
            _ if path.starts_with(HEALTH) => (0, CONTROL_REQUEST_BYTES),
            _ if self.services.public.is_none() => (DESCRIPTOR_BYTES, CONTROL_MESSAGE_BYTES),
            _ => (DESCRIPTOR_BYTES, CONTROL_REQUEST_BYTES),
        };
        let held = CALL_BYTES + answer_bytes + header_bytes(request.headers());
        let charge = budget.charge(&caller.owner, 0, held).ok_or(Failure::NoRoom)?;
        let (charge, charges) = (Arc::new(charge), Arc::new(Charges::default()));
        let terms = Terms {
            budget: Arc::clone(budget),
            owner: caller.owner,
            activity: Arc::clone(&self.activity),
            timeouts: self.timeouts,
            limit,
            // A reflection stream carries several requests.
            streaming: streaming || network || public.is_none(),
            forward,
        };
        let mut deadline_at = None;
        let mut of_unary = None;
        if let Some(public) = public {
            deadline_at = deadline(request.headers(), arrived)?;
            let parent = TraceParent::of(request.headers());
            let trace = parent.as_ref().filter(|_| unary).and_then(|parent| parent.begin("Forward", arrived));
            of_unary = unary.then(|| (Arc::clone(&public.metrics), trace.clone()));
            let headers = request.headers();
            let call = Call {
                client: caller.key,
                connection: self.key,
                client_tokens: caller.tokens,
                deadline: deadline_at,
                charges: Arc::clone(&charges),
                pass: caller
                    .name
                    .filter(|_| streaming || network)
                    .and_then(|name| access.pass(headers, &name)),
                closing: public.closing.clone(),
                parent: parent.filter(|_| streaming),
                trace,
            };
            request.extensions_mut().insert(call);
        }
        let of_body = Arc::clone(&charges);
        let request = request.map(|body| Body::new(RequestBody::new(body, terms, of_body)));
        let (answer, activity) = (self.services.routes.call(request), Arc::clone(&self.activity));
        Ok(async move {
            let response = match of_unary {
                None => answer.await?,
                Some((metrics, trace)) => {
                    let response = until(deadline_at, answer).await?;
                    let code = code_of(&response);
                    metrics
                        .answered(code_name(code as u32), charges.complete_at().unwrap_or(arrived).elapsed());
                    trace.iter().for_each(|trace| trace.end(code as u32));
                    response
                }
            };
            Ok(response.map(|body| Body::new(AnswerBody::new(body, charges, activity, charge))))
        })
    }
}

impl Named {
    fn new(name: Arc<str>, seat: Seat) -> Named {
        let calls = counter!(names::CLIENT_CALLS_TOTAL, "client" => name.to_string());
        let tokens = counter!(names::CLIENT_TOKENS_TOTAL, "client" => name.to_string());
        tokens.increment(0);
        Named { key: client_key(&name), name, seat, calls, tokens }
    }
}

type HttpAnswer = Result<Response<Body>, Infallible>;

/// Bytes of a call's headers, as HTTP/2 counts them for its limit.
fn header_bytes(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 32).sum()
}

/// The answer, or DEADLINE_EXCEEDED if it is not ready at `deadline`.
async fn until(deadline: Option<Instant>, answer: impl Future<Output = HttpAnswer>) -> HttpAnswer {
    let Some(deadline) = deadline else { return answer.await };
    match tokio::time::timeout_at(deadline.into(), answer).await {
        Ok(answer) => answer,
        Err(_) => Ok(status_of(Failure::DeadlineExceeded).into_http()),
    }
}

/// The status of a unary answer: in the headers of an error, in the trailers of a success.
fn code_of<B>(response: &Response<B>) -> Code {
    match response.headers().get("grpc-status") {
        Some(value) => Code::from_bytes(value.as_bytes()),
        None => Code::Ok,
    }
}
