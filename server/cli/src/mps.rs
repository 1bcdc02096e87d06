//! NVIDIA's Multi-Process Service (MPS). Without it a GPU runs kernels of one process at a time, so that a rank and an engine on
//! one GPU take turns.

use std::path::{Path, PathBuf};

use expertd_rank_cuda::Check;

/// Where CUDA looks for the daemon unless `CUDA_MPS_PIPE_DIRECTORY` names another folder.
const DIRECTORY: &str = "/tmp/nvidia-mps";
/// What sharing costs without it (docs/vllm.md has the measurements).
const COST: &str = "the GPU changes between the processes, and a decode step takes 1.5 to 3 times as long";

/// The daemon's folder, and whether the daemon's socket is in it.
fn find() -> (PathBuf, bool) {
    let named = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").filter(|named| !named.is_empty());
    let directory = named.map_or_else(|| PathBuf::from(DIRECTORY), PathBuf::from);
    let is_there = has_daemon(&directory);
    (directory, is_there)
}

fn has_daemon(directory: &Path) -> bool {
    directory.join("control").exists()
}

/// A check of `expertd doctor`.
pub(crate) fn check() -> Check {
    let (directory, is_there) = find();
    let found = format!("{} in {}", if is_there { "a daemon" } else { "no daemon" }, directory.display());
    Check::new("MPS", is_there, found, "a daemon, where engines use the ranks' own GPUs")
        .way_out(&format!(
            "without it {COST}; run nvidia-cuda-mps-control -d before the service and the engine, with one \
             CUDA_MPS_PIPE_DIRECTORY for all three"
        ))
        .optional()
}

/// What `expertd serve` says about clients on its ranks' GPUs; `None` if there is a daemon.
pub(crate) fn warning() -> Option<String> {
    let (directory, is_there) = find();
    (!is_there).then(|| {
        format!(
            "no MPS daemon in {}; if an engine uses a rank's GPU, {COST} (docs/vllm.md)",
            directory.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_known_by_its_socket() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!has_daemon(folder.path()));
        std::fs::write(folder.path().join("control"), "").unwrap();
        assert!(has_daemon(folder.path()));
    }
}
