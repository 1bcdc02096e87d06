//! `expertd reload`: lets a running service load other weights.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use expertd_proto::v1::{ReloadRequest, ReloadResponse};
use serde_json::json;

use super::admin::{AdminAddress, call_error};
use super::client::read;
use super::exit::CommandError;

/// Load other weights of the same shape, or another placement of experts, into a running service, without failing a call
///
/// The new weights are loaded while the current ones serve. Then requests wait for a moment until the new weights serve. After an
/// error the current weights continue to serve. Exits with status 0 once the new weights serve, 64 for an address or
/// placement file that cannot be used, 1 otherwise.
#[derive(Args, Clone, Debug)]
pub struct ReloadArgs {
    /// Directory of the checkpoint [default: the one whose weights serve]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// JSON file with the experts that each rank is to own, as `expertd rebalance` prints it, or `contiguous` [default: the present
    /// placement]
    #[arg(long, value_name = "FILE")]
    pub placement: Option<PathBuf>,
    /// Address of Admin.
    #[command(flatten)]
    pub admin: AdminAddress,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Reloads the weights of a service.
///
/// # Errors
/// If the service does not answer, or the new weights do not serve.
pub async fn reload(args: &ReloadArgs) -> Result<ReloadResponse, CommandError> {
    // The service has its own working directory.
    let model = args.model.as_ref().map(|path| path.canonicalize().unwrap_or_else(|_| path.clone()));
    let model = model.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default();
    let placement = match &args.placement {
        None => String::new(),
        Some(word) if word.as_os_str() == "contiguous" => "contiguous".to_owned(),
        Some(path) => placement_in(path)?,
    };
    let mut admin = args.admin.connect().await?;
    match admin.reload(ReloadRequest { model, placement }).await {
        Ok(response) => Ok(response.into_inner()),
        Err(status) => Err(call_error("Reload", &args.admin.shown(), status)),
    }
}

/// The placement in a file. An empty text would mean the present placement to the service.
fn placement_in(path: &Path) -> Result<String, CommandError> {
    let text = read(path)?;
    if text.trim().is_empty() {
        return Err(CommandError::usage(format!(
            "{} is empty; expected a placement as `expertd rebalance` prints it (it prints none if it fails)",
            path.display()
        )));
    }
    Ok(text)
}

/// Reloads the weights of a service and prints the result.
pub async fn run(args: ReloadArgs) -> Result<ExitCode, CommandError> {
    let ReloadResponse { weight_version, weight_fingerprint, load_seconds, pause_seconds } =
        reload(&args).await?;
    if args.json {
        let value = json!({
            "weight_version": weight_version,
            "weight_fingerprint": weight_fingerprint,
            "load_seconds": load_seconds,
            "pause_seconds": pause_seconds,
        });
        println!("{value}");
    } else {
        println!(
            "weight version {weight_version}, {weight_fingerprint}: loaded in {load_seconds:.1} s, requests waited for \
             {pause_seconds:.2} s"
        );
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[tokio::test]
    async fn a_missing_placement_is_told_before_the_service_is_asked() {
        let admin = AdminAddress { address: Some("127.0.0.1:1".to_owned()), ..AdminAddress::default() };
        let placement = Some("/no/such/placement.json".into());
        let error = reload(&ReloadArgs { model: None, placement, admin, json: false }).await.unwrap_err();
        assert!(error.status() == 64 && error.to_string().contains("/no/such"), "{error}");
    }

    #[test]
    fn an_empty_placement_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("placement.json");
        for empty in ["", " \n"] {
            std::fs::write(&path, empty).unwrap();
            let error = placement_in(&path).unwrap_err().to_string();
            assert!(
                error.contains("placement.json is empty") && error.contains("expertd rebalance"),
                "{error}"
            );
        }
        std::fs::write(&path, "{}").unwrap();
        assert_eq!(placement_in(&path).unwrap(), "{}");
    }
}
