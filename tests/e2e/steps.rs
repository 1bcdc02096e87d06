//! Tests of the real service's step loop: waiting, refused and cancelled requests, and the exit of the process. Ranks are stopped with
//! a signal where steps must stand still.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::service;
use crate::service::load::{Rows, check};
use crate::service::{PATIENT, Service, fixture, golden, send};
use expertd_client::Client;
use expertd_proto::v1::admin_client::AdminClient;
use expertd_proto::v1::{DrainRequest, ForwardRequest, ForwardResponse, GetStatusRequest, GetStatusResponse};
use rustix::process::Signal;
use tokio::task::JoinHandle;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

const FAMILY: &str = "qwen3_moe";
/// Number of rows of a step in these tests.
const STEP: usize = 32;
/// Time limit of every wait, far longer than any of them takes.
const PATIENCE: Duration = Duration::from_secs(180);

type Answer = JoinHandle<Result<ForwardResponse, Status>>;

/// Starts a service with small steps that does not give up ranks which are stopped.
fn start(more: &[&str]) -> Service {
    let flags =
        ["--max-tokens-per-step", "32", "--liveness-timeout-ms", "600000", "--step-timeout-ms", "600000"];
    Service::start(FAMILY, 2, &[&flags, more].concat())
}

async fn submit(client: &Client, request: &ForwardRequest, timeout: Option<Duration>) -> Answer {
    let (client, request) = (client.clone(), request.clone());
    tokio::spawn(async move { client.forward(request, timeout).await })
}

async fn status(service: &Service) -> GetStatusResponse {
    let mut admin = AdminClient::new(expertd_client::transport::connect(&service.admin).await.unwrap());
    admin.get_status(GetStatusRequest {}).await.unwrap().into_inner()
}

/// Waits until `in_steps` requests are in steps and `queued` requests wait for one.
async fn until(service: &Service, in_steps: u64, queued: u64) {
    let wait = async {
        loop {
            let now = status(service).await;
            if (now.requests_in_flight, now.requests_queued) == (in_steps, queued) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, wait).await;
    assert!(waited.is_ok(), "{in_steps} in steps and {queued} queued; found {:?}", status(service).await);
}

fn stop_ranks(service: &Service) {
    service.ranks().into_iter().for_each(|rank| send(rank, Signal::STOP));
}

fn continue_ranks(service: &Service) {
    service.ranks().into_iter().for_each(|rank| send(rank, Signal::CONT));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses_and_answers_what_it_took() {
    let service = start(&["--max-queued-tokens", "64"]);
    let client = Client::connect(&service.address).await.unwrap();
    let mut rows = Rows::new(&golden(FAMILY), 1, STEP);
    let layer = rows.layers()[0];
    stop_ranks(&service);
    let (mut answers, mut wanted) = (Vec::new(), Vec::new());
    // Two full steps take the two slots, and two more fill the queue.
    for (in_steps, queued) in [(1, 0), (2, 0), (2, 1), (2, 2)] {
        let (request, output) = rows.draw_of(layer, STEP);
        answers.push(submit(&client, &request, None).await);
        wanted.push((request, output));
        until(&service, in_steps, queued).await;
    }
    let (request, _) = rows.draw_of(layer, 1);
    let refused = client.forward(request, None).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    let details = refused.get_error_details();
    assert_eq!(details.error_info().unwrap().reason, "OVERLOADED");
    assert!(details.retry_info().unwrap().retry_delay.unwrap() > Duration::ZERO);
    assert_eq!(status(&service).await.tokens_queued, 64);
    continue_ranks(&service);
    for (answer, (request, output)) in answers.into_iter().zip(wanted) {
        check(&answer.await.unwrap().unwrap(), &output, &request);
    }
    until(&service, 0, 0).await;
    assert_eq!(status(&service).await.tokens_queued, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn late_and_abandoned_requests_leave_the_queue() {
    let service = start(&[]);
    let client = Client::connect(&service.address).await.unwrap();
    let mut rows = Rows::new(&golden(FAMILY), 2, STEP);
    let layer = rows.layers()[0];
    stop_ranks(&service);
    let mut in_steps = Vec::new();
    for n in 1..=2 {
        let (request, output) = rows.draw_of(layer, STEP);
        in_steps.push((submit(&client, &request, None).await, request, output));
        until(&service, n, 0).await;
    }
    let (request, _) = rows.draw_of(layer, 8);
    let abandoned = submit(&client, &request, None).await;
    until(&service, 2, 1).await;
    let (request, _) = rows.draw_of(layer, 8);
    let late = client.forward(request, Some(Duration::from_millis(300))).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    abandoned.abort();
    // Both requests leave although no step can be formed.
    until(&service, 2, 0).await;
    assert_eq!(status(&service).await.tokens_queued, 0);
    continue_ranks(&service);
    for (answer, request, output) in in_steps {
        check(&answer.await.unwrap().unwrap(), &output, &request);
    }
    assert_eq!(status(&service).await.steps_total, 2, "requests that left the queue must not be computed");
}

#[tokio::test(flavor = "multi_thread")]
async fn max_wait_gathers_requests_and_holds_back_no_full_step() {
    // The wait is so long that an answer must come from a full step.
    let service = start(&["--max-wait-us", "60000000"]);
    let client = Client::connect(&service.address).await.unwrap();
    let mut rows = Rows::new(&golden(FAMILY), 3, STEP);
    let (first, second) = (rows.layers()[0], rows.layers()[1]);
    let (small, small_output) = rows.draw_of(first, 5);
    let waiting = submit(&client, &small, None).await;
    until(&service, 0, 1).await;
    let (full, full_output) = rows.draw_of(second, STEP);
    let answer = tokio::time::timeout(PATIENCE, client.forward(full.clone(), None)).await;
    check(&answer.expect("a full step of another layer is not held back").unwrap(), &full_output, &full);
    assert!(!waiting.is_finished());
    let (rest, rest_output) = rows.draw_of(first, STEP - 5);
    let filling = client.forward(rest.clone(), None).await.unwrap();
    let waited = waiting.await.unwrap().unwrap();
    check(&filling, &rest_output, &rest);
    check(&waited, &small_output, &small);
    assert_eq!(waited.receipt.unwrap().steps, filling.receipt.unwrap().steps, "they share a step");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_ends_when_its_time_is_up() {
    let mut service = start(&[]);
    let client = Client::connect(&service.address).await.unwrap();
    let mut rows = Rows::new(&golden(FAMILY), 4, STEP);
    let layer = rows.layers()[0];
    stop_ranks(&service);
    let (request, _) = rows.draw_of(layer, STEP);
    let in_step = submit(&client, &request, None).await;
    until(&service, 1, 0).await;
    let mut admin = AdminClient::new(expertd_client::transport::connect(&service.admin).await.unwrap());
    let drained = admin.drain(DrainRequest { timeout_ms: 200 }).await.unwrap().into_inner();
    assert_eq!(drained.requests_dropped, 1);
    let dropped = in_step.await.unwrap().unwrap_err();
    assert_eq!(dropped.code(), Code::Unavailable, "{dropped}");
    let status = service.wait(PATIENCE).expect("a drained service ends");
    assert_eq!(status.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_outlive_ranks_and_files() {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture(FAMILY)).unwrap() {
        let file = file.unwrap().path();
        std::fs::copy(&file, folder.path().join(file.file_name().unwrap())).unwrap();
    }
    let service = Service::start_checkpoint(folder.path(), 2, &PATIENT, &[]);
    for file in std::fs::read_dir(folder.path()).unwrap() {
        std::fs::remove_file(file.unwrap().path()).unwrap();
    }
    send(service.ranks()[0], Signal::KILL);
    let client = Client::connect(&service.address).await.unwrap();
    let (request, wanted) = Rows::new(&golden(FAMILY), 5, STEP).draw();
    let response = client.forward(request.clone(), None).await.unwrap();
    check(&response, &wanted, &request);
    assert_eq!(response.receipt.unwrap().generation, 2, "ranks of the next generation map the same weights");
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_that_never_last_end_the_service_with_70() {
    let service = Service::start(FAMILY, 2, &[]);
    let killing = Arc::new(AtomicBool::new(true));
    let killer = {
        let (killing, pid) = (Arc::clone(&killing), service.pid());
        std::thread::spawn(move || {
            while killing.load(Ordering::Relaxed) {
                for rank in service::ranks_of(pid) {
                    // It may be gone already.
                    let pid = rustix::process::Pid::from_raw(rank as i32).unwrap();
                    let _ = rustix::process::kill_process(pid, Signal::KILL);
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        })
    };
    let mut service = service;
    // Ten generations at most, and up to five seconds between two of them.
    let status = service.wait(2 * PATIENCE);
    killing.store(false, Ordering::Relaxed);
    killer.join().unwrap();
    assert_eq!(status.expect("a service without ranks ends").code(), Some(70));
}

#[test]
fn an_address_that_cannot_be_bound_ends_the_service_with_69() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, message) = service::serve_to_the_end(&fixture(FAMILY), &["--listen", &address]);
    assert_eq!(code, Some(69), "{message}");
}
