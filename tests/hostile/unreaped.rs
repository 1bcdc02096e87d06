//! Ranks that end but cannot be reaped: another process traces them, so that they stay zombies that their parent cannot see.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::load::{Load, PATIENCE, is_ready};
use crate::ptrace;
use crate::service::{PATIENT, Service, eventually, loaders_of, send, with_patience};

/// Traces processes without stopping them. `false`: this process may not.
fn hold(processes: &[u32]) -> bool {
    for &process in processes {
        match ptrace::seize(process as i32) {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                println!("other processes cannot be traced here (CAP_SYS_PTRACE): nothing is tested");
                return false;
            }
            held => held.unwrap(),
        }
    }
    true
}

/// What `expertd status` prints about the state.
fn status(admin: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_expertd"));
    let output = command.args(["status", "--json", "--admin", admin]).output().unwrap();
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    status["reason"].as_str().unwrap().to_owned()
}

/// Whether a process is a zombie.
fn is_zombie(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z'))
}

#[test]
fn ranks_that_cannot_be_reaped_hold_up_neither_the_next_generation_nor_the_end() {
    let mut service = Service::start("qwen3_moe", 3, &PATIENT);
    let load = Load::start(&service.address);
    assert!(load.goes_on());
    let held = service.ranks();
    if !hold(&held) {
        return;
    }
    let killed = Instant::now();
    send(held[0], Signal::KILL);
    // The router waits for the end of its ranks for 10 s.
    eventually(PATIENCE, "the service is not ready while its ranks are not reaped", || {
        !is_ready(&service.metrics)
    });
    assert!(load.goes_on(), "the next generation serves");
    println!("calls were answered {:?} after the kill", killed.elapsed());
    eventually(PATIENCE, "the first generation has ended and was not reaped", || {
        held.iter().all(|&rank| is_zombie(rank))
    });
    assert!(load.take_failed().is_empty(), "no call fails");
    let next = service.ranks();
    assert!(next.len() == 3 && next.iter().all(|rank| !held.contains(rank)), "{next:?}");

    let named = || status(&service.admin).contains(&format!("{}", held[0]));
    assert!(named(), "the status names them: {}", status(&service.admin));
    held.iter().for_each(|&rank| ptrace::reap(rank as i32));
    eventually(PATIENCE, "the status names them until they are reaped", || !named());

    // The ranks of the next generation cannot be reaped either when the service ends.
    assert!(hold(&next));
    drop(load);
    let begun = Instant::now();
    service.signal(Signal::TERM);
    let status = service.wait(PATIENCE).expect("the service ends");
    println!("the service ended after {:?}: {status}", begun.elapsed());
    assert_eq!(status.code(), Some(0));
    next.iter().for_each(|&rank| ptrace::reap(rank as i32));
}

/// The threads of a process.
fn threads(process: u32) -> usize {
    std::fs::read_dir(format!("/proc/{process}/task")).map_or(0, Iterator::count)
}

#[test]
fn a_rank_that_hangs_while_it_is_set_up_ends_its_generation() {
    let limit = Duration::from_secs(8);
    let service = Service::start("qwen3_moe", 2, &with_patience(&["--forming-timeout-ms", "8000"]));
    let load = Load::start(&service.address);
    assert!(load.goes_on());
    // A rank of so small a checkpoint may be ready before it is held.
    for _ in 0..50 {
        let before = service.ranks();
        let killed = Instant::now();
        send(before[0], Signal::KILL);
        // From its second thread on it shows life, whatever the first one does.
        let held = loop {
            match service.ranks().into_iter().find(|rank| !before.contains(rank)) {
                Some(rank) if threads(rank) >= 2 => break rank,
                _ => std::thread::yield_now(),
            }
        };
        match ptrace::seize(held as i32) {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                println!("other processes cannot be traced here (CAP_SYS_PTRACE): nothing is tested");
                return;
            }
            seized => {
                if seized.and_then(|()| ptrace::interrupt(held as i32)).is_err() {
                    // It has ended: this thread had no processor time for long.
                    eventually(PATIENCE, "the next generation serves", || {
                        ptrace::reap(held as i32);
                        is_ready(&service.metrics)
                    });
                    assert!(load.goes_on());
                    continue;
                }
            }
        }
        eventually(limit + PATIENCE, "this generation serves, or it ends and the next one serves", || {
            ptrace::reap(held as i32);
            is_ready(&service.metrics)
        });
        if service.ranks().contains(&held) {
            // Too late: it serves, and ends as a rank that does not complete its step or is killed.
            send(held, Signal::KILL);
            eventually(PATIENCE, "the held rank is gone", || {
                ptrace::reap(held as i32);
                !service.ranks().contains(&held)
            });
            assert!(load.goes_on());
            continue;
        }
        println!("served again after {:?}", killed.elapsed());
        assert!(killed.elapsed() >= limit, "{:?}", killed.elapsed());
        assert!(load.goes_on() && load.take_failed().is_empty(), "no call fails");
        return;
    }
    panic!("no rank could be held");
}

#[test]
fn a_loader_that_cannot_be_reaped_holds_up_no_call() {
    let mut service = Service::start("qwen3_moe", 2, &PATIENT);
    let load = Load::start(&service.address);
    assert!(load.goes_on());
    let mut slow = 0;
    // A loader of so small a checkpoint may have ended before it is held.
    for _ in 0..50 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_expertd"));
        command.args(["reload", "--admin", &service.admin]).stdout(Stdio::null()).stderr(Stdio::null());
        let mut reload = command.spawn().unwrap();
        let loader = loop {
            match (loaders_of(service.pid()).first(), reload.try_wait().unwrap()) {
                (Some(&loader), _) => break loader,
                (None, Some(_)) => break 0,
                (None, None) => std::thread::sleep(Duration::from_micros(200)),
            }
        };
        match ptrace::seize(loader as i32) {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied && loader != 0 => {
                println!("other processes cannot be traced here (CAP_SYS_PTRACE): nothing is tested");
                return;
            }
            held if held.is_err() || loader == 0 => {
                reload.wait().unwrap();
                continue;
            }
            _ => send(loader, Signal::KILL),
        }
        let status = reload.wait().unwrap();
        let begun = Instant::now();
        let mut longest = Duration::ZERO;
        while begun.elapsed() < Duration::from_secs(3) {
            let call = Instant::now();
            assert!(load.goes_on());
            longest = longest.max(call.elapsed());
        }
        println!("the reload ended with {status}; eight calls took {longest:?} at most");
        assert_eq!(load.take_failed(), Vec::<String>::new());
        let was_held = is_zombie(loader);
        ptrace::reap(loader as i32);
        // Half of the time that the router waits for the end of a killed process. The machine may have paused as long in an attempt.
        let held_up = was_held && !status.success() && longest >= Duration::from_secs(5);
        slow += usize::from(held_up);
        assert!(slow < 5, "{longest:?}, and as long in each attempt before");
        if was_held && !status.success() && !held_up {
            drop(load);
            service.signal(Signal::TERM);
            assert_eq!(service.wait(PATIENCE).expect("the service ends").code(), Some(0));
            return;
        }
    }
    panic!("no loader could be held");
}
