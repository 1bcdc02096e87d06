//! Tests of the real service with faults under load. They assert what the documents promise: serving resumes, and no call without a
//! deadline fails; with `--on-fault fail`, calls in flight end with a retryable status. The time limits tell an end from none: the
//! machine may be busy, or pause.

use std::time::{Duration, Instant};

use crate::reload::signal;
use crate::service::load::{Call, Load};
use crate::service::{PATIENT, Service, alive, eventually, golden, send};
use expertd_proto::v1::GetStatusRequest;
use expertd_proto::v1::admin_client::AdminClient;
use rustix::process::Signal;
use tonic::Code;

const FAMILY: &str = "qwen3_moe";
const RANKS: u32 = 3;
const CALLS_END: Duration = Duration::from_secs(45);
const SERVING_RESUMES: Duration = Duration::from_secs(120);
/// More calls than a load has in flight: some of them have begun after the wait for them.
const AWAITED: u64 = 20;
/// Number of rows of the largest request.
const LARGEST: usize = 256;

async fn warm(service: &Service) -> Load {
    let load = Load::start(&service.address, &golden(FAMILY), LARGEST).await;
    load.goes_on(AWAITED).await;
    load
}

/// Waits until a call that began after `since` is answered.
async fn serving_again(service: &Service, since: Instant) {
    let client = expertd_client::Client::connect(&service.address).await.unwrap();
    let mut rows = crate::service::load::Rows::new(&golden(FAMILY), 77, 8);
    loop {
        let (request, _) = rows.draw();
        let left = SERVING_RESUMES.saturating_sub(since.elapsed());
        match tokio::time::timeout(left, client.forward(request, None)).await {
            Ok(Ok(_)) => return,
            Ok(Err(_)) => {}
            Err(_) => panic!("serving did not resume within {SERVING_RESUMES:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Stops a rank under load, and waits until the router's steps wait for it.
async fn hold_steps(service: &Service) -> u32 {
    let rank = service.ranks()[0];
    send(rank, Signal::STOP);
    let channel = expertd_client::transport::connect(&service.admin).await.unwrap();
    let mut admin = AdminClient::new(channel);
    let (begun, mut before) = (Instant::now(), None);
    loop {
        let status = admin.get_status(GetStatusRequest {}).await.unwrap().into_inner();
        if status.requests_in_flight > 0 && before == Some(status.steps_total) {
            return rank;
        }
        before = Some(status.steps_total);
        assert!(begun.elapsed() < SERVING_RESUMES, "{status:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Checks that the load ran before, at and after the fault.
fn assert_loaded(calls: &[Call], fault: Instant) {
    let answered = calls.iter().filter(|call| call.result.is_ok());
    assert!(answered.clone().any(|call| call.ended < fault), "the load ran before the fault");
    assert!(answered.clone().any(|call| call.begun > fault), "the load ran after the fault");
    assert!(calls.iter().any(|call| call.in_flight_at(fault)), "calls were in flight");
}

/// Checks that callers waited for the fault and got their answers.
fn assert_unseen(calls: &[Call], fault: Instant) {
    assert_loaded(calls, fault);
    let failed: Vec<&Call> = calls.iter().filter(|call| call.result.is_err()).collect();
    assert!(failed.is_empty(), "{} of {} calls saw the fault: {:?}", failed.len(), calls.len(), failed[0]);
}

/// Checks the calls of a service with `--on-fault fail`.
fn assert_retryable(calls: &[Call], fault: Instant) {
    assert_loaded(calls, fault);
    assert!(calls.iter().any(|call| call.result.is_err()), "calls in flight fail");
    for call in calls {
        if let Err((code, message)) = &call.result {
            assert_eq!(*code, Code::Unavailable, "{message}");
        }
        let took = call.ended - call.begun;
        assert!(!call.in_flight_at(fault) || call.ended - fault < CALLS_END, "took {took:?}: {call:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_who_prefer_it_see_faults_at_once() {
    let service = Service::start(FAMILY, RANKS, &["--on-fault", "fail"]);
    let load = warm(&service).await;
    let fault = Instant::now();
    send(service.ranks()[1], Signal::KILL);
    tokio::time::sleep(Duration::from_millis(200)).await;
    serving_again(&service, fault).await;
    load.goes_on(AWAITED).await;
    assert_retryable(&load.stop().await, fault);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_rank_killed_in_turn() {
    let service = Service::start(FAMILY, RANKS, &[]);
    for rank in 0..RANKS as usize {
        let load = warm(&service).await;
        let ranks = service.ranks();
        assert_eq!(ranks.len(), RANKS as usize);
        let fault = Instant::now();
        send(ranks[rank], Signal::KILL);
        tokio::time::sleep(Duration::from_millis(200)).await;
        serving_again(&service, fault).await;
        load.goes_on(AWAITED).await;
        let calls = load.stop().await;
        assert_unseen(&calls, fault);
        let generation = |call: &Call| call.result.as_ref().ok().copied();
        let before = calls.iter().filter(|call| call.ended < fault).filter_map(generation).max().unwrap();
        let after = calls.iter().filter_map(generation).max().unwrap();
        assert!(after > before, "the generation must change: {before}, then {after}");
        for old in &ranks {
            assert!(!alive(*old), "rank process {old} of the ended generation must have ended");
        }
        // The process must also be reaped: a zombie would still be listed as a child.
        assert!(service.ranks().iter().all(|pid| !ranks.contains(pid)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_stopped_and_continued() {
    // Only the missing signs of life end the generation.
    let service = Service::start(FAMILY, RANKS, &["--step-timeout-ms", "300000"]);
    let load = warm(&service).await;
    let stopped = service.ranks()[1];
    let fault = Instant::now();
    send(stopped, Signal::STOP);
    tokio::time::sleep(Duration::from_millis(2500)).await;
    serving_again(&service, fault).await;
    // If the stopped process still existed, it would continue now, and must write nowhere.
    signal(stopped, Signal::CONT);
    tokio::time::sleep(Duration::from_secs(1)).await;
    load.goes_on(AWAITED).await;
    let calls = load.stop().await;
    assert_unseen(&calls, fault);
    assert!(!alive(stopped), "a rank of an ended generation is killed, stopped or not");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_stopped_for_a_moment_causes_no_fault() {
    let service = Service::start(FAMILY, RANKS, &PATIENT);
    let load = warm(&service).await;
    let ranks = service.ranks();
    let fault = Instant::now();
    for _ in 0..5 {
        send(ranks[2], Signal::STOP);
        tokio::time::sleep(Duration::from_millis(100)).await;
        send(ranks[2], Signal::CONT);
        load.goes_on(AWAITED).await;
    }
    serving_again(&service, Instant::now()).await;
    assert_unseen(&load.stop().await, fault);
    assert_eq!(service.ranks(), ranks, "the ranks are those from before");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_of_the_router_or_of_all_processes_ends_no_generation() {
    // Shorter than the pauses, and long enough for steps on a busy machine.
    let timeouts = ["--step-timeout-ms", "8000", "--liveness-timeout-ms", "8000"];
    let service = Service::start(FAMILY, RANKS, &timeouts);
    let load = warm(&service).await;
    let ranks = service.ranks();
    let fault = Instant::now();
    for all in [false, true] {
        service.signal(Signal::STOP);
        let paused = if all { &ranks[..] } else { &[] };
        paused.iter().for_each(|&rank| send(rank, Signal::STOP));
        tokio::time::sleep(Duration::from_secs(9)).await;
        for &rank in paused {
            send(rank, Signal::CONT);
            // Time to find a deadline passed before the next rank goes on.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        service.signal(Signal::CONT);
        load.goes_on(AWAITED).await;
    }
    serving_again(&service, Instant::now()).await;
    assert_unseen(&load.stop().await, fault);
    assert_eq!(service.ranks(), ranks, "the ranks are those from before");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_router_killed() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", folder.path().join("expertd.sock").display());
    let mut service = Service::start(FAMILY, RANKS, &["--listen", &socket]);
    let load = warm(&service).await;
    let ranks = service.ranks();
    let fault = Instant::now();
    service.signal(Signal::KILL);
    service.wait(SERVING_RESUMES).expect("killed");
    eventually(SERVING_RESUMES, "ranks die with the router", || !ranks.iter().any(|&pid| alive(pid)));
    tokio::time::sleep(Duration::from_millis(200)).await;
    let calls = load.stop().await;
    for call in calls.iter().filter(|call| call.in_flight_at(fault)) {
        assert!(call.ended - fault < CALLS_END, "{call:?}");
        if let Err((code, message)) = &call.result {
            assert_eq!(*code, Code::Unavailable, "{message}");
        }
    }
    let shared = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let left =
        shared.map(|entry| entry.file_name()).filter(|name| name.to_string_lossy().contains("expertd"));
    assert_eq!(left.collect::<Vec<_>>(), [] as [std::ffi::OsString; 0], "no file may be left in /dev/shm");
    // The socket file outlives a killed process; a new service replaces it.
    let again = Service::start(FAMILY, RANKS, &["--listen", &socket]);
    serving_again(&again, Instant::now()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_rank_dies_with_the_router() {
    let mut service = Service::start(FAMILY, 2, &[]);
    let ranks = service.ranks();
    send(ranks[0], Signal::STOP);
    service.signal(Signal::KILL);
    service.wait(SERVING_RESUMES).expect("killed");
    eventually(SERVING_RESUMES, "stopped ranks die with the router", || !ranks.iter().any(|&pid| alive(pid)));
}

/// Whether this process, and with it those that it starts, ignores a signal.
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal.as_raw() - 1) & 1 == 1
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_drains_the_service() {
    // A service that inherits an ignored SIGHUP, as under nohup, goes on.
    let signals = [Signal::TERM, Signal::INT, Signal::HUP].into_iter().filter(|signal| !is_ignored(*signal));
    for signal in signals {
        let mut service = Service::start(FAMILY, RANKS, &PATIENT);
        let load = warm(&service).await;
        let ranks = service.ranks();
        // Without them the router might see the signal before any call that is on its way.
        let held = hold_steps(&service).await;
        let asked = Instant::now();
        service.signal(signal);
        send(held, Signal::CONT);
        let status = service.wait(SERVING_RESUMES).expect("a drained service must exit");
        assert_eq!(status.code(), Some(0), "{signal:?}");
        assert!(!ranks.iter().any(|&pid| alive(pid)), "all ranks must end with the service");
        let calls = load.stop().await;
        for call in calls.iter().filter(|call| call.in_flight_at(asked)) {
            if let Err((code, message)) = &call.result {
                assert_eq!(*code, Code::Unavailable, "{message}");
            }
        }
        assert!(
            calls.iter().any(|call| call.in_flight_at(asked) && call.result.is_ok()),
            "{signal:?}: calls in flight are answered"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_services_on_one_machine_are_independent() {
    let first = Service::start(FAMILY, 2, &[]);
    let second = Service::start(FAMILY, 2, &[]);
    assert_ne!(first.address, second.address);
    let (of_first, of_second) = (warm(&first).await, warm(&second).await);
    // The death of one service does not affect the other.
    drop(first);
    of_second.goes_on(AWAITED).await;
    of_first.stop().await;
    let calls = of_second.stop().await;
    let failed = calls.iter().find(|call| call.result.is_err());
    assert!(failed.is_none(), "{failed:?}");
}
