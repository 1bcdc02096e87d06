//! Health: `""` is alive for as long as the process answers, `expertd.v1.Moe` is ready while requests are admitted.

use std::sync::Arc;

use metrics::gauge;
use tokio::sync::watch;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::backend::{Backend, ServiceState};
use crate::telemetry::{Probe, names};

const MOE: &str = "expertd.v1.Moe";

/// Keeps the readiness in `reporter` at what the backend says, until the backend is gone.
pub(in crate::api) async fn follow(reporter: HealthReporter, mut state: watch::Receiver<ServiceState>) {
    loop {
        let serving = *state.borrow_and_update() == ServiceState::Serving;
        gauge!(names::READY).set(if serving { 1.0 } else { 0.0 });
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        reporter.set_service_status(MOE, status).await;
        if state.changed().await.is_err() {
            gauge!(names::READY).set(0.0);
            reporter.set_service_status(MOE, ServingStatus::NotServing).await;
            return;
        }
    }
}

/// Readiness for probes that speak HTTP.
pub fn ready_probe(backend: Arc<dyn Backend>) -> Probe {
    Arc::new(move || {
        let status = backend.status();
        match status.state {
            ServiceState::Serving => Ok(()),
            state if status.reason.is_empty() => Err(format!("{state:?}")),
            state => Err(format!("{state:?}: {}", status.reason)),
        }
    })
}
