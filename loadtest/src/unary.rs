//! Load by unary calls.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use tonic::{Code, Request};

use crate::arrivals::Arrival;
use crate::connect::Client;
use crate::load::{Ending, Job, Load};

/// Closed loop: one request after the other, until the window closes.
pub async fn closed(load: Arc<Load>, client: Client, worker: u64) {
    let mut drafts = load.drafts(worker);
    loop {
        let draft = drafts.next_draft();
        let now = Instant::now();
        let Some(measured) = load.window.admit(now) else { return };
        exchange(&load, client.clone(), Job::new(draft, now, measured), worker).await;
    }
}

/// Open loop: a request for each arrival, whether or not earlier ones are answered.
pub async fn open(load: Arc<Load>, client: Client, worker: u64, mut arrivals: UnboundedReceiver<Arrival>) {
    let mut drafts = load.drafts(worker);
    let mut calls = JoinSet::new();
    while let Some(Arrival { intended, measured }) = arrivals.recv().await {
        while calls.try_join_next().is_some() {}
        if load.live.outstanding.load(Ordering::Relaxed) >= load.max_outstanding {
            load.recorder.of(worker).shed += 1;
            continue;
        }
        let job = Job::new(drafts.next_draft(), intended, measured);
        if measured {
            load.recorder.of(worker).late.record(job.sent.saturating_duration_since(intended));
        }
        let (load, client) = (Arc::clone(&load), client.clone());
        calls.spawn(async move { exchange(&load, client, job, worker).await });
    }
    while calls.join_next().await.is_some() {}
}

/// Sends a job until it has ended for good.
async fn exchange(load: &Load, mut client: Client, mut job: Job, worker: u64) {
    load.live.outstanding.fetch_add(1, Ordering::Relaxed);
    loop {
        let mut request = Request::new(job.draft.request.clone());
        if let Some(deadline) = load.deadline_ms {
            request.set_timeout(Duration::from_millis(deadline.into()));
        }
        job.sent = Instant::now();
        let give_up = load.window.give_up;
        let ending = match tokio::time::timeout(give_up, client.forward(request)).await {
            Ok(Ok(answer)) => Ending::Answer(answer.into_inner()),
            // The client's transport watches the deadline too, and says it so.
            Ok(Err(status)) if status.code() == Code::Cancelled && load.deadline_ms.is_some() => {
                Ending::Status {
                    code: Code::DeadlineExceeded,
                    message: status.message().to_owned(),
                    retry_after: None,
                }
            }
            Ok(Err(status)) => status.into(),
            Err(_) => Ending::Silence(format!("no answer within {give_up:?}")),
        };
        match load.settle(worker, job, ending) {
            Some((again, after)) => {
                job = again;
                tokio::time::sleep(after).await;
            }
            None => break,
        }
    }
    load.live.outstanding.fetch_sub(1, Ordering::Relaxed);
}
