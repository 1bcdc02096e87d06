//! The router's threads that read the messages of ranks are killed and stopped: that ends a generation and nothing else.

use std::time::Duration;

use rustix::process::Signal;

use crate::faults::{Fault, Victim, cause, threads};
use crate::load::{Load, PATIENCE};
use crate::service::{Service, eventually, send};

/// Waits for ranks of which none is among `before`, and for answers. No call may have failed.
fn next_generation(service: &mut Service, load: &Load, before: &[u32], what: &str) {
    eventually(PATIENCE, what, || {
        let now = service.ranks();
        now.len() == before.len() && now.iter().all(|rank| !before.contains(rank))
    });
    assert!(load.goes_on(), "{what}: the next generation answers");
    assert_eq!(load.take_failed(), Vec::<String>::new(), "{what}");
    assert!(service.wait(Duration::ZERO).is_none(), "{what}: the service goes on");
}

#[test]
fn a_lost_reader_of_a_rank_ends_its_generation_and_nothing_later() {
    let mut service = Service::start("qwen3_moe", 2, &[]);
    let load = Load::start(&service.address);
    assert!(load.goes_on());
    for fault in [Fault::Kill, Fault::Stop] {
        let ranks = service.ranks();
        let reader = |victim: &Victim| victim.name == "router: rank-1";
        let reader =
            threads(service.pid(), "router").into_iter().find(reader).expect("a thread of that name");
        let lasting = match cause(&reader, fault) {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                println!("other processes cannot be traced here (CAP_SYS_PTRACE): nothing is tested");
                return;
            }
            caused => caused.unwrap().expect("the thread has not ended"),
        };
        next_generation(&mut service, &load, &ranks, &format!("{fault:?} of the reader"));
        // The next loss of a rank is noticed as ever, while the stopped reader of the generation before still stands.
        let ranks = service.ranks();
        send(ranks[1], Signal::KILL);
        next_generation(&mut service, &load, &ranks, &format!("a rank killed after {fault:?}"));
        drop(lasting);
    }
    drop(load);
    service.signal(Signal::TERM);
    assert_eq!(service.wait(PATIENCE).expect("the service ends").code(), Some(0));
}
