//! The public service.

use std::sync::Arc;

use expertd_proto::v1::moe_server::Moe;
use expertd_proto::v1::{
    ForwardRequest, ForwardResponse, ForwardStreamRequest, GetModelRequest, GetModelResponse,
    ListModelsRequest, ListModelsResponse,
};
use tonic::{Request, Response, Status, Streaming};

use expertd_core::backend::Backend;
use expertd_core::validate::check_model;
use expertd_telemetry::RequestMetrics;

use super::call::Call;
use super::convert;
use super::forward::{answer, take_in};
use super::stream::{Answers, answers};
use crate::status::status_of;

/// `expertd.v1.Moe` over a backend.
pub(crate) struct MoeService {
    backend: Arc<dyn Backend>,
    metrics: Arc<RequestMetrics>,
    stream_metrics: Arc<RequestMetrics>,
}

impl MoeService {
    /// `metrics` are those of unary calls; streams record their own.
    pub(crate) fn new(backend: Arc<dyn Backend>, metrics: Arc<RequestMetrics>) -> MoeService {
        let stream_metrics = Arc::new(RequestMetrics::new("ForwardStream"));
        MoeService { backend, metrics, stream_metrics }
    }
}

/// The context of a call.
pub(super) fn call_of<T>(request: &Request<T>) -> Result<Call, Status> {
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
        let (tokens, return_timings) = (message.tokens, message.return_timings);
        let pending = take_in(&*self.backend, &self.metrics, message, envelope, Arc::clone(&ticket), trace)
            .map_err(status_of)?;
        call.count_tokens(tokens);
        let response = answer(pending, return_timings, trace).await.map_err(status_of)?;
        call.charges.leave(ticket);
        Ok(Response::new(response))
    }

    type ForwardStreamStream = Answers;

    async fn forward_stream(
        &self,
        request: Request<Streaming<ForwardStreamRequest>>,
    ) -> Result<Response<Answers>, Status> {
        let call = call_of(&request)?;
        let (backend, metrics) = (Arc::clone(&self.backend), Arc::clone(&self.stream_metrics));
        Ok(Response::new(answers(backend, metrics, call, request.into_inner())))
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
        check_model(&model, &request.get_ref().name).map_err(status_of)?;
        Ok(Response::new(convert::model(&model)))
    }
}
