//! Load by unary calls.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use tonic::Code;

use crate::arrivals::Arrival;
use crate::connect::Client;
use crate::decode::Walk;
use crate::load::{Job, Load, Outcome};

/// Closed loop: sends one request after the other until no more may begin.
pub async fn closed(load: Arc<Load>, client: Client, worker: u64) {
    let mut source = load.source(worker);
    let mut walk = Walk::new(&load);
    loop {
        let planned = source.next_request();
        let now = Instant::now();
        let Some(measured) = load.period.admit(now) else { return };
        walk.begin(now, measured);
        let tokens = planned.request.tokens;
        let answered = exchange(&load, client.clone(), Job::new(planned, now, measured), worker).await;
        walk.end(&load, worker, tokens, answered);
    }
}

/// Open loop: sends a request for each arrival, whether or not earlier ones are answered.
pub async fn open(load: Arc<Load>, client: Client, worker: u64, mut arrivals: UnboundedReceiver<Arrival>) {
    let mut source = load.source(worker);
    let mut calls = JoinSet::new();
    while let Some(Arrival { intended, measured }) = arrivals.recv().await {
        while calls.try_join_next().is_some() {}
        if load.progress.outstanding.load(Ordering::Relaxed) >= load.max_outstanding {
            load.recorder.of(worker).shed += 1;
            continue;
        }
        let job = Job::new(source.next_request(), intended, measured);
        if measured {
            load.recorder.of(worker).late.record(job.sent.saturating_duration_since(intended));
        }
        let (load, client) = (Arc::clone(&load), client.clone());
        calls.spawn(async move { _ = exchange(&load, client, job, worker).await });
    }
    while calls.join_next().await.is_some() {}
}

/// Sends a job until it has its final outcome. Returns whether that is an answer.
async fn exchange(load: &Load, mut client: Client, mut job: Job, worker: u64) -> bool {
    load.progress.outstanding.fetch_add(1, Ordering::Relaxed);
    let answered = loop {
        let request = job.planned.request.clone();
        let deadline = load.deadline_ms.map(|ms| Duration::from_millis(ms.into()));
        job.sent = Instant::now();
        let give_up = load.period.give_up;
        let outcome = match tokio::time::timeout(give_up, client.forward(request, deadline)).await {
            Ok(Ok(answer)) => Outcome::Answer(Box::new(answer)),
            // The client's transport also enforces the deadline, and reports it as CANCELLED.
            Ok(Err(status)) if status.code() == Code::Cancelled && load.deadline_ms.is_some() => {
                Outcome::Status {
                    code: Code::DeadlineExceeded,
                    message: status.message().to_owned(),
                    retry_after: None,
                }
            }
            Ok(Err(status)) => status.into(),
            Err(_) => Outcome::NoAnswer(format!("no answer within {give_up:?}")),
        };
        let answered = matches!(outcome, Outcome::Answer(_));
        match load.finish(worker, job, outcome) {
            Some((again, after)) => {
                job = again;
                tokio::time::sleep(after).await;
            }
            None => break answered,
        }
    };
    load.progress.outstanding.fetch_sub(1, Ordering::Relaxed);
    answered
}
