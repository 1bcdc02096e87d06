//! Tests of several services used as one, with each layer held by two of them: one is killed, stopped, drained and
//! restarted under load, and no call with a deadline fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::service::load::{Rows, check};
use crate::service::{Service, fixture, golden};
use expertd_client::fleet::{FleetClient, FleetConfig, State};
use rustix::process::Signal;
use tokio::task::JoinSet;
use tonic::Code;

const FAMILY: &str = "qwen3_next";
/// Layers of the three services.
const HELD: [&str; 3] = ["0-1", "2-3", "0-3"];
/// Longer than the machine pauses.
const DEADLINE: Duration = Duration::from_secs(60);
/// Far more time than a service needs to be ready, or a client to see it.
const PATIENCE: Duration = Duration::from_secs(180);

/// An address that nothing listens on at the moment; a service that restarts keeps it. Other tests use 127.0.0.1, so that none takes the
/// port meanwhile.
fn free_address() -> String {
    let own = std::net::Ipv4Addr::new(127, rand::random_range(1..=254), rand::random(), rand::random());
    std::net::TcpListener::bind((own, 0)).unwrap().local_addr().unwrap().to_string()
}

fn start(index: usize, address: &str) -> Service {
    Service::start(FAMILY, 1, &["--layers", HELD[index], "--listen", address])
}

async fn connect(addresses: &[String]) -> FleetClient {
    FleetClient::connect(&addresses.join(","), FleetConfig::default()).await.unwrap()
}

/// Waits until the client sees the service in one of these states.
async fn until(client: &FleetClient, address: &str, wanted: &[State]) {
    let seen = async {
        loop {
            let services = client.services();
            if services.iter().any(|(at, state, _)| at == address && wanted.contains(state)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, seen).await;
    waited.unwrap_or_else(|_| panic!("{address} never was {wanted:?}: {:?}", client.services()));
}

/// Calls with recorded rows until told to stop; the answers are checked. Returns the number of calls.
async fn call(
    client: FleetClient,
    seed: u64,
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
) -> Vec<String> {
    let mut rows = Rows::new(&golden(FAMILY), seed, 64);
    let mut failed = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let (request, wanted) = rows.draw();
        match client.forward(request.clone(), Some(DEADLINE)).await {
            Ok(response) => {
                check(&response, &wanted, &request);
                answered.fetch_add(1, Ordering::Relaxed);
            }
            Err(status) => failed.push(format!("layer {}: {status:?}", request.layer)),
        }
    }
    failed
}

/// Waits until more calls are answered than were in flight.
async fn went_on(answered: &AtomicU64, what: &str) {
    /// Ten times the number of callers.
    const CALLS: u64 = 60;
    let wanted = answered.load(Ordering::Relaxed) + CALLS;
    let more = async {
        while answered.load(Ordering::Relaxed) < wanted {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, more).await.unwrap_or_else(|_| panic!("calls were not answered: {what}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn no_call_fails_while_one_service_after_the_other_fails() {
    services_fail_one_after_the_other(FleetConfig::default(), &[], |_| {}).await;
}

/// `more` are flags of the services, and `watch` sees them after each fault.
pub(crate) async fn services_fail_one_after_the_other(
    config: FleetConfig,
    more: &[&str],
    watch: impl Fn(&[Service]),
) {
    let addresses: Vec<String> = (0..3).map(|_| free_address()).collect();
    let start = |index: usize, address: &str| {
        Service::start(FAMILY, 1, &[&["--layers", HELD[index], "--listen", address], more].concat())
    };
    let mut services: Vec<Service> = addresses.iter().enumerate().map(|(i, at)| start(i, at)).collect();
    let client = FleetClient::connect(&addresses.join(","), config).await.unwrap();
    let model = client.complete_model(PATIENCE).await.unwrap();
    assert_eq!(model.moe_layers.iter().map(|layer| layer.layer).collect::<Vec<_>>(), [0, 1, 2, 3]);
    for address in &addresses {
        until(&client, address, &[State::Serving]).await;
    }

    let stop = Arc::new(AtomicBool::new(false));
    let answered = Arc::new(AtomicU64::new(0));
    let mut callers = JoinSet::new();
    for seed in 0..6 {
        callers.spawn(call(client.clone(), seed, Arc::clone(&stop), Arc::clone(&answered)));
    }
    went_on(&answered, "before any fault").await;
    watch(&services);

    // Killed, and started again at the same address.
    services[0].signal(Signal::KILL);
    assert!(services[0].wait(PATIENCE).is_some());
    until(&client, &addresses[0], &[State::Lost]).await;
    went_on(&answered, "one service was killed").await;
    services[0] = start(0, &addresses[0]);
    until(&client, &addresses[0], &[State::Serving]).await;

    // Stopped: its connections stay open and nothing answers.
    services[2].signal(Signal::STOP);
    until(&client, &addresses[2], &[State::Lost]).await;
    went_on(&answered, "one service was stopped").await;
    services[2].signal(Signal::CONT);
    until(&client, &addresses[2], &[State::Serving]).await;

    // Drained and replaced, one after the other: a rolling restart.
    for index in 0..3 {
        services[index].signal(Signal::TERM);
        let status = services[index].wait(PATIENCE).expect("a drain ends");
        assert_eq!(status.code(), Some(0));
        services[index] = start(index, &addresses[index]);
        until(&client, &addresses[index], &[State::Serving]).await;
        went_on(&answered, "a rolling restart").await;
    }
    watch(&services);
    stop.store(true, Ordering::Relaxed);
    let failed: Vec<String> = callers.join_all().await.concat();
    let answered = answered.load(Ordering::Relaxed);
    assert!(failed.is_empty(), "{} calls failed, {answered} were answered: {failed:#?}", failed.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn services_with_other_weights_are_left_out_until_they_are_all_there_is() {
    let other = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture(FAMILY)).unwrap().flatten() {
        std::fs::copy(file.path(), other.path().join(file.file_name())).unwrap();
    }
    // The last bytes of the file are weights; other bits there are another content.
    let path = other.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let length = bytes.len();
    for byte in &mut bytes[length / 2..] {
        *byte = byte.rotate_left(1) & 0xbf;
    }
    std::fs::write(&path, bytes).unwrap();

    let addresses = [free_address(), free_address()];
    let mut old = Service::start(FAMILY, 1, &["--listen", &addresses[0]]);
    let client = connect(&addresses).await;
    let fingerprint = client.model().unwrap().weight_fingerprint;
    let named = ["--listen", addresses[1].as_str(), "--model-name", FAMILY];
    let _new = Service::start_checkpoint(other.path(), 1, &named, &[]);
    until(&client, &addresses[1], &[State::Serving]).await;
    let mut rows = Rows::new(&golden(FAMILY), 3, 8);
    let fingerprint_of =
        |response: expertd_proto::v1::ForwardResponse| response.receipt.unwrap().weight_fingerprint;
    for _ in 0..40 {
        let (request, _) = rows.draw();
        assert_eq!(fingerprint_of(client.forward(request, Some(DEADLINE)).await.unwrap()), fingerprint);
    }
    // The old weights are gone: after a while the new ones take their place, and the client says so.
    old.signal(Signal::TERM);
    assert!(old.wait(PATIENCE).is_some());
    let (request, _) = rows.draw();
    let response = client.forward(request, Some(PATIENCE)).await.unwrap();
    assert_ne!(fingerprint_of(response), fingerprint);
    assert_ne!(client.model().unwrap().weight_fingerprint, fingerprint);
}

#[tokio::test(flavor = "multi_thread")]
async fn services_that_are_not_there_are_named() {
    let config = FleetConfig { connect_patience: Duration::from_millis(300), ..FleetConfig::default() };
    let address = free_address();
    let error = FleetClient::connect(&address, config.clone()).await.unwrap_err().to_string();
    assert!(error.contains(&address) && error.contains("expertd serve"), "{error}");
    let error = FleetClient::connect(" , ", config).await.unwrap_err().to_string();
    assert!(error.contains("HOST:PORT"), "{error}");
    // A service that starts later is found, and a layer that no service holds gets another status than one that is unreachable.
    let here = start(0, &free_address());
    let client = connect(&[here.address.clone(), address.clone()]).await;
    let (request, _) = Rows::new(&golden(FAMILY), 1, 4).draw_of(3, 2);
    let status = client.forward(request.clone(), Some(Duration::from_millis(300))).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    let _there = start(0, &address);
    until(&client, &address, &[State::Serving]).await;
    let status = client.forward(request, Some(DEADLINE)).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound, "{status:?}");
}
