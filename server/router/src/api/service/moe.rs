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
use super::description::ModelDescription;
use super::failure::Failure;
use super::stream::Exchange;
use super::validate::{Envelope, check_model, validate};
use crate::api::framing::answer::take_large;
use crate::api::framing::budget::Ticket;
use crate::api::framing::charges::{Arrival, Leaving, charged_bytes};
use crate::backend::{Backend, Pending};
use crate::telemetry::{RequestMetrics, RequestTrace};
use expertd_types::ChunkedBytes;

/// `expertd.v1.Moe` over a backend.
pub(in crate::api) struct MoeService {
    backend: Arc<dyn Backend>,
    metrics: Arc<RequestMetrics>,
    stream_metrics: Arc<RequestMetrics>,
    description: Arc<ModelDescription>,
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
    pub(in crate::api) fn new(
        backend: Arc<dyn Backend>,
        metrics: Arc<RequestMetrics>,
        description: Arc<ModelDescription>,
    ) -> MoeService {
        let stream_metrics = Arc::new(RequestMetrics::new("ForwardStream"));
        MoeService { backend, metrics, stream_metrics, description }
    }
}

/// Validates a request, whose rows may be `apart`, and submits it. The rows keep the ticket until the scheduler drops
/// them.
pub(in crate::api) fn take_in(
    backend: &dyn Backend,
    metrics: &RequestMetrics,
    message: ForwardRequest,
    apart: Option<ChunkedBytes>,
    envelope: Envelope,
    ticket: Ticket,
    trace: Option<&RequestTrace>,
) -> Result<Taken, Failure> {
    let model = backend.model();
    let Some(mut request) = validate(&model, message, apart, envelope)? else {
        return Ok(Taken::Answered(Box::new(convert::empty_response(&model))));
    };
    metrics.admitted(request.tokens);
    if let Some(trace) = trace {
        trace.admitted(&mut request);
    }
    request.rows = request.rows.into_iter().map(|piece| charged_bytes(piece, ticket.clone())).collect();
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
        let (ticket, apart) = match call.charges.next_arrival() {
            Some(Arrival::Charged(ticket, apart)) => (ticket, apart),
            Some(Arrival::Refused(status)) => return Err(status),
            None => return Err(Status::internal("the message was not charged")),
        };
        let envelope = call.envelope(call.deadline);
        let (message, trace) = (request.into_inner(), call.trace.as_deref());
        let tokens = message.tokens;
        let taken = take_in(&*self.backend, &self.metrics, message, apart, envelope, ticket.clone(), trace)?;
        call.count_tokens(tokens);
        let mut response = match taken {
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
        let rows = take_large(&mut response.rows);
        call.charges.leave(Leaving { ticket: Some(ticket), rows, message: None });
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
        let message = Some(self.description.encoded(&model));
        call_of(&request)?.charges.leave(Leaving { message, ..Leaving::default() });
        // The encoded message goes in the place of this empty one.
        Ok(Response::new(GetModelResponse::default()))
    }
}
