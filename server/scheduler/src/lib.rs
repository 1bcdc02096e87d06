//! The step loop as a state machine: admission, queue, step forming, answers, generations, drain and back-off.
//!
//! It has no threads, no clock and no I/O. Its inputs are events and the time, its outputs are [`Action`]s. A thread carries the
//! actions out, keeps the rows and copies them. The state machine refers to requests by [`RequestKey`] and ranges of rows.
//!
//! * [`Inbox`] is the callers' side. The service keeps it under a lock, and the step loop accesses it only in
//!   [`StepLoop::exchange`].
//! * [`StepLoop`] is the step loop's side, used by one thread.
//!
//! `docs/step-loop.md` has the states, the events, the actions and the invariants, which the simulation in `tests/`
//! checks after every event.

#![forbid(unsafe_code)]

mod hash;
mod inbox;
mod queue;
mod recovery;
mod request;
mod step_loop;
mod throughput;
mod time;

pub use inbox::{Delivery, Inbox, Refusal};
pub use queue::{AGED_STEP_INTERVAL, MAX_DEBT_STEPS, MAX_IDLE_CLIENTS, MAX_SKIPPED};
pub use recovery::{RecoveryPolicy, jittered};
pub use request::{ClientKey, Failure, Receipt, RequestKey, StepKind, Submission};
pub use step_loop::spread;
pub use step_loop::{
    Action, Callers, Config, End, GroupFault, OnFault, RankRows, SWEEP_INTERVAL, ServiceState, Step, StepLoop,
};
pub use time::Time;
