//! The Admin service: state and drain.

use std::sync::Arc;
use std::time::Duration;

use expertd_proto::v1::admin_server::Admin;
use expertd_proto::v1::{DrainRequest, DrainResponse, GetStatusRequest, GetStatusResponse};
use tonic::{Request, Response, Status};

use super::convert;
use crate::backend::Backend;

/// `expertd.v1.Admin` over a backend.
pub(in crate::api) struct AdminService {
    pub(in crate::api) backend: Arc<dyn Backend>,
}

#[tonic::async_trait]
impl Admin for AdminService {
    async fn get_status(&self, _: Request<GetStatusRequest>) -> Result<Response<GetStatusResponse>, Status> {
        Ok(Response::new(convert::status(&self.backend.model(), self.backend.status())))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        let timeout = match request.get_ref().timeout_ms {
            0 => None,
            ms => Some(Duration::from_millis(ms.into())),
        };
        tracing::info!(?timeout, "draining");
        // In a task of its own, so that the drain continues if its caller disconnects.
        let drain = tokio::spawn(self.backend.drain(timeout));
        let report = drain.await.map_err(|error| Status::internal(format!("the drain failed: {error}")))?;
        Ok(Response::new(DrainResponse { requests_dropped: report.requests_dropped }))
    }
}
