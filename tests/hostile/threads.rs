//! Threads of the router and of ranks that are stopped, killed and starved under load, in random order, from outside:
//! through ptrace and priorities, without help of the service.
//!
//! Clients either notice nothing, or readiness fails and the service ends with the watchdog's exit code. By default a few
//! rounds are run; EXPERTD_THREAD_ROUNDS asks for more, EXPERTD_THREAD_SEED for another order.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use expertd_proto::Client;
use expertd_proto::v1::{DType, ForwardRequest};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::{Pid, setpriority_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::attack::honest_client;
use crate::cores::Burner;
use crate::ptrace;
use crate::service::Service;

/// Exit code of the watchdog.
const LOST: i32 = 71;
/// Exit code after a panic of the step loop, for example because it joins a thread that was killed.
const PANICKED: i32 = 70;
/// Longer than the watchdog needs to end the service after a loss.
const LONG: Duration = Duration::from_secs(9);
/// Shorter than a standstill that the watchdog reports.
const SHORT: Duration = Duration::from_secs(1);
/// Deadline of each call, and the time limit for things that must happen.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Stopped for a second, possibly while it holds a lock.
    Pause,
    /// Stopped until the service has ended, or for nine seconds.
    Stop,
    /// Ended without unwinding.
    Kill,
    /// Lowest priority on a core that another process keeps busy.
    Starve,
}

/// A thread of the service.
#[derive(Clone, Debug)]
struct Victim {
    /// `router` or `rank 0`, and the thread's name.
    name: String,
    thread: i32,
}

fn threads(process: u32, of: &str) -> Vec<Victim> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    tasks
        .filter_map(|task| {
            let path = task.ok()?.path();
            // A thread may end meanwhile.
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            let number: i32 = path.file_name()?.to_str()?.parse().ok()?;
            Some(Victim { name: format!("{of}: {}", name.trim()), thread: number })
        })
        .collect()
}

/// Four callers, on a thread of their own.
struct Load {
    over: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    failed: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    fn start(address: &str) -> Load {
        let (over, answered, failed) = (Arc::default(), Arc::default(), Arc::default());
        let mut load = Load { over, answered, failed, thread: None };
        let (over, answered, failed) =
            (Arc::clone(&load.over), Arc::clone(&load.answered), Arc::clone(&load.failed));
        let address = address.to_owned();
        let thread = std::thread::spawn(move || {
            let callers: Vec<_> = (0..4).map(|_| caller(&address, &over, &answered, &failed)).collect();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(futures_util::future::join_all(callers));
        });
        load.thread = Some(thread);
        load
    }

    /// Waits until a few calls that began after this one have been answered.
    fn goes_on(&self) -> bool {
        let (before, begun) = (self.answered.load(Ordering::Relaxed), Instant::now());
        while self.answered.load(Ordering::Relaxed) < before + 8 {
            if begun.elapsed() > PATIENCE {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn caller(address: &str, over: &AtomicBool, answered: &AtomicU64, failed: &Mutex<Vec<String>>) {
    let client = honest_client(address).await.unwrap();
    while !over.load(Ordering::Relaxed) {
        match call(&client).await {
            Ok(()) => _ = answered.fetch_add(1, Ordering::Relaxed),
            Err(error) => {
                failed.lock().unwrap().push(error);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

async fn call(client: &Client) -> Result<(), String> {
    let model = client.model("").await.map_err(|status| status.to_string())?;
    let rows = Bytes::from(vec![0; model.hidden as usize * 4]);
    let request = ForwardRequest::inline(model.moe_layers[0].layer, 1, DType::DtypeF32, rows);
    client.forward(request, Some(PATIENCE)).await.map(drop).map_err(|status| status.to_string())
}

/// Whether `/readyz` says that the service is ready. No answer within a second is a no.
fn is_ready(metrics: &str) -> bool {
    let address = metrics.trim_start_matches("http://").trim_end_matches("/metrics");
    let ask = || -> std::io::Result<String> {
        let mut socket = TcpStream::connect(address)?;
        socket.set_read_timeout(Some(Duration::from_secs(1)))?;
        socket.write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

/// The consequence of a fault.
#[derive(Debug)]
enum Outcome {
    /// Every call was answered.
    Unnoticed,
    /// The service ended.
    Ended { code: Option<i32>, after: Duration, unready_before: bool },
}

/// Watches the service for `time`, or to its end.
fn watch(service: &mut Service, time: Duration, thread: i32) -> Option<Outcome> {
    let begun = Instant::now();
    let mut unready_before = false;
    while begun.elapsed() < time {
        // A stopped thread must be reaped by its tracer, or the process never ends.
        ptrace::reap(thread);
        if let Some(status) = service.wait(Duration::from_millis(50)) {
            return Some(Outcome::Ended { code: status.code(), after: begun.elapsed(), unready_before });
        }
        unready_before |= !is_ready(&service.metrics);
    }
    None
}

/// Causes a fault and finds out what it does. `None`: the thread had ended before.
fn cause(
    service: &mut Service,
    load: &Load,
    victim: &Victim,
    fault: Fault,
) -> std::io::Result<Option<Outcome>> {
    let thread = victim.thread;
    let (time, caused) = match fault {
        Fault::Pause => (SHORT, ptrace::stop(thread)?),
        Fault::Stop => (LONG, ptrace::stop(thread)?),
        Fault::Kill => (LONG, ptrace::kill(thread, PATIENCE)?),
        Fault::Starve => (LONG, true),
    };
    if !caused {
        return Ok(None);
    }
    let ended = if fault == Fault::Starve {
        let id = Pid::from_raw(thread);
        let before = sched_getaffinity(None).unwrap();
        let mut core = CpuSet::new();
        core.set((0..CpuSet::MAX_CPU).find(|&core| before.is_set(core)).unwrap());
        let burner = Burner::start(Some(&core), 1.0);
        let starved = sched_setaffinity(id, &core).is_ok() && setpriority_process(id, 19).is_ok();
        let ended = watch(service, time, thread);
        drop(burner);
        let _ = sched_setaffinity(id, &before);
        let _ = setpriority_process(id, 0);
        if !starved {
            return Ok(None);
        }
        ended
    } else {
        watch(service, time, thread)
    };
    if let Some(outcome) = ended {
        return Ok(Some(outcome));
    }
    if fault == Fault::Stop {
        // The service must serve while the thread is stopped.
        assert!(load.goes_on(), "{}: calls are not answered, and the service does not end", victim.name);
    }
    if matches!(fault, Fault::Pause | Fault::Stop) {
        ptrace::go_on(thread);
    }
    assert!(
        load.goes_on(),
        "{} {fault:?}: calls are not answered, and the service does not end",
        victim.name
    );
    Ok(Some(Outcome::Unnoticed))
}

#[test]
fn threads_that_are_stopped_killed_and_starved() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (rounds, seed) = (number("EXPERTD_THREAD_ROUNDS", 3), number("EXPERTD_THREAD_SEED", 1));
    let mut random = SmallRng::seed_from_u64(seed);
    let start = || {
        let service = Service::start("qwen3_moe", 2, &["--step-timeout-ms", "3000"]);
        let load = Load::start(&service.address);
        assert!(load.goes_on());
        (service, load)
    };
    let (mut service, mut load) = start();
    // Whether a thread of this service was killed. If something waits for that thread's end later, the step loop panics.
    let mut killed = false;
    let mut order: Vec<(String, Fault)> = Vec::new();
    for round in 0..rounds {
        let mut victims = threads(service.pid(), "router");
        for (rank, pid) in service.ranks().into_iter().enumerate() {
            victims.extend(threads(pid, &format!("rank {rank}")));
        }
        if order.is_empty() {
            let mut names: Vec<_> = victims.iter().map(|victim| victim.name.clone()).collect();
            names.sort_unstable();
            names.dedup();
            let faults = [Fault::Pause, Fault::Stop, Fault::Kill, Fault::Starve];
            order = names.iter().flat_map(|name| faults.map(|fault| (name.clone(), fault))).collect();
            order.shuffle(&mut random);
        }
        let (name, fault) = order.pop().unwrap();
        victims.retain(|victim| victim.name == name);
        // Threads that load weights, for example, come and go.
        if victims.is_empty() {
            continue;
        }
        let victim = victims.swap_remove(random.random_range(0..victims.len()));
        let outcome = match cause(&mut service, &load, &victim, fault) {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                println!(
                    "the threads of another process cannot be traced here (CAP_SYS_PTRACE): nothing is tested"
                );
                return;
            }
            outcome => outcome.unwrap(),
        };
        println!("round {round}, {name}, {fault:?}: {outcome:?}");
        match outcome {
            Some(Outcome::Ended { code, unready_before, .. }) => {
                assert!(matches!(code, Some(LOST | PANICKED)), "{name} {fault:?}: exit code {code:?}");
                assert!(
                    unready_before || code == Some(PANICKED),
                    "{name} {fault:?}: the service was ready to its end"
                );
                assert!(fault != Fault::Pause || killed, "{name}: a pause of a second ends nothing");
                drop(load);
                (service, load) = start();
                killed = false;
            }
            Some(Outcome::Unnoticed) => {
                let failed = std::mem::take(&mut *load.failed.lock().unwrap());
                assert!(
                    failed.is_empty(),
                    "{name} {fault:?}: {} calls failed: {:?}",
                    failed.len(),
                    failed[0]
                );
                killed |= fault == Fault::Kill;
            }
            None => {}
        }
    }
}
