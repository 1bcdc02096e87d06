//! The public service.

use std::sync::Arc;

use expertd_proto::v1::moe_server::Moe;
use expertd_proto::v1::{
    ForwardRequest, ForwardResponse, ForwardStreamRequest, GetModelRequest, GetModelResponse,
    ListModelsRequest, ListModelsResponse,
};
use tonic::{Request, Response, Status, Streaming};

use super::call::Call;
use super::convert;
use super::stream::Exchange;
use super::validate::{Envelope, check_model, validate};
use crate::api::bytes::charges::{Ticket, guarded};
use crate::api::failure::Failure;
use crate::backend::{Backend, Pending};
use crate::telemetry::{RequestMetrics, RequestTrace};

/// `expertd.v1.Moe` over a backend.
pub(in crate::api) struct MoeService {
    backend: Arc<dyn Backend>,
    metrics: Arc<RequestMetrics>,
    stream_metrics: Arc<RequestMetrics>,
}

/// An accepted request.
pub(in crate::api) enum Taken {
    /// Its answer is pending.
    Pending(Pending),
    /// Its answer is already known.
    Answered(Box<ForwardResponse>),
}

impl MoeService {
    /// `metrics` are those of unary calls; streams record their own.
    pub(in crate::api) fn new(backend: Arc<dyn Backend>, metrics: Arc<RequestMetrics>) -> MoeService {
        let stream_metrics = Arc::new(RequestMetrics::new("ForwardStream"));
        MoeService { backend, metrics, stream_metrics }
    }
}

/// Validates a request and submits it. The rows keep the ticket until the scheduler drops them.
pub(in crate::api) fn take_in(
    backend: &dyn Backend,
    metrics: &RequestMetrics,
    message: ForwardRequest,
    envelope: Envelope,
    ticket: Ticket,
    trace: Option<&RequestTrace>,
) -> Result<Taken, Failure> {
    let model = backend.model();
    let Some(mut request) = validate(&model, message, envelope)? else {
        return Ok(Taken::Answered(Box::new(convert::empty_response(&model))));
    };
    metrics.admitted(request.tokens);
    if let Some(trace) = trace {
        trace.admitted(&mut request);
    }
    request.rows = request.rows.into_iter().map(|piece| guarded(piece, Arc::clone(&ticket))).collect();
    tracing::trace!(request = %request.id, layer = %request.layer, tokens = request.tokens, "submitted to the step loop");
    Ok(Taken::Pending(backend.submit(request)?))
}

fn call_of<T>(request: &Request<T>) -> Result<Call, Status> {
    let call = request.extensions().get::<Call>().cloned();
    call.ok_or_else(|| Status::internal("the call has no context"))
}

#[tonic::async_trait]
impl Moe for MoeService {
    async fn forward(&self, request: Request<ForwardRequest>) -> Result<Response<ForwardResponse>, Status> {
        let call = call_of(&request)?;
        let Some(ticket) = call.charges.next_arrival() else {
            return Err(Status::internal("the message was not charged"));
        };
        let envelope = call.envelope(call.deadline);
        let (message, trace) = (request.into_inner(), call.trace.as_deref());
        let tokens = message.tokens;
        let taken = take_in(&*self.backend, &self.metrics, message, envelope, Arc::clone(&ticket), trace)?;
        call.count_tokens(tokens);
        let response = match taken {
            Taken::Answered(response) => *response,
            Taken::Pending(pending) => match pending.await {
                Ok(Ok(mut answer)) => {
                    if let Some(trace) = trace {
                        trace.answered(&mut answer.receipt);
                    }
                    convert::response(answer)
                }
                Ok(Err(error)) => return Err(Failure::from(error).into()),
                Err(_) => return Err(convert::abandoned().into()),
            },
        };
        call.charges.leave(ticket);
        Ok(Response::new(response))
    }

    type ForwardStreamStream = Exchange;

    async fn forward_stream(
        &self,
        request: Request<Streaming<ForwardStreamRequest>>,
    ) -> Result<Response<Exchange>, Status> {
        let call = call_of(&request)?;
        let backend = Arc::clone(&self.backend);
        Ok(Response::new(Exchange::new(
            backend,
            Arc::clone(&self.stream_metrics),
            call,
            request.into_inner(),
        )))
    }

    async fn list_models(
        &self,
        _: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        Ok(Response::new(ListModelsResponse { models: vec![convert::summary(&self.backend.model())] }))
    }

    async fn get_model(
        &self,
        request: Request<GetModelRequest>,
    ) -> Result<Response<GetModelResponse>, Status> {
        let model = self.backend.model();
        check_model(&model, &request.get_ref().name)?;
        Ok(Response::new(convert::model(&model)))
    }
}
