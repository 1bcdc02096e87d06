//! A simulation of scale: the load generator and its client of several services, against two hundred services that share
//! the layers of a model, while some are killed, hang, drain and refuse, and while new weights are rolled out.
//!
//! Every step of the simulation waits for what the services or the callers have seen; no result depends on a duration.

mod service;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use expertd_client::transport::Credentials;
use expertd_loadtest::connect::{Client, connect};
use expertd_proto::transport::CONTROL_MESSAGE_BYTES;
use expertd_proto::v1::{self, ForwardRequest, ForwardResponse};
use expertd_types::{DType, rows};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::task::JoinSet;

use crate::fake::{Fake, HIDDEN};
use crate::load;
use service::{CONTENTS, LAYERS, Mode, SHARES, Service};

/// Number of services that hold the same share of the layers.
const REPLICAS: usize = 25;
/// Number of calls that are outstanding, each of its own caller.
const CALLERS: usize = 16;
/// Deadline of every call: many times as long as the client needs to find that a service hangs.
const DEADLINE: Duration = Duration::from_secs(120);
/// Far more time than any step needs.
const PATIENCE: Duration = Duration::from_secs(300);

/// What the callers have seen.
#[derive(Default)]
struct Seen {
    over: AtomicBool,
    /// Answers by content of the weights.
    answers: [AtomicU64; 2],
    /// Number of calls that have ended, by caller.
    ended: [AtomicU64; CALLERS],
    troubles: Mutex<Vec<String>>,
}

impl Seen {
    fn answers(&self, content: usize) -> u64 {
        self.answers[content].load(Ordering::SeqCst)
    }

    /// Waits until every call that is outstanding now has ended, and 300 calls in all. None may have failed.
    fn go_on(&self, what: &str) {
        let ended = || self.ended.each_ref().map(|ended| ended.load(Ordering::SeqCst));
        let before = ended();
        let wanted = before.iter().sum::<u64>() + 300;
        until(what, || {
            let now = ended();
            let all = now.iter().zip(before).all(|(&now, before)| now > before);
            all && now.iter().sum::<u64>() >= wanted
        });
        self.check(what);
    }

    fn check(&self, what: &str) {
        let troubles = self.troubles.lock().unwrap().clone();
        let first = &troubles[..troubles.len().min(5)];
        assert!(
            troubles.is_empty(),
            "{} calls failed when it was to be seen that {what}: {first:#?}",
            troubles.len()
        );
    }
}

/// Waits for something that certainly happens.
fn until(what: &str, happened: impl Fn() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < PATIENCE, "after {PATIENCE:?} it still has not happened that {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Makes calls, one after the other, and checks the answers.
async fn call(mut client: Client, caller: usize, seen: Arc<Seen>) {
    let mut random = SmallRng::seed_from_u64(caller as u64);
    while !seen.over.load(Ordering::SeqCst) {
        let (layer, tokens) = (random.random_range(0..LAYERS), random.random_range(1..=8));
        let values: Vec<f32> =
            (0..tokens as usize * HIDDEN).map(|_| random.random_range(-1.0..1.0)).collect();
        let payload = rows::encode(&values, DType::F32);
        let request = ForwardRequest::inline(layer, tokens, v1::DType::DtypeF32, payload);
        let new_before = seen.answers(1) > 0;
        let checked = match client.forward(request, Some(DEADLINE)).await {
            Ok(answer) => content_of(&answer, layer, &values),
            Err(status) => Err(format!("{:?}: {}", status.code(), status.message())),
        };
        let checked = checked.and_then(|content| match (content, new_before) {
            (0, true) => Err("old weights answered after the new ones had".to_owned()),
            (content, _) => Ok(content),
        });
        match checked {
            Ok(content) => drop(seen.answers[content].fetch_add(1, Ordering::SeqCst)),
            Err(why) => seen.troubles.lock().unwrap().push(format!("layer {layer}: {why}")),
        }
        seen.ended[caller].fetch_add(1, Ordering::SeqCst);
    }
}

/// The content that an answer states, if its rows were computed with it.
fn content_of(answer: &ForwardResponse, layer: u32, values: &[f32]) -> Result<usize, String> {
    let stated = &answer.receipt.as_ref().ok_or("no receipt")?.weight_fingerprint;
    let content = CONTENTS.iter().position(|known| known == stated).ok_or("an unknown fingerprint")?;
    let wanted = values.chunks(HIDDEN).flat_map(|row| {
        let (ids, weights) = Fake::gate(row);
        Fake::output(layer, row, &ids, &weights)
    });
    let wanted: Vec<f32> = wanted.map(|value| value * (content + 1) as f32).collect();
    if rows::decode(&answer.rows, DType::F32) == wanted {
        return Ok(content);
    }
    Err(format!("the rows are not those of {stated}"))
}

/// Four services of every share fail in the four ways at a time, and come back; three times, with other services.
fn fail(services: &mut [Service], seen: &Seen) {
    for round in 0..3 {
        let victims = |services: &mut [Service], way: usize, act: &dyn Fn(&mut Service)| {
            for share in 0..SHARES as usize {
                act(&mut services[share * REPLICAS + 4 * round + way]);
            }
        };
        let missed_before: Vec<u64> =
            services.iter().map(|service| service.controls.missed.load(Ordering::SeqCst)).collect();
        victims(services, 0, &Service::kill);
        victims(services, 1, &|service| service.set(Mode::Hangs));
        victims(services, 2, &|service| service.set(Mode::Drains));
        victims(services, 3, &|service| service.set(Mode::Refuses));
        seen.go_on("calls are answered while services fail");
        until("calls leave the services that hang", || {
            services.iter().zip(&missed_before).all(|(service, &before)| {
                let hangs = *service.controls.mode.borrow() == Mode::Hangs;
                let missed = service.controls.missed.load(Ordering::SeqCst);
                !hangs || (missed >= before + 2 && !service.works())
            })
        });
        victims(services, 0, &|service| service.restart(0));
        for way in 1..4 {
            victims(services, way, &|service| service.set(Mode::Serves));
        }
        seen.go_on("calls are answered after services came back");
    }
    assert_eq!(seen.answers(1), 0);
}

/// Gives services the new weights, 20 at a time: a third are drained and restarted, a third are killed and restarted, and
/// a third load them without losing a connection.
fn roll_out(services: &mut [Service], order: &[usize], seen: &Seen) {
    for batch in order.chunks(20) {
        let by_way = |way: usize| batch.iter().copied().skip(way).step_by(3);
        for index in by_way(0) {
            services[index].set(Mode::Drains);
        }
        until("drained services have no calls", || by_way(0).all(|index| !services[index].works()));
        for index in by_way(0).chain(by_way(1)) {
            services[index].restart(1);
        }
        for index in by_way(2) {
            services[index].controls.content.store(1, Ordering::SeqCst);
        }
        seen.go_on("calls are answered during the rollout");
    }
}

/// Rolls the new weights out to all services except two of each share; of the first share, to all. From then on only the new
/// weights have all layers. Afterwards the remaining services get them, too.
fn replace_weights(services: &mut [Service], seen: &Seen) {
    let mut random = SmallRng::seed_from_u64(7);
    let is_kept = |index: &usize| *index >= REPLICAS && index % REPLICAS < 2;
    let (kept, mut order): (Vec<usize>, Vec<usize>) = (0..services.len()).partition(is_kept);
    order.shuffle(&mut random);
    roll_out(services, &order, seen);
    until("new weights answer", || seen.answers(1) > 0);
    seen.go_on("calls are answered with the new weights");

    // The outdated services are up, and known to the client, and get no calls.
    let count = |services: &[Service]| -> Vec<(u64, u64)> {
        let of = |service: &Service| (service.calls(), service.controls.probes.load(Ordering::SeqCst));
        kept.iter().map(|&index| of(&services[index])).collect()
    };
    let before = count(services);
    seen.go_on("calls are answered beside outdated services");
    until("outdated services are probed", || {
        count(services).iter().zip(&before).all(|(now, before)| now.1 >= before.1 + 3)
    });
    let calls = |counts: &[(u64, u64)]| counts.iter().map(|count| count.0).collect::<Vec<_>>();
    assert_eq!(calls(&count(services)), calls(&before), "outdated services got calls");

    // They load the new weights, and nothing else tells the client so.
    for &index in &kept {
        services[index].controls.content.store(1, Ordering::SeqCst);
    }
    let before: Vec<u64> = services.iter().map(Service::calls).collect();
    until("every service gets calls again", || {
        services.iter().zip(&before).all(|(service, &before)| service.calls() > before)
    });
}

/// Two hundred services and five clients have more sockets than many systems allow by default.
fn allow_sockets() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_services_fail_and_get_new_weights_without_a_failed_call() {
    allow_sockets();
    let count = SHARES * REPLICAS as u32;
    let mut services: Vec<Service> =
        (0..count).map(|number| Service::start(number, number / REPLICAS as u32)).collect();
    let addresses: Vec<String> = services.iter().map(|service| service.address.to_string()).collect();
    let addresses = addresses.join(",");

    let mut client = connect(&addresses, &Credentials::default(), CONTROL_MESSAGE_BYTES).await.unwrap();
    let layers = client.model("").await.unwrap().moe_layers;
    let layers: BTreeSet<u32> = layers.iter().map(|layer| layer.layer).collect();
    assert_eq!(layers, (0..LAYERS).collect());
    let seen = Arc::new(Seen::default());
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        callers.spawn(call(client.clone(), caller, Arc::clone(&seen)));
    }
    drop(client);

    // The load generator runs beside the callers while services fail. It has a client of its own.
    let failing = tokio::task::spawn_blocking({
        let seen = Arc::clone(&seen);
        move || {
            fail(&mut services, &seen);
            services
        }
    });
    let deadline = DEADLINE.as_millis().to_string();
    let flags = ["--outstanding", "8", "--requests", "10000", "--check", "0.1", "--deadline-ms", &deadline];
    let report = load(&addresses, &flags).await;
    let mut services = failing.await.unwrap();
    assert!(report.ok && report.statuses.is_empty(), "{:?} {:?}", report.statuses, report.notes);
    assert_eq!((report.requests, report.lost, report.wrong), (10_000, 0, 0));
    assert_eq!(report.settings.layers.len(), LAYERS as usize);
    assert!(report.checks.again > 0);

    let rolling = tokio::task::spawn_blocking({
        let seen = Arc::clone(&seen);
        move || {
            replace_weights(&mut services, &seen);
            services
        }
    });
    let _services = rolling.await.unwrap();
    seen.over.store(true, Ordering::SeqCst);
    callers.join_all().await;
    seen.check("every call is answered");
    println!("{} answers with the old weights, {} with the new ones", seen.answers(0), seen.answers(1));
}
