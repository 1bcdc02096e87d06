//! Health: `""` is SERVING while the process answers, and `expertd.v1.Moe` is SERVING while requests are admitted.

use std::sync::Arc;

use metrics::gauge;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::api::failure::public_text;
use crate::backend::{Backend, ServiceState};
use crate::telemetry::{Probe, names};
use crate::watchdog;

const MOE: &str = "expertd.v1.Moe";

/// Keeps the readiness in `reporter` equal to the backend's state, until the backend is dropped or the service has ended. After a
/// loss that the watchdog found, nothing is SERVING.
pub(in crate::api) async fn follow(
    reporter: HealthReporter,
    mut state: watch::Receiver<ServiceState>,
    end: CancellationToken,
) {
    let heartbeat = watchdog::watch("the task that reports the service's health");
    loop {
        let lost = watchdog::lost().is_some();
        let serving = *state.borrow_and_update() == ServiceState::Serving && !lost;
        gauge!(names::READY).set(if serving { 1.0 } else { 0.0 });
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        reporter.set_service_status(MOE, status).await;
        let alive = if lost { ServingStatus::NotServing } else { ServingStatus::Serving };
        reporter.set_service_status("", alive).await;
        loop {
            heartbeat.tick();
            let changed = tokio::time::timeout(watchdog::TICK, state.changed());
            let changed = tokio::select! {
                () = end.cancelled() => return heartbeat.finish(),
                changed = changed => changed,
            };
            match changed {
                Ok(Ok(())) => break,
                Err(_) if watchdog::lost().is_some() != lost => break,
                Err(_) => {}
                Ok(Err(_)) => {
                    gauge!(names::READY).set(0.0);
                    reporter.set_service_status(MOE, ServingStatus::NotServing).await;
                    return heartbeat.finish();
                }
            }
        }
    }
}

/// Readiness for probes that speak HTTP.
pub fn ready_probe(backend: Arc<dyn Backend>) -> Probe {
    Arc::new(move || {
        if let Some(reason) = watchdog::lost() {
            return Err(reason);
        }
        let status = backend.status();
        match status.state {
            ServiceState::Serving => Ok(()),
            state if status.reason.is_empty() => Err(format!("{state:?}")),
            state => Err(format!("{state:?}: {}", public_text(&status.reason))),
        }
    })
}
