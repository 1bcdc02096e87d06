//! Load on streams: many requests in flight on each stream, matched by id.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use expertd_client::transport::Channel;
use expertd_proto::v1::forward_stream_response::Result as Answered;
use expertd_proto::v1::moe_client::MoeClient;
use expertd_proto::v1::{ForwardStreamRequest, ForwardStreamResponse};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Response, Status, Streaming};

use crate::arrivals::Arrival;
use crate::load::{Job, Load, Outcome};
use crate::request::RequestSource;

/// Interval between searches for requests that have waited too long.
const SWEEP: Duration = Duration::from_millis(250);
/// Delay before a broken stream is opened again.
const REOPEN: Duration = Duration::from_millis(100);

type Inbound = Streaming<ForwardStreamResponse>;
type Opening = Pin<Box<dyn Future<Output = Result<Response<Inbound>, Status>> + Send>>;
type Retry = Pin<Box<dyn Future<Output = Job> + Send>>;

/// Generates the load of one stream until no more requests may begin and all are answered.
///
/// Without `arrivals` this is a closed loop that keeps `outstanding` requests in flight.
pub async fn run(
    load: Arc<Load>,
    client: MoeClient<Channel>,
    worker: u64,
    outstanding: usize,
    arrivals: Option<UnboundedReceiver<Arrival>>,
) {
    let source = load.source(worker);
    let open_loop = arrivals.is_some();
    let stream = Stream {
        load,
        client,
        worker,
        source,
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
    client: MoeClient<Channel>,
    worker: u64,
    source: RequestSource,
    /// Closed loop: number of requests kept in flight.
    outstanding: usize,
    next_id: u64,
    pending: HashMap<u64, Job>,
    retries: FuturesUnordered<Retry>,
    /// Ids of requests that count as lost; their answers may still arrive.
    given_up: HashSet<u64>,
    /// Whether no new request may begin.
    closed: bool,
}

/// A gRPC stream that is being opened or is open.
enum Link {
    Opening(Opening),
    Open(Box<Inbound>),
}

impl Link {
    /// The next message; `None` at the end of the stream.
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

    /// Uses one gRPC stream until it breaks or all work is done.
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

    /// Closed loop: sends requests until the wanted number is in flight.
    fn fill(&mut self, outbound: &UnboundedSender<ForwardStreamRequest>) {
        while !self.closed && self.pending.len() + self.retries.len() < self.outstanding {
            let now = Instant::now();
            match self.load.period.admit(now) {
                Some(measured) => {
                    let job = Job::new(self.source.next_request(), now, measured);
                    self.begin(job, outbound);
                }
                None => self.closed = true,
            }
        }
        self.closed |= self.load.period.over();
    }

    fn arrive(&mut self, arrival: Arrival, outbound: &UnboundedSender<ForwardStreamRequest>) {
        if self.load.progress.outstanding.load(Ordering::Relaxed) >= self.load.max_outstanding {
            self.load.recorder.of(self.worker).shed += 1;
            return;
        }
        let Arrival { intended, measured } = arrival;
        let job = Job::new(self.source.next_request(), intended, measured);
        if measured {
            self.load.recorder.of(self.worker).late.record(job.sent.saturating_duration_since(intended));
        }
        self.begin(job, outbound);
    }

    fn begin(&mut self, job: Job, outbound: &UnboundedSender<ForwardStreamRequest>) {
        self.load.progress.outstanding.fetch_add(1, Ordering::Relaxed);
        self.send(job, outbound);
    }

    fn send(&mut self, mut job: Job, outbound: &UnboundedSender<ForwardStreamRequest>) {
        let id = self.next_id;
        self.next_id += 1;
        job.sent = Instant::now();
        let message = ForwardStreamRequest {
            id,
            request: Some(job.planned.request.clone()),
            timeout_ms: self.load.deadline_ms.unwrap_or(0),
        };
        // If the stream is gone, the next read returns its end, which ends this job as well.
        let _ = outbound.send(message);
        self.pending.insert(id, job);
    }

    fn answer(&mut self, message: ForwardStreamResponse) {
        let Some(job) = self.pending.remove(&message.id) else {
            if self.given_up.remove(&message.id) {
                return;
            }
            let note =
                format!("received an answer to id {}, which is not in flight on this stream", message.id);
            self.load.recorder.of(self.worker).wrong(note);
            return;
        };
        let outcome = match message.result {
            Some(Answered::Response(response)) => Outcome::Answer(Box::new(response)),
            Some(Answered::Status(status)) => Status::from(status).into(),
            None => Outcome::NoAnswer("an answer with neither response nor status".to_owned()),
        };
        self.end(job, outcome);
    }

    fn end(&mut self, job: Job, outcome: Outcome) {
        match self.load.finish(self.worker, job, outcome) {
            Some((job, after)) => self.retries.push(Box::pin(async move {
                tokio::time::sleep(after).await;
                job
            })),
            None => {
                self.load.progress.outstanding.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Handles the end of the stream: its requests end with `status`, or are lost if there is none.
    fn broken(&mut self, status: Option<&Status>) {
        for (_, job) in std::mem::take(&mut self.pending) {
            let outcome = match status {
                Some(status) => status.clone().into(),
                None => Outcome::NoAnswer("the stream ended without an answer".to_owned()),
            };
            self.end(job, outcome);
        }
    }

    /// Gives up on requests that have waited too long.
    fn sweep(&mut self) {
        let give_up = self.load.period.give_up;
        let late = self.pending.iter().filter(|(_, job)| job.sent.elapsed() > give_up).map(|(&id, _)| id);
        for id in late.collect::<Vec<_>>() {
            if let Some(job) = self.pending.remove(&id) {
                self.given_up.insert(id);
                self.end(job, Outcome::NoAnswer(format!("no answer within {give_up:?}")));
            }
        }
        if self.outstanding > 0 {
            self.closed |= self.load.period.over();
        }
    }
}

async fn next(arrivals: &mut Option<UnboundedReceiver<Arrival>>) -> Option<Arrival> {
    match arrivals {
        Some(arrivals) => arrivals.recv().await,
        None => std::future::pending().await,
    }
}
