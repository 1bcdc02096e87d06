//! `expertd drain`: lets a running service finish its requests and end.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use expertd_proto::v1::{DrainRequest, DrainResponse};
use serde_json::json;

use super::admin::{AdminAddress, call_error};
use super::exit::CommandError;

/// Stop admitting requests, finish what is in flight, and end the service
///
/// Returns when no request is in flight or the time limit has passed. Exits with status 0 if every request was answered, 64 for an
/// address or a file that cannot be used, 1 otherwise.
#[derive(Args, Clone, Debug)]
pub struct DrainArgs {
    /// Address of Admin.
    #[command(flatten)]
    pub admin: AdminAddress,
    /// Time limit for requests in flight, in seconds [default: the service's drain-timeout-ms]
    #[arg(long, value_name = "SECONDS", value_parser = positive_seconds)]
    pub timeout: Option<f64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn positive_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds < 1e6 => Ok(seconds),
        _ => Err("expected a number of seconds between 0 and 1000000".to_owned()),
    }
}

/// Drains a service.
pub async fn drain(args: &DrainArgs) -> Result<DrainResponse, CommandError> {
    let mut admin = args.admin.connect().await?;
    let timeout = args.timeout.map(Duration::from_secs_f64);
    let timeout_ms =
        timeout.map_or(0, |timeout| u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX).max(1));
    match admin.drain(DrainRequest { timeout_ms }).await {
        Ok(response) => Ok(response.into_inner()),
        Err(status) => Err(call_error("Drain", &args.admin.shown(), status)),
    }
}

/// Drains a service and prints the result; exit status 0 if every request was answered.
pub async fn run(args: DrainArgs) -> Result<ExitCode, CommandError> {
    let DrainResponse { requests_dropped } = drain(&args).await?;
    if args.json {
        println!("{}", json!({ "requests_dropped": requests_dropped }));
    } else if requests_dropped == 0 {
        println!("drained: every request was answered");
    } else {
        println!(
            "drained: the time limit passed for {requests_dropped} requests, which ended with UNAVAILABLE"
        );
    }
    Ok(if requests_dropped == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
