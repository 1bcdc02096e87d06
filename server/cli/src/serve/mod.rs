//! `expertd serve`: the router rank.

mod descriptors;
pub(crate) mod division;
mod error;
pub mod kinds;
pub mod layers;
mod network;
pub mod plan;
mod reload;
mod report;
mod running;
pub mod settings;
pub(super) mod variables;

pub use error::ServeError;
pub(super) use report::gpu_bytes;
pub use report::{follow_loading, plan as describe_plan, weights as describe_weights};
pub use running::{PreparedService, RunningService};

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::ArgMatches;
use expertd_telemetry::{flush_logs, progress, tell};
use rustix::process::DumpableBehavior;

use self::plan::{PlanError, ServePlan};
use self::settings::{Given, ServeArgs};
use crate::exit;

/// Runs the service until a signal, a drain, or a failure that it cannot recover from.
#[must_use]
pub fn run(args: &ServeArgs, matches: Option<&ArgMatches>) -> ExitCode {
    let plan = Given::merge(args, matches).map_err(PlanError::from).and_then(|given| {
        if args.print_config && given.model.0.is_none() {
            print(&report::settings(&given.shown()));
            return Ok(None);
        }
        let plan = ServePlan::new(given)?;
        // Settings are also printed for other machines than this one.
        if !args.print_config {
            plan.check_memory()?;
        }
        Ok(Some(plan))
    });
    let plan = match plan {
        Ok(Some(plan)) if !args.print_config => plan,
        Ok(plan) => {
            if let Some(plan) = plan {
                print(&report::settings(&plan.shown));
            }
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            tell(&format!("expertd serve: {error}"));
            return ExitCode::from(exit::USAGE);
        }
    };
    for variable in std::env::vars_os().filter_map(|(name, _)| variables::unknown(name.to_str()?)) {
        tracing::warn!("{variable}");
    }
    let prepared = match PreparedService::new(plan) {
        Ok(prepared) => prepared,
        Err(error) => {
            tell(&format!("expertd serve: {error}"));
            return error.exit_code();
        }
    };
    let plan = prepared.plan();
    let text = format!("{}{}", report::given_settings(&plan.shown), report::plan(plan));
    if let Err(error) = guard_process() {
        tell(&format!("expertd serve: {error}"));
        return ExitCode::from(exit::SETUP);
    }
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = match runtime.enable_all().thread_name("api").build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tell(&format!("expertd serve: cannot start the asynchronous runtime: {error}"));
            return ExitCode::from(exit::SETUP);
        }
    };
    let code = runtime.block_on(async {
        let started = RunningService::bind(prepared).await.and_then(|running| {
            // An address in use is reported alone.
            print(&text);
            running.begin()?;
            Ok(running)
        });
        match started {
            Ok(running) => {
                running.announce();
                running.until_end().await
            }
            Err(error) => not_started(&error),
        }
    });
    runtime.shutdown_timeout(Duration::from_millis(100));
    code
}

/// Says why the service could not be started. Its threads and tasks end with it as planned.
fn not_started(error: &ServeError) -> ExitCode {
    progress::stop();
    tell(&format!("expertd serve: {error}"));
    error.exit_code()
}

/// Prints to standard output. A closed standard output is not an error.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Keeps the memory of this process from other processes of the user and from core files, lets the end of a thread that it needs
/// end it, and writes panics to the log, because a panicking thread must not wait for standard error.
fn guard_process() -> std::io::Result<()> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
    progress::end_with(|reason| {
        tell(&format!("expertd serve: {reason}"));
        flush_logs();
        std::process::exit(i32::from(exit::LOST));
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    static ENDS: AtomicUsize = AtomicUsize::new(0);

    #[test]
    fn a_service_that_cannot_start_its_step_loop_is_not_taken_for_one_that_lost_a_task() {
        progress::end_with(|_| {
            ENDS.fetch_add(1, Ordering::Relaxed);
        });
        let task = progress::need("the task that accepts connections");
        let error = std::io::Error::from(std::io::ErrorKind::WouldBlock);
        let error = ServeError::Service(expertd_core::steps::StartError::Thread(error));
        let code = not_started(&error);
        drop(task);
        assert_eq!(format!("{code:?}"), format!("{:?}", ExitCode::from(exit::SETUP)));
        assert_eq!(ENDS.load(Ordering::Relaxed), 0);
    }
}
