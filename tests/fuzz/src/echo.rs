//! A backend that returns the rows of every request.

use std::sync::Arc;
use std::time::Duration;

use expertd_core::backend::{
    Answer, Backend, DrainFuture, DrainReport, ModelInfo, Pending, ReloadFuture, ReloadRequest, Request,
    ServiceState, ServiceStatus,
};
use expertd_core::failure::Failure;
use expertd_core::fuzzing::{model, receipt};
use tokio::sync::{oneshot, watch};

pub(crate) struct Echo {
    model: Arc<ModelInfo>,
    state: watch::Sender<ServiceState>,
}

impl Echo {
    pub(crate) fn new() -> Echo {
        Echo { model: Arc::new(model()), state: watch::Sender::new(ServiceState::Serving) }
    }
}

impl Backend for Echo {
    fn model(&self) -> Arc<ModelInfo> {
        Arc::clone(&self.model)
    }

    fn submit(&self, request: Request) -> Result<Pending, Failure> {
        let (sender, pending) = oneshot::channel();
        let receipt = receipt(&request);
        let _ = sender.send(Ok(Answer { rows: request.rows, receipt }));
        Ok(pending)
    }

    fn status(&self) -> ServiceStatus {
        ServiceStatus::default()
    }

    fn watch_state(&self) -> watch::Receiver<ServiceState> {
        self.state.subscribe()
    }

    fn reload(&self, _: ReloadRequest) -> ReloadFuture {
        Box::pin(std::future::ready(Err("there are no other weights".to_owned())))
    }

    fn drain(&self, _: Option<Duration>) -> DrainFuture {
        Box::pin(std::future::ready(DrainReport { requests_dropped: 0 }))
    }
}
