//! Load through sessions: each worker is a thread that makes one call after the other.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use expertd_client::network::{self, NetworkOptions};
use expertd_client::session::{self, SessionClient, SessionOptions};

use crate::Error;
use crate::args::{Args, SessionKind};
use crate::decode::Walk;
use crate::load::{Job, Load, Outcome};
use crate::request::Workload;

/// Opens a session for `calls` calls of the workload's largest request at once.
///
/// # Errors
/// If the session cannot be opened.
pub fn open(args: &Args, calls: usize, workload: &Workload) -> Result<Arc<SessionClient>, Error> {
    // Rows in f32, as recorded rows are, twice; then ids, weights and token ids.
    let tokens = workload.largest_request();
    let per_call = tokens * (workload.model.hidden as usize * 8 + 1024) + 4096;
    let options = SessionOptions {
        rows_bytes: per_call.saturating_mul(calls),
        calls: u32::try_from(calls).unwrap_or(u32::MAX),
        ..SessionOptions::default()
    };
    let client = match args.session {
        Some(SessionKind::Network) => {
            let credentials = args.credentials.clone();
            let options = NetworkOptions { session: options, credentials, library: None };
            network::open(&args.address, &options).and_then(SessionClient::over)
        }
        _ => SessionClient::open(&args.address, &options),
    };
    client.map(Arc::new).map_err(Error::Session)
}

/// Opens the sessions of a load, one for each connection.
///
/// # Errors
/// If one cannot be opened.
pub fn open_all(args: &Args, workload: &Workload) -> Result<Vec<Arc<SessionClient>>, Error> {
    (0..args.shape.connections.get()).map(|_| open(args, args.shape.outstanding.get(), workload)).collect()
}

/// Closed loop on the calling thread, until no more requests may begin.
pub fn closed(load: &Load, client: &SessionClient, worker: u64) {
    let mut source = load.source(worker);
    let mut walk = Walk::new(load);
    loop {
        let planned = source.next_request();
        let now = Instant::now();
        let Some(measured) = load.period.admit(now) else { return };
        walk.begin(now, measured);
        load.progress.outstanding.fetch_add(1, Ordering::Relaxed);
        let tokens = planned.request.tokens;
        let answered = exchange(load, client, Job::new(planned, now, measured), worker);
        load.progress.outstanding.fetch_sub(1, Ordering::Relaxed);
        walk.end(load, worker, tokens, answered);
    }
}

/// Sends a job until it has its final outcome. Returns whether that is an answer.
fn exchange(load: &Load, client: &SessionClient, mut job: Job, worker: u64) -> bool {
    let timeout = match load.deadline_ms {
        Some(deadline) => Duration::from_millis(deadline.into()),
        None => load.period.give_up,
    };
    loop {
        job.sent = Instant::now();
        let outcome = match client.forward(&job.planned.request, timeout) {
            Ok(response) => Outcome::Answer(Box::new(response)),
            Err(error) => session::status(error).into(),
        };
        let answered = matches!(outcome, Outcome::Answer(_));
        match load.finish(worker, job, outcome) {
            Some((again, after)) => {
                job = again;
                std::thread::sleep(after);
            }
            None => return answered,
        }
    }
}
