//! The router's side of the EP group: children, supervision, generations, liveness.

mod config;
mod fault;
mod group;
mod process;
mod weights;

pub use config::{ClusterConfig, MakeWindows};
pub(crate) use fault::{channel_fault, setup_fault};
pub(crate) use group::{Group, StepDone};
pub(crate) use process::left_processes;
pub(crate) use weights::{Freeing, Loading, WeightSet};
