//! The router's side of the EP group: children, supervision, generations, liveness.

mod config;
mod cores;
mod fault;
mod group;
mod process;
mod weights;

pub use config::{ClusterConfig, MakeWindows};
pub use cores::{available_cores, numa_nodes, share_cores, share_cores_near, usable};
pub use fault::{Fault, FaultKind, FormError};
pub use group::{Group, RankView, StepDone};
pub use process::{ChildProcess, RankEvent, RankNews, left_processes};
pub use weights::{LoadFailure, LoaderView, Loading, LoadingMode, WeightSet};
