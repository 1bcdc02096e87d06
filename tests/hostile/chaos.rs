//! Threads and processes of the service that are stopped, blocked, killed, held and starved under load, in random order.
//!
//! Clients either notice nothing, or readiness fails and the service ends with the watchdog's exit code; only the death of the
//! router itself is seen at once. Rounds of loaders begin with a reload. By default a few rounds are run;
//! EXPERTD_CHAOS_ROUNDS asks for more, EXPERTD_CHAOS_SEED for another order.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use crate::faults::{Fault, Lasting, Target, Victim, cause, threads};
use crate::load::{Load, PATIENCE, is_ready};
use crate::service::{Service, alive, eventually, loaders_of};

/// Exit code of the watchdog.
const LOST: i32 = 71;
/// Time limit for the first loader of a reload.
const LOADING: Duration = Duration::from_secs(5);

/// The consequence of a fault.
#[derive(Debug)]
enum Outcome {
    /// Every call was answered.
    Unnoticed,
    /// The service ended.
    #[allow(dead_code, reason = "printed with Debug")]
    Ended { code: Option<i32>, after: Duration, unready_before: bool },
}

/// Causes a fault and finds out what it does. `None`: the victim had ended before.
fn endure(
    service: &mut Service,
    load: &Load,
    victim: &Victim,
    fault: Fault,
) -> std::io::Result<Option<Outcome>> {
    let Some(lasting) = cause(victim, fault)? else { return Ok(None) };
    let mut watch = Watch { service, load, begun: Instant::now(), unready_before: false };
    let until = watch.begun + fault.time();
    if let Some(ended) = watch.until(|_| Instant::now() >= until, Some(&lasting)) {
        return Ok(Some(ended));
    }
    // The service must serve while the fault lasts, unless it is that of the whole router.
    if victim.name != "router" && fault != Fault::Pause {
        let ended = watch.answers(Some(&lasting), &format!("{} {fault:?}", victim.name));
        if ended.is_some() {
            return Ok(ended);
        }
    }
    drop(lasting);
    let ended = watch.answers(None, &format!("after {} {fault:?}", victim.name));
    Ok(Some(ended.unwrap_or(Outcome::Unnoticed)))
}

/// A service that may end.
struct Watch<'a> {
    service: &'a mut Service,
    load: &'a Load,
    begun: Instant,
    unready_before: bool,
}

impl Watch<'_> {
    /// Watches the service until `over`; its end, if it ends before.
    fn until(&mut self, over: impl Fn(&Load) -> bool, lasting: Option<&Lasting>) -> Option<Outcome> {
        while !over(self.load) {
            if let Some(lasting) = lasting {
                lasting.let_end();
            }
            if let Some(status) = self.service.wait(Duration::from_millis(50)) {
                let &mut Watch { begun, unready_before, .. } = self;
                return Some(Outcome::Ended { code: status.code(), after: begun.elapsed(), unready_before });
            }
            self.unready_before |= !is_ready(&self.service.metrics);
        }
        None
    }

    /// Waits until a few calls that began after this one have been answered; the end of the service, if it ends before.
    fn answers(&mut self, lasting: Option<&Lasting>, what: &str) -> Option<Outcome> {
        let (before, begun) = (self.load.answered(), Instant::now());
        self.until(
            |load| {
                assert!(
                    begun.elapsed() < PATIENCE,
                    "{what}: no call is answered, and the service does not end"
                );
                load.answered() >= before + 8
            },
            lasting,
        )
    }
}

/// Starts a reload, and waits for one of its loaders. `None`: it is over before a loader was seen.
fn reload(service: &Service) -> (Child, Option<u32>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_expertd"));
    command.args(["reload", "--admin", &service.admin]).stdout(Stdio::null()).stderr(Stdio::null());
    let mut reload = command.spawn().unwrap();
    let begun = Instant::now();
    while begun.elapsed() < LOADING && reload.try_wait().unwrap().is_none() {
        if let Some(&loader) = loaders_of(service.pid()).first() {
            return (reload, Some(loader));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    (reload, None)
}

/// The threads of the router and its ranks, and the processes.
fn victims(service: &Service) -> Vec<Victim> {
    let mut victims = threads(service.pid(), "router");
    victims.push(Victim::process("router".to_owned(), service.pid()));
    for (rank, process) in service.ranks().into_iter().enumerate() {
        victims.extend(threads(process, &format!("rank {rank}")));
        victims.push(Victim::process(format!("rank {rank}"), process));
    }
    // A stand-in for the loader of a reload that the round starts.
    victims.push(Victim::process("loader".to_owned(), 0));
    victims
}

/// Every fault of every victim, in random order.
fn shuffled(victims: &[Victim], random: &mut SmallRng) -> Vec<(String, Fault)> {
    let mut order: Vec<_> = victims
        .iter()
        .flat_map(|victim| victim.faults().iter().map(|&fault| (victim.name.clone(), fault)))
        .collect();
    order.sort_unstable_by_key(|(name, fault)| (name.clone(), *fault as u8));
    order.dedup();
    order.shuffle(random);
    order
}

#[test]
fn threads_and_processes_in_random_order() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (rounds, seed) = (number("EXPERTD_CHAOS_ROUNDS", 4), number("EXPERTD_CHAOS_SEED", 1));
    let mut random = SmallRng::seed_from_u64(seed);
    let start = || {
        let service = Service::start("qwen3_moe", 2, &["--step-timeout-ms", "3000"]);
        let load = Load::start(&service.address);
        assert!(load.goes_on());
        (service, load)
    };
    let (mut service, mut load) = start();
    let mut order: Vec<(String, Fault)> = Vec::new();
    for round in 0..rounds {
        let mut victims = victims(&service);
        if order.is_empty() {
            order = shuffled(&victims, &mut random);
        }
        let (name, fault) = order.pop().unwrap();
        victims.retain(|victim| victim.name == name);
        // Some threads come and go.
        if victims.is_empty() {
            continue;
        }
        let mut victim = victims.swap_remove(random.random_range(0..victims.len()));
        let mut reloading = None;
        if victim.name == "loader" {
            let (reload, loader) = reload(&service);
            reloading = Some(reload);
            victim.target = Target::Process(loader.unwrap_or(0));
        }
        let outcome = match victim.target {
            Target::Process(0) => None,
            _ => match endure(&mut service, &load, &victim, fault) {
                Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                    println!("other processes cannot be traced here (CAP_SYS_PTRACE): nothing is tested");
                    return;
                }
                outcome => outcome.unwrap(),
            },
        };
        println!("round {round}, {name}, {fault:?}: {outcome:?}");
        if let Some(mut reload) = reloading {
            eventually(PATIENCE, "the reload ends, with or without an error", || {
                reload.try_wait().unwrap().is_some()
            });
        }
        match outcome {
            Some(Outcome::Ended { code, unready_before, .. }) => {
                if name == "router" && fault == Fault::Kill {
                    assert_eq!(code, None, "it is the signal that ends it");
                } else {
                    assert_eq!(code, Some(LOST), "{name} {fault:?}");
                    assert!(unready_before, "{name} {fault:?}: the service was ready to its end");
                    assert!(fault != Fault::Pause, "{name}: a pause of a second ends nothing");
                }
                let ranks = service.ranks();
                eventually(PATIENCE, "ranks end with the router", || !ranks.iter().any(|&rank| alive(rank)));
                drop(load);
                (service, load) = start();
            }
            Some(Outcome::Unnoticed) => {
                let failed = load.take_failed();
                assert!(
                    failed.is_empty(),
                    "{name} {fault:?}: {} calls failed: {:?}",
                    failed.len(),
                    failed[0]
                );
            }
            None => {}
        }
    }
}
