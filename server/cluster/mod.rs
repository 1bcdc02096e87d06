//! The router's side of the EP group: children, supervision, generations, liveness.

mod cores;
mod group;
mod process;

pub use cores::{available_cores, numa_nodes, share_cores};
pub use group::{ClusterConfig, Fault, FaultKind, FormError, Group, RankView, StepDone};
pub use process::{RankEvent, RankNews, RankProcess};
