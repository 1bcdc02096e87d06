//! Load by streams: many requests in flight on each, matched by id.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use expertd_proto::v1::forward_stream_response::Result as Answered;
use expertd_proto::v1::{ForwardStreamRequest, ForwardStreamResponse};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Response, Status, Streaming};

use crate::arrivals::Arrival;
use crate::connect::Client;
use crate::load::{Ending, Job, Load};
use crate::request::Drafts;

/// How often unanswered requests are looked through.
const SWEEP: Duration = Duration::from_millis(250);
/// Pause before a broken stream is opened again.
const REOPEN: Duration = Duration::from_millis(100);

type Inbound = Streaming<ForwardStreamResponse>;
type Opening = Pin<Box<dyn Future<Output = Result<Response<Inbound>, Status>> + Send>>;
type Retry = Pin<Box<dyn Future<Output = Job> + Send>>;

/// One stream's worth of load, until the window closes and everything is answered.
///
/// Without `arrivals`, closed loop: `outstanding` requests are kept in flight.
pub async fn run(
    load: Arc<Load>,
    client: Client,
    worker: u64,
    outstanding: usize,
    arrivals: Option<UnboundedReceiver<Arrival>>,
) {
    let drafts = load.drafts(worker);
    let open_loop = arrivals.is_some();
    let stream = Stream {
        load,
        client,
        worker,
        drafts,
        outstanding: if open_loop { 0 } else { outstanding },
        next_id: 0,
        pending: HashMap::new(),
        retries: FuturesUnordered::new(),
        given_up: HashSet::new(),
        closed: false,
    };
    stream.run(arrivals).await;
}

struct Stream {
    load: Arc<Load>,
    client: Client,
    worker: u64,
    drafts: Drafts,
    /// Closed loop: requests kept in flight.
    outstanding: usize,
    next_id: u64,
    pending: HashMap<u64, Job>,
    retries: FuturesUnordered<Retry>,
    /// Counted as lost; their answers may still come.
    given_up: HashSet<u64>,
    /// No new request begins.
    closed: bool,
}

/// One gRPC stream: opening, then open.
enum Link {
    Opening(Opening),
    Open(Box<Inbound>),
}

impl Link {
    /// The next message, `None` at the end of the stream.
    async fn message(&mut self) -> Result<Option<ForwardStreamResponse>, Status> {
        if let Link::Opening(opening) = self {
            let inbound = opening.await?.into_inner();
            *self = Link::Open(Box::new(inbound));
        }
        match self {
            Link::Open(inbound) => inbound.message().await,
            Link::Opening(_) => Ok(None),
        }
    }
}

impl Stream {
    async fn run(mut self, mut arrivals: Option<UnboundedReceiver<Arrival>>) {
        while !self.finished() {
            let (outbound, requests) = unbounded_channel();
            let mut client = self.client.clone();
            let opening = async move { client.forward_stream(UnboundedReceiverStream::new(requests)).await };
            let mut link = Link::Opening(Box::pin(opening));
            self.drive(&mut link, &outbound, &mut arrivals).await;
            if !self.finished() {
                tokio::time::sleep(REOPEN).await;
            }
        }
    }

    fn finished(&self) -> bool {
        self.closed && self.pending.is_empty() && self.retries.is_empty()
    }

    /// Works on one gRPC stream until it breaks or nothing is left to do.
    async fn drive(
        &mut self,
        link: &mut Link,
        outbound: &UnboundedSender<ForwardStreamRequest>,
        arrivals: &mut Option<UnboundedReceiver<Arrival>>,
    ) {
        let mut sweep = tokio::time::interval(SWEEP);
        loop {
            if arrivals.is_none() {
                self.fill(outbound);
            }
            if self.finished() {
                return;
            }
            tokio::select! {
                message = link.message() => match message {
                    Ok(Some(message)) => self.answer(message),
                    Ok(None) => return self.broken(None),
                    Err(status) => return self.broken(Some(&status)),
                },
                arrival = next(arrivals), if !self.closed && arrivals.is_some() => match arrival {
                    Some(arrival) => self.arrive(arrival, outbound),
                    None => self.closed = true,
                },
                Some(job) = self.retries.next(), if !self.retries.is_empty() => self.send(job, outbound),
                _ = sweep.tick() => self.sweep(),
            }
        }
    }

    /// Closed loop: keeps the wanted number in flight.
    fn fill(&mut self, outbound: &UnboundedSender<ForwardStreamRequest>) {
        while !self.closed && self.pending.len() + self.retries.len() < self.outstanding {
            let now = Instant::now();
            match self.load.window.admit(now) {
                Some(measured) => {
                    let job = Job::new(self.drafts.next_draft(), now, measured);
                    self.begin(job, outbound);
                }
                None => self.closed = true,
            }
        }
        self.closed |= self.load.window.over();
    }

    fn arrive(&mut self, arrival: Arrival, outbound: &UnboundedSender<ForwardStreamRequest>) {
        if self.load.live.outstanding.load(Ordering::Relaxed) >= self.load.max_outstanding {
            self.load.recorder.of(self.worker).shed += 1;
            return;
        }
        let Arrival { intended, measured } = arrival;
        let job = Job::new(self.drafts.next_draft(), intended, measured);
        if measured {
            self.load.recorder.of(self.worker).late.record(job.sent.saturating_duration_since(intended));
        }
        self.begin(job, outbound);
    }

    fn begin(&mut self, job: Job, outbound: &UnboundedSender<ForwardStreamRequest>) {
        self.load.live.outstanding.fetch_add(1, Ordering::Relaxed);
        self.send(job, outbound);
    }

    fn send(&mut self, mut job: Job, outbound: &UnboundedSender<ForwardStreamRequest>) {
        let id = self.next_id;
        self.next_id += 1;
        job.sent = Instant::now();
        let message = ForwardStreamRequest {
            id,
            request: Some(job.draft.request.clone()),
            timeout_ms: self.load.deadline_ms.unwrap_or(0),
        };
        // If the stream is gone, its end is the next thing that is read, and ends this job as well.
        let _ = outbound.send(message);
        self.pending.insert(id, job);
    }

    fn answer(&mut self, message: ForwardStreamResponse) {
        let Some(job) = self.pending.remove(&message.id) else {
            if self.given_up.remove(&message.id) {
                return;
            }
            let note = format!("an answer to id {}, which is not in flight on this stream", message.id);
            self.load.recorder.of(self.worker).wrong(note);
            return;
        };
        let ending = match message.result {
            Some(Answered::Response(response)) => Ending::Answer(response),
            Some(Answered::Status(status)) => Status::from(status).into(),
            None => Ending::Silence("an answer with neither response nor status".to_owned()),
        };
        self.end(job, ending);
    }

    fn end(&mut self, job: Job, ending: Ending) {
        match self.load.settle(self.worker, job, ending) {
            Some((job, after)) => self.retries.push(Box::pin(async move {
                tokio::time::sleep(after).await;
                job
            })),
            None => {
                self.load.live.outstanding.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// The stream ended. With a status, that is how its requests ended; without, they are lost.
    fn broken(&mut self, status: Option<&Status>) {
        for (_, job) in std::mem::take(&mut self.pending) {
            let ending = match status {
                Some(status) => status.clone().into(),
                None => Ending::Silence("the stream ended without an answer".to_owned()),
            };
            self.end(job, ending);
        }
    }

    /// Gives up on requests that nobody answers.
    fn sweep(&mut self) {
        let give_up = self.load.window.give_up;
        let late = self.pending.iter().filter(|(_, job)| job.sent.elapsed() > give_up).map(|(&id, _)| id);
        for id in late.collect::<Vec<_>>() {
            if let Some(job) = self.pending.remove(&id) {
                self.given_up.insert(id);
                self.end(job, Ending::Silence(format!("no answer within {give_up:?}")));
            }
        }
        if self.outstanding > 0 {
            self.closed |= self.load.window.over();
        }
    }
}

async fn next(arrivals: &mut Option<UnboundedReceiver<Arrival>>) -> Option<Arrival> {
    match arrivals {
        Some(arrivals) => arrivals.recv().await,
        None => std::future::pending().await,
    }
}
