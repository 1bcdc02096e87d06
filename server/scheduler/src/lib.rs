//! The step loop as state machines: admission, queue, step forming, answers, generations, drain and back-off; the life of weights;
//! the attachments of sessions.
//!
//! They have no threads, no clock and no I/O. Their inputs are events and the time, their outputs are decisions such as [`Action`]s,
//! which refer to requests by [`RequestKey`] and ranges of rows.
//!
//! * [`Inbox`] is the callers' side. The service keeps it under a lock, and the step loop accesses it only in
//!   [`StepLoop::exchange`].
//! * [`StepLoop`] is the step loop's side, used by one thread.
//! * [`Driver`] is what that thread does in a round: it tells the state machines what ranks, loaders and callers have done, and has
//!   a [`Ranks`] carry out what they decide.
//!
//! `docs/step-loop.md` has the states, the events, the actions and the invariants, which the simulation in `tests/`
//! checks after every event.

#![forbid(unsafe_code)]

mod attachments;
mod driver;
mod fault;
mod hash;
mod inbox;
mod queue;
mod recovery;
mod request;
mod step_loop;
mod throughput;
mod time;
mod weights;

pub use attachments::{AttachAnswer, Attachment};
pub use driver::{Callers, Driver, Mail, MemoryMail, Ranks, ReloadFailure};
pub use fault::{Fault, FaultKind};
pub use inbox::{Delivery, Inbox, Refusal};
pub use queue::{AGED_STEP_INTERVAL, MAX_DEBT_STEPS, MAX_IDLE_CLIENTS, MAX_SKIPPED};
pub use recovery::{RecoveryPolicy, jittered};
pub use request::{ClientKey, ConnectionKey, Receipt, RequestKey, StepKind, Submission, Unanswered};
pub use step_loop::{
    Action, Config, End, OnFault, RankRows, SWEEP_INTERVAL, ServiceState, Step, StepLoop, spread,
};
pub use time::Time;
pub use weights::{Ask, LoadFailure, Reloaded};
