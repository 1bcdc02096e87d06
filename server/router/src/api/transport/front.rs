//! What every HTTP/2 call passes first: its deadline, its charges, and the way to its service.

use std::convert::Infallible;
use std::future::Future;
use std::hash::RandomState;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use expertd_proto::transport::CONTROL_MESSAGE_BYTES;
use expertd_proto::v1::moe_server::MoeServer;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::Service;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Code, Status};
use tower::Service as _;

use crate::api::framing::answer::ResponseBody;
use crate::api::framing::body::{Charges, RequestBody, Terms};
use crate::api::framing::budget::{Budget, Connection};
use crate::api::service::call::{Call, client_key, deadline};
use crate::api::service::failure::{Failure, code_name};
use crate::api::service::moe::MoeService;
use crate::backend::Backend;
use crate::telemetry::RequestMetrics;

const FORWARD: &str = "/expertd.v1.Moe/Forward";
const FORWARD_STREAM: &str = "/expertd.v1.Moe/ForwardStream";
const MOE: &str = "/expertd.v1.Moe/";

/// What a listener serves.
pub(in crate::api) struct Services {
    /// Health, reflection and, on its own listener, Admin.
    routes: Routes,
    moe: Option<Public>,
}

/// The public service with its bounds.
struct Public {
    server: MoeServer<MoeService>,
    budget: Arc<Budget>,
    message_limit: usize,
    metrics: Arc<RequestMetrics>,
    hasher: RandomState,
    closing: CancellationToken,
}

impl Services {
    /// Health and reflection and whatever else is routed, without token rows.
    pub(in crate::api) fn control(routes: Routes) -> Services {
        Services { routes, moe: None }
    }

    /// The same beside the public service.
    pub(in crate::api) fn public(
        routes: Routes,
        backend: Arc<dyn Backend>,
        budget: Arc<Budget>,
        closing: CancellationToken,
    ) -> Services {
        let message_limit = backend.model().limits.max_message_bytes;
        let metrics = Arc::new(RequestMetrics::new("Forward"));
        let service = MoeService::new(backend, Arc::clone(&metrics));
        let server = MoeServer::new(service)
            .max_decoding_message_size(message_limit)
            .max_encoding_message_size(usize::MAX);
        let hasher = RandomState::new();
        Services { routes, moe: Some(Public { server, budget, message_limit, metrics, hasher, closing }) }
    }
}

/// The HTTP/2 service of one connection.
pub(in crate::api) struct Front {
    pub(in crate::api) services: Arc<Services>,
    pub(in crate::api) connection: Arc<Connection>,
}

type Answer = Result<Response<ResponseBody>, Infallible>;
type AnswerFuture = Pin<Box<dyn Future<Output = Answer> + Send>>;

impl Service<Request<Incoming>> for Front {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = AnswerFuture;

    fn call(&self, request: Request<Incoming>) -> AnswerFuture {
        match &self.services.moe {
            Some(public) if request.uri().path().starts_with(MOE) => public.call(request, &self.connection),
            _ => {
                let answer = self.services.routes.clone().call(request.map(tonic::body::Body::new));
                Box::pin(async move { Ok(answer.await?.map(ResponseBody::plain)) })
            }
        }
    }
}

impl Public {
    fn call(&self, request: Request<Incoming>, connection: &Arc<Connection>) -> AnswerFuture {
        let arrived = Instant::now();
        let path = request.uri().path();
        let streaming = path == FORWARD_STREAM;
        let unary = path == FORWARD;
        let deadline = match deadline(request.headers(), arrived) {
            Ok(deadline) => deadline,
            Err(failure) => return Box::pin(async move { Ok(plain(failure.into())) }),
        };
        let charges = Arc::new(Charges::default());
        let terms = Terms {
            budget: Arc::clone(&self.budget),
            connection: Arc::clone(connection),
            limit: if streaming || unary { self.message_limit } else { CONTROL_MESSAGE_BYTES },
            streaming,
            forward: streaming || unary,
        };
        let call = Call {
            client: client_key(request.headers(), connection.key, &self.hasher),
            deadline,
            charges: Arc::clone(&charges),
            closing: self.closing.clone(),
        };
        let mut request = request.map(|body| RequestBody::new(body, terms, Arc::clone(&charges)));
        request.extensions_mut().insert(call);
        let answer = self.server.clone().call(request);
        if !unary {
            return Box::pin(async move {
                Ok(answer.await?.map(|body| ResponseBody::charged(body, charges, streaming)))
            });
        }
        let metrics = Arc::clone(&self.metrics);
        Box::pin(async move {
            let response = match deadline {
                None => answer.await?,
                Some(at) => match tokio::time::timeout_at(at.into(), answer).await {
                    Ok(response) => response?,
                    Err(_) => Status::from(Failure::DeadlineExceeded).into_http(),
                },
            };
            metrics
                .answered(code_name(code_of(&response)), charges.complete_at().unwrap_or(arrived).elapsed());
            Ok(response.map(|body| ResponseBody::charged(body, charges, false)))
        })
    }
}

fn plain(status: Status) -> Response<ResponseBody> {
    status.into_http().map(ResponseBody::plain)
}

/// The status of a unary answer: errors have it in their headers, successes only in their trailers.
fn code_of<B>(response: &Response<B>) -> Code {
    match response.headers().get("grpc-status") {
        Some(value) => Code::from_bytes(value.as_bytes()),
        None => Code::Ok,
    }
}
