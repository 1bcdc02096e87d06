//! Health: `""` is SERVING while the process answers, and `expertd.v1.Moe` is SERVING while requests are admitted and answered.

use std::sync::Arc;

use metrics::gauge;
use tokio_util::sync::CancellationToken;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use expertd_core::backend::{Backend, ServiceState};
use expertd_core::failure::public_text;
use expertd_telemetry::{names, progress};

const MOE: &str = "expertd.v1.Moe";

/// Keeps the readiness in `reporter` equal to that of the backend, until the backend is dropped or the service has ended.
pub(crate) async fn follow(reporter: HealthReporter, backend: Arc<dyn Backend>, end: CancellationToken) {
    let needed = progress::need("the task that reports the service's health");
    let mut state = backend.watch_state();
    reporter.set_service_status("", ServingStatus::Serving).await;
    loop {
        needed.tick();
        let serving = *state.borrow_and_update() == ServiceState::Serving && backend.standstill().is_none();
        gauge!(names::READY).set(if serving { 1.0 } else { 0.0 });
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        reporter.set_service_status(MOE, status).await;
        let changed = tokio::time::timeout(progress::TICK, state.changed());
        let changed = tokio::select! {
            () = end.cancelled() => return needed.finish(),
            changed = changed => changed,
        };
        if let Ok(Err(_)) = changed {
            gauge!(names::READY).set(0.0);
            reporter.set_service_status(MOE, ServingStatus::NotServing).await;
            return needed.finish();
        }
    }
}

/// Readiness for probes that speak HTTP: why requests are not admitted, if they are not.
pub(crate) fn readiness(backend: &dyn Backend) -> Result<(), String> {
    let status = backend.status();
    match (status.state, backend.standstill()) {
        (ServiceState::Serving, None) => Ok(()),
        (ServiceState::Serving, Some(reason)) => Err(reason),
        (state, _) if status.reason.is_empty() => Err(format!("{state:?}")),
        (state, _) => Err(format!("{state:?}: {}", public_text(&status.reason))),
    }
}
