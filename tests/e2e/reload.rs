//! Other weights come in under load, and ranks and loaders are killed and stopped in random order.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use expertd_cli::admin::AdminAddress;
use expertd_cli::reload::{ReloadArgs, reload};
use expertd_client::Client;
use expertd_proto::v1::ReloadResponse;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinSet;
use tonic::Code;

use crate::service::{PATIENT, Service, loaders_of};
use crate::weights::{Answers, checkpoint, large};

/// Fewer rows than a request has: every request is split.
const ROWS_PER_STEP: &str = "4";
pub(crate) const LOST: Duration = Duration::from_secs(120);

pub(crate) async fn reload_to(service: &Service, model: &Path) -> Result<ReloadResponse, String> {
    reload_of(service, Some(model), None).await
}

/// A reload of a folder, or of the one that serves, with a placement, or with the present one.
pub(crate) async fn reload_of(
    service: &Service,
    model: Option<&Path>,
    placement: Option<&Path>,
) -> Result<ReloadResponse, String> {
    let admin = AdminAddress { address: Some(service.admin.clone()), ..AdminAddress::default() };
    let args = ReloadArgs {
        model: model.map(Path::to_owned),
        placement: placement.map(Path::to_owned),
        admin,
        json: false,
    };
    reload(&args).await.map_err(|error| error.to_string())
}

/// Callers who compare every answer with the weights that its receipt names.
pub(crate) struct Callers {
    stop: Arc<AtomicBool>,
    pub(crate) answered: Arc<AtomicU64>,
    workers: JoinSet<Outcome>,
}

#[derive(Default)]
pub(crate) struct Outcome {
    latencies: Vec<Duration>,
    /// Calls that expected another version than the loaded one.
    other_version: usize,
}

impl Callers {
    pub(crate) async fn start(service: &Service, answers: &Arc<Answers>) -> Callers {
        let stop = Arc::new(AtomicBool::new(false));
        let answered = Arc::new(AtomicU64::new(0));
        let mut workers = JoinSet::new();
        for worker in 0..4 {
            let client = Client::connect(&service.address).await.unwrap();
            let (stop, answered, answers) = (Arc::clone(&stop), Arc::clone(&answered), Arc::clone(answers));
            // One of them names the version that it saw last.
            workers.spawn(call(client, answers, stop, answered, worker == 0));
        }
        Callers { stop, answered, workers }
    }

    /// Ends the callers; calls by latency, and how many expected another version.
    pub(crate) async fn stop(self) -> Outcome {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Outcome::default();
        for outcome in self.workers.join_all().await {
            all.latencies.extend(outcome.latencies);
            all.other_version += outcome.other_version;
        }
        all.latencies.sort_unstable();
        all
    }
}

async fn call(
    client: Client,
    answers: Arc<Answers>,
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    is_pinned: bool,
) -> Outcome {
    let mut outcome = Outcome::default();
    let mut version = None;
    while !stop.load(Ordering::Relaxed) {
        let mut request = answers.request.clone();
        request.expected_weight_version = version.filter(|_| is_pinned);
        let begun = Instant::now();
        match tokio::time::timeout(LOST, client.forward(request, None)).await.expect("a lost call") {
            Ok(response) => {
                answers.check(&response);
                let loaded = response.receipt.unwrap().weight_version;
                assert!(
                    !is_pinned || version.is_none_or(|expected| expected == loaded),
                    "{version:?}, {loaded}"
                );
                version = Some(loaded);
                answered.fetch_add(1, Ordering::Relaxed);
                outcome.latencies.push(begun.elapsed());
            }
            Err(status) => {
                assert!(is_pinned && status.code() == Code::FailedPrecondition, "{status:?}");
                outcome.other_version += 1;
                version = None;
            }
        }
    }
    outcome
}

pub(crate) fn show(what: &str, outcome: &Outcome) {
    let latencies = &outcome.latencies;
    println!(
        "{what}: {} answers, p50 {:.1} ms, longest call {:.0} ms; {} calls expected another version",
        latencies.len(),
        latencies[latencies.len() / 2].as_secs_f64() * 1e3,
        latencies[latencies.len() - 1].as_secs_f64() * 1e3,
        outcome.other_version
    );
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

/// Two checkpoints take turns; no call fails but those that expect the other version. 5 reloads, or
/// `EXPERTD_RELOAD_ROUNDS`.
#[tokio::test(flavor = "multi_thread")]
async fn reloads_under_load_fail_no_call() {
    let folder = tempfile::tempdir().unwrap();
    let sources: [PathBuf; 2] = [1, 2].map(|seed| checkpoint(folder.path(), seed));
    let answers = Arc::new(Answers::of(&[&sources[0], &sources[1]]).await);
    let service = Service::start_checkpoint(&sources[0], 2, &["--max-tokens-per-step", ROWS_PER_STEP], &[]);
    let callers = Callers::start(&service, &answers).await;
    let (mut longest, mut fingerprint) = (0.0_f64, String::new());
    let rounds = number("EXPERTD_RELOAD_ROUNDS", 5);
    for round in 1..=rounds {
        let report = reload_to(&service, &sources[(round % 2) as usize]).await.unwrap();
        assert_eq!(report.weight_version, 1 + round, "the version counts up once");
        assert_ne!(report.weight_fingerprint, fingerprint);
        fingerprint = report.weight_fingerprint;
        longest = longest.max(report.pause_seconds);
        let before = callers.answered.load(Ordering::Relaxed);
        while callers.answered.load(Ordering::Relaxed) < before + 8 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    // What cannot be loaded changes nothing.
    let other_shape = large(folder.path());
    let refused = reload_to(&service, &other_shape).await.unwrap_err();
    assert!(refused.contains("another shape") && refused.contains("hidden is 256, expected 64"), "{refused}");
    let nowhere = reload_to(&service, &folder.path().join("nowhere")).await.unwrap_err();
    assert!(nowhere.contains("config.json"), "{nowhere}");
    let outcome = callers.stop().await;
    show(&format!("{rounds} reloads, longest pause {:.0} ms", longest * 1e3), &outcome);
    let client = Client::connect(&service.address).await.unwrap();
    let model = client.model("").await.unwrap();
    assert_eq!((model.weight_version, model.weight_fingerprint), (1 + rounds, fingerprint));
}

/// Reloads until a loader is killed before its end, which a busy machine may prevent. Returns the reason of that reload's failure, and how
/// many reloads succeeded before.
pub(crate) async fn reload_whose_loader_is_killed(service: &Service, models: &[&Path]) -> (String, u64) {
    let begun = Instant::now();
    for (succeeded, model) in (0..).zip(models.iter().cycle()) {
        let killing = async {
            loop {
                if let Some(loader) = loaders_of(service.pid()).first() {
                    signal(*loader, Signal::KILL);
                    return std::future::pending::<()>().await;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let reloaded = tokio::select! {
            reloaded = reload_to(service, model) => reloaded,
            () = killing => unreachable!("it has no end"),
        };
        match reloaded {
            Ok(_) => assert!(begun.elapsed() < LOST, "no loader could be killed"),
            Err(reason) => return (reason, succeeded),
        }
    }
    unreachable!("models repeat")
}

/// A reload whose loader is killed leaves the earlier weights serving, and says why.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_that_fails_leaves_the_earlier_weights() {
    let folder = tempfile::tempdir().unwrap();
    let path = large(folder.path());
    let service = Service::start_checkpoint(&path, 2, &PATIENT, &[]);
    let (reason, succeeded) = reload_whose_loader_is_killed(&service, &[&path]).await;
    assert!(reason.contains("the loader of rank"), "{reason}");
    let client = Client::connect(&service.address).await.unwrap();
    let model = client.model("").await.unwrap();
    assert_eq!((model.weight_version, model.generation), (1 + succeeded, 1 + succeeded));
    let report = reload_to(&service, &path).await.unwrap();
    assert_eq!(report.weight_version, 2 + succeeded);
    assert_eq!(report.weight_fingerprint, model.weight_fingerprint);
}

/// A loader of the service, if a reload starts one soon: it lives for some ten milliseconds.
pub(crate) async fn catch_loader(service: &Service) -> Option<u32> {
    for _ in 0..200 {
        if let Some(loader) = loaders_of(service.pid()).first() {
            return Some(*loader);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    None
}

/// Sends a signal to a process that may have ended.
pub(crate) fn signal(pid: u32, signal: Signal) {
    let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), signal);
}

/// Whether this build of the service has faults that tests cause (`expertd_shm::faults`).
const INJECTS: bool = cfg!(any(debug_assertions, feature = "fault-injection"));
/// Memory files of the next generation cannot be made, or not grown; those of the next loader cannot be made, or not grown.
const NO_MEMORY: [&str; 4] = ["memfd-emfile", "memfd-enomem", "weights-emfile", "weights-enomem"];
/// A kernel that never ends, and one that accesses memory that is not mapped.
const ON_GPUS: [&str; 2] = ["gpu-hang", "gpu-error"];

/// A kind of fault.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Rank(Signal),
    Loader(Signal),
    /// A fault that the service causes itself when it finds a file of this name.
    Injected(&'static str),
}

impl Kind {
    fn name(self) -> String {
        let signal = |signal| if signal == Signal::KILL { "killed" } else { "stopped" };
        match self {
            Kind::Rank(how) => format!("rank {}", signal(how)),
            Kind::Loader(how) => format!("loader {}", signal(how)),
            Kind::Injected(name) => name.to_owned(),
        }
    }
}

/// Faults in random order. Every kind comes before any comes again, and a killed rank comes three times as often as others.
struct Deck {
    all: Vec<Kind>,
    left: Vec<Kind>,
}

impl Deck {
    fn new(injected: &[&'static str]) -> Deck {
        let mut all = vec![Kind::Rank(Signal::KILL); 3];
        all.push(Kind::Rank(Signal::STOP));
        all.extend([Signal::KILL, Signal::STOP].map(Kind::Loader));
        all.extend(injected.iter().copied().filter(|_| INJECTS).map(Kind::Injected));
        Deck { all, left: Vec::new() }
    }

    fn draw(&mut self, random: &mut SmallRng) -> Kind {
        if self.left.is_empty() {
            self.left.clone_from(&self.all);
            self.left.shuffle(random);
        }
        self.left.pop().unwrap()
    }
}

/// Ranks and loaders are killed and stopped and memory lacks in random order while weights are reloaded: no call fails, no
/// answer is wrong. 10 s, or `EXPERTD_CHAOS_SECONDS`; the seed is printed, and `EXPERTD_CHAOS_SEED` sets it.
#[tokio::test(flavor = "multi_thread")]
async fn chaos_among_ranks_and_loaders_fails_no_call() {
    chaos("cpu", &NO_MEMORY, 1e-5).await;
}

/// The same on GPUs, whose kernels also hang and fail.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
async fn chaos_on_gpus_fails_no_call() {
    chaos("cuda", &[&NO_MEMORY[..], &ON_GPUS].concat(), 1e-2).await;
}

async fn chaos(device: &str, injected: &[&'static str], tolerance: f64) {
    let seed = number("EXPERTD_CHAOS_SEED", u64::from(std::process::id()));
    println!("chaos with seed {seed}");
    let mut random = SmallRng::seed_from_u64(seed);
    let folder = tempfile::tempdir().unwrap();
    let faults = tempfile::tempdir().unwrap();
    let sources: [PathBuf; 2] = [1, 2].map(|seed| checkpoint(folder.path(), seed));
    let answers = Arc::new(Answers::of(&[&sources[0], &sources[1]]).await.within(tolerance));
    let flags = ["--max-tokens-per-step", ROWS_PER_STEP, "--device", device, "--device-timeout-ms", "4000"];
    let environment = [("EXPERTD_INJECT_FAULTS", faults.path().to_str().unwrap())];
    let service = Arc::new(Service::start_checkpoint(&sources[0], 2, &flags, &environment));
    let callers = Callers::start(&service, &answers).await;
    // Several ranks on a busy GPU take longer to start than the faults last.
    let until = Instant::now() + Duration::from_secs(number("EXPERTD_CHAOS_SECONDS", 10));
    let ends = Arc::new(AtomicBool::new(false));
    let reloading = {
        let (service, sources, ends) = (Arc::clone(&service), sources.clone(), Arc::clone(&ends));
        tokio::spawn(async move {
            let (mut done, mut refused) = (0, 0);
            while !ends.load(Ordering::Relaxed) {
                match reload_to(&service, &sources[(done + refused) % 2]).await {
                    Ok(_) => done += 1,
                    Err(_) => refused += 1,
                }
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            (done, refused)
        })
    };
    let mut deck = Deck::new(injected);
    let (mut caused, mut injections): (BTreeMap<String, usize>, usize) = Default::default();
    let left = || -> Vec<_> {
        std::fs::read_dir(faults.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    };
    let of_ranks = |caused: &BTreeMap<String, usize>| caused.keys().any(|name| name.starts_with("rank"));
    // Where faults take long, those of the first seconds may be of any kinds.
    while Instant::now() < until || !of_ranks(&caused) || INJECTS && injections <= left().len() {
        assert!(
            Instant::now() < until + LOST,
            "only {caused:?}, of which these did not happen: {:?}",
            left()
        );
        let kind = deck.draw(&mut random);
        if cause(kind, &service, faults.path(), &mut random).await {
            *caused.entry(kind.name()).or_default() += 1;
            injections += usize::from(matches!(kind, Kind::Injected(_)));
        }
        // Generations that never serve end the service: the next fault comes after an answer.
        let before = callers.answered.load(Ordering::Relaxed);
        let waiting = Instant::now();
        while callers.answered.load(Ordering::Relaxed) < before + 4 {
            assert!(waiting.elapsed() < LOST, "no answer");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(Duration::from_millis(random.random_range(0..400))).await;
    }
    ends.store(true, Ordering::Relaxed);
    let (done, refused) = reloading.await.unwrap();
    let outcome = callers.stop().await;
    let left = left();
    println!("{caused:?}, of which these did not happen: {left:?}");
    assert!(!INJECTS || injections > left.len(), "injected faults happened");
    show(&format!("{done} reloads, {refused} refused"), &outcome);
    assert!(of_ranks(&caused), "faults happened");
}

/// Causes a fault; `false` if there was no process to cause it in.
async fn cause(kind: Kind, service: &Service, faults: &Path, random: &mut SmallRng) -> bool {
    let (target, how) = match kind {
        Kind::Loader(how) => (catch_loader(service).await, how),
        Kind::Injected(name) => {
            std::fs::write(faults.join(name), "").unwrap();
            // The memory of a generation is made after a fault; other faults happen in a step or in a reload.
            if !name.starts_with("memfd") {
                return true;
            }
            (service.ranks().first().copied(), Signal::KILL)
        }
        Kind::Rank(how) => (service.ranks().get(random.random_range(0..2)).copied(), how),
    };
    target.inspect(|pid| signal(*pid, how)).is_some()
}
