//! The Admin service: state, rows per expert, drain and reload.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use expertd_proto::v1::admin_server::Admin;
use expertd_proto::v1::{
    DrainRequest, DrainResponse, GetExpertRowsRequest, GetExpertRowsResponse, GetStatusRequest,
    GetStatusResponse, ReloadRequest as ReloadMessage, ReloadResponse,
};
use tonic::{Request, Response, Status};

use super::convert;
use expertd_core::backend::{Backend, PlacementChange, ReloadRequest};
use expertd_telemetry::{ResidentBytes, resident_bytes};
use expertd_types::ExpertPlacement;

/// `expertd.v1.Admin` over a backend.
pub(crate) struct AdminService {
    pub(crate) backend: Arc<dyn Backend>,
}

#[tonic::async_trait]
impl Admin for AdminService {
    async fn get_status(&self, _: Request<GetStatusRequest>) -> Result<Response<GetStatusResponse>, Status> {
        let mut status = convert::status(&self.backend.model(), self.backend.status());
        status.imbalance = convert::imbalance(&self.backend.expert_rows());
        status.router_memory_bytes =
            resident_bytes(std::process::id()).map_or(0, ResidentBytes::without_files);
        Ok(Response::new(status))
    }

    async fn get_expert_rows(
        &self,
        _: Request<GetExpertRowsRequest>,
    ) -> Result<Response<GetExpertRowsResponse>, Status> {
        Ok(Response::new(convert::expert_rows(self.backend.expert_rows())))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        let timeout = match request.get_ref().timeout_ms {
            0 => None,
            ms => Some(Duration::from_millis(ms.into())),
        };
        tracing::info!(timeout_ms = timeout.map(|_| request.get_ref().timeout_ms), "draining");
        // In a task of its own, so that the drain continues if its caller disconnects.
        let drain = tokio::spawn(self.backend.drain(timeout));
        let report = drain.await.map_err(|error| Status::internal(format!("the drain failed: {error}")))?;
        Ok(Response::new(DrainResponse { requests_dropped: report.requests_dropped }))
    }

    async fn reload(&self, request: Request<ReloadMessage>) -> Result<Response<ReloadResponse>, Status> {
        let message = request.into_inner();
        let folder = Some(message.model).filter(|model| !model.is_empty());
        let placement = match message.placement.as_str() {
            "" => PlacementChange::Keep,
            "contiguous" => PlacementChange::Contiguous,
            text => PlacementChange::Given(
                ExpertPlacement::from_json(text)
                    .map_err(|error| Status::invalid_argument(error.to_string()))?,
            ),
        };
        let bytes = Some(message.placement.len()).filter(|&bytes| bytes > 0);
        tracing::info!(folder, placement_bytes = bytes, "reloading");
        let folder = folder.map(PathBuf::from);
        // In a task of its own: a reload goes on when its caller hangs up.
        let reload = tokio::spawn(self.backend.reload(ReloadRequest { folder, placement }));
        let report = reload.await.map_err(|error| Status::internal(format!("the reload failed: {error}")))?;
        let report = report.map_err(Status::failed_precondition)?;
        Ok(Response::new(ReloadResponse {
            weight_version: report.weight_version.0,
            weight_fingerprint: report.weight_fingerprint.to_string(),
            load_seconds: report.load_time.as_secs_f64(),
            pause_seconds: report.pause.as_secs_f64(),
        }))
    }
}
