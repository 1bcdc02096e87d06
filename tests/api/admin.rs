//! Tests of Admin, health, reflection, metrics and the client's retries.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use expertd_client::{RetryPolicy, transport};
use expertd_core::backend::ServiceState;
use expertd_core::failure::Failure;
use expertd_grpc::{
    Access, AccessConfig, ConnectionLimits, ConnectionTimeouts, MetricsPort, Server, ServerConfig,
    ServerError,
};
use expertd_proto::v1::admin_client::AdminClient;
use expertd_proto::v1::{DrainRequest, GetStatusRequest};
use expertd_telemetry::{install_recorder, names};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_stream::StreamExt as _;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

use crate::backend::{self, Fake, limits};
use crate::harness::{Service, request};

/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(600);

fn fake() -> Arc<Fake> {
    Fake::new(8, limits(8, 32))
}

#[tokio::test]
async fn health_follows_the_state() {
    let fake = fake();
    let service = Service::start(&fake).await;
    for address in [&service.tcp, &service.unix, &service.admin] {
        let mut health = HealthClient::new(transport::connect(address).await.unwrap());
        let named = |service: &str| HealthCheckRequest { service: service.to_owned() };
        let mut watch = health.watch(named("expertd.v1.Moe")).await.unwrap().into_inner();
        for (state, expected) in [
            (ServiceState::Serving, ServingStatus::Serving),
            (ServiceState::Reforming, ServingStatus::NotServing),
            (ServiceState::Serving, ServingStatus::Serving),
            (ServiceState::Draining, ServingStatus::NotServing),
        ] {
            fake.set_state(state);
            let seen = async { while watch.message().await.unwrap().unwrap().status() != expected {} };
            tokio::time::timeout(PATIENCE, seen).await.expect("watchers must be notified");
            let now = health.check(named("expertd.v1.Moe")).await.unwrap().into_inner().status();
            assert_eq!(now, expected);
            let alive = health.check(named("")).await.unwrap().into_inner().status();
            assert_eq!(alive, ServingStatus::Serving);
        }
        assert_eq!(health.check(named("nothing")).await.unwrap_err().code(), Code::NotFound);
        fake.set_state(ServiceState::Serving);
    }
}

async fn ask_reflection(address: &str, question: MessageRequest) -> ServerReflectionResponse {
    let mut client = ServerReflectionClient::new(transport::connect(address).await.unwrap());
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(question) };
    let answers = client.server_reflection_info(tokio_stream::once(request)).await.unwrap().into_inner();
    answers.collect::<Vec<_>>().await.remove(0).unwrap()
}

#[tokio::test]
async fn reflection_lists_the_services_and_finds_their_symbols() {
    let service = Service::start(&fake()).await;
    let listed = ask_reflection(&service.tcp, MessageRequest::ListServices(String::new())).await;
    let Some(MessageResponse::ListServicesResponse(list)) = listed.message_response else {
        panic!("{listed:?}")
    };
    let names: BTreeSet<_> = list.service.into_iter().map(|service| service.name).collect();
    for name in ["expertd.v1.Moe", "expertd.v1.Network", "grpc.health.v1.Health"] {
        assert!(names.contains(name), "{names:?} lacks {name}");
    }
    for symbol in ["expertd.v1.Moe", "expertd.v1.ForwardRequest", "expertd.v1.Admin"] {
        let found =
            ask_reflection(&service.admin, MessageRequest::FileContainingSymbol(symbol.to_owned())).await;
        assert!(
            matches!(found.message_response, Some(MessageResponse::FileDescriptorResponse(_))),
            "{symbol}"
        );
    }
}

#[tokio::test]
async fn status_and_drain() {
    let fake = fake();
    let service = Service::start(&fake).await;
    let mut admin = AdminClient::new(transport::connect(&service.admin).await.unwrap());
    let status = admin.get_status(GetStatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.state(), expertd_proto::v1::ServiceState::Serving);
    assert_eq!((status.model.as_str(), status.generation, status.weight_version), ("fake", 3, 7));
    assert_eq!((status.ranks[0].pid, status.ranks[0].state.as_str()), (99, "ready"));
    assert_eq!(status.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(status.weight_folder, "/models/fake");
    let tier = status.tier.unwrap();
    let of = &tier.layers[0];
    assert_eq!((of.layer, of.source, of.copied, of.cpu, tier.copied_bytes), (1, 1, 2, 5, 9));

    let drained = admin.drain(DrainRequest { timeout_ms: 12 }).await.unwrap().into_inner();
    assert_eq!(drained.requests_dropped, 12);
    let status = admin.get_status(GetStatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.state(), expertd_proto::v1::ServiceState::Draining);
    let refused = service.client().await.forward(request(backend::ECHO, 1, 8), None).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
}

#[tokio::test]
async fn plaintext_and_an_open_admin_stay_off_the_network() {
    let bind = async |listen: &str, admin: Option<&str>, insecure: bool| {
        let config = ServerConfig {
            listen: vec![listen.parse().unwrap()],
            admin: admin.map(|address| address.parse().unwrap()),
            insecure,
            connections: ConnectionLimits::for_tcp(8),
            shutdown_grace: Duration::ZERO,
            timeouts: ConnectionTimeouts::default(),
        };
        let access = Arc::new(Access::load(&AccessConfig::default()).unwrap());
        Server::bind(&config, access, fake()).await.err()
    };
    let plaintext = bind("0.0.0.0:0", None, false).await.unwrap();
    assert!(matches!(plaintext, ServerError::Plaintext(_)), "{plaintext}");
    assert!(bind("0.0.0.0:0", None, true).await.is_none());
    for admin in ["127.0.0.1:0", "0.0.0.0:0"] {
        let error = bind("127.0.0.1:0", Some(admin), true).await.unwrap();
        assert!(matches!(error, ServerError::AdminWithoutTokens(_)), "{error}");
    }
}

#[tokio::test]
async fn retries_are_opt_in_and_limited() {
    let fake = fake();
    let service = Service::start(&fake).await;
    let client = service.client().await;
    let retry_after = Duration::from_millis(20);
    fake.refuse(Some(Failure::Overloaded { reason: "full".to_owned(), retry_after }));
    let good = request(backend::ECHO, 1, 8);
    assert!(client.forward(good.clone(), None).await.is_err());

    let patient = client.clone().with_retry(RetryPolicy { max_attempts: 1000, ..RetryPolicy::default() });
    let call = tokio::spawn({
        let (patient, good) = (patient.clone(), good.clone());
        async move { patient.forward(good, None).await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    fake.refuse(None);
    call.await.unwrap().expect("the retry must succeed once there is room");

    fake.refuse(Some(Failure::Overloaded { reason: "full".to_owned(), retry_after }));
    let few = client.clone().with_retry(RetryPolicy { max_attempts: 3, ..RetryPolicy::default() });
    assert_eq!(few.forward(good.clone(), None).await.unwrap_err().code(), Code::ResourceExhausted);
    let bounded = patient.forward(good, Some(Duration::from_millis(200))).await.unwrap_err();
    assert!(matches!(bounded.code(), Code::ResourceExhausted | Code::DeadlineExceeded));
}

async fn get(address: &str, path: &str) -> (String, String) {
    let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

/// The age in seconds of a thread of [`health_names_a_thread_without_progress`] in an answer of `/healthz`, and whether it is too old.
fn age_of_thread(health: &str) -> (f64, bool) {
    let age = health.lines().find_map(|line| line.strip_prefix("a thread of this test: ")).unwrap();
    let (seconds, rest) = age.split_once(' ').unwrap();
    match rest {
        "s since its last progress" => (seconds.parse().unwrap(), false),
        "s since its last progress, which is too long" => (seconds.parse().unwrap(), true),
        _ => panic!("{health}"),
    }
}

/// Ages of other tests' threads come into the status as well, so that a probe that must succeed needs a long timeout.
#[tokio::test]
async fn health_names_a_thread_without_progress() {
    let start = async |timeout| {
        let access = Arc::new(Access::load(&AccessConfig::default()).unwrap());
        let any = "127.0.0.1:0".parse().unwrap();
        let endpoint = MetricsPort::bind(any, install_recorder(""), fake(), access, timeout).await.unwrap();
        let address = endpoint.local_address().to_string();
        tokio::spawn(endpoint.run());
        address
    };
    let (patient, impatient) = (start(PATIENCE).await, start(Duration::from_secs(1)).await);
    let needed = expertd_telemetry::progress::need("a thread of this test");
    let begun = std::time::Instant::now();
    let before = loop {
        let (status, body) = get(&impatient, "/healthz").await;
        let (age, is_late) = age_of_thread(&body);
        assert!(if is_late { age >= 1.0 } else { age <= 1.0 }, "{body}");
        if is_late {
            assert!(status.contains("503") && body.starts_with("unhealthy"), "{status} {body}");
            break age;
        }
        assert!(begun.elapsed() < PATIENCE, "{body}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let (status, body) = get(&patient, "/healthz").await;
    assert!(status.contains("200") && body.starts_with("alive"), "{status} {body}");
    assert!(age_of_thread(&body).0 >= before, "{body}");
    let ticked = std::time::Instant::now();
    needed.tick();
    let body = get(&patient, "/healthz").await.1;
    assert!(age_of_thread(&body).0 <= ticked.elapsed().as_secs_f64() + 0.1, "{body}");
    needed.finish();
    let body = get(&patient, "/healthz").await.1;
    assert!(!body.contains("a thread of this test"), "{body}");
}

#[tokio::test]
async fn the_scrape_endpoint_has_documented_names_and_probes() {
    let recorder = install_recorder("");
    let fake = fake();
    let access = Arc::new(Access::load(&AccessConfig::default()).unwrap());
    let endpoint =
        MetricsPort::bind("127.0.0.1:0".parse().unwrap(), recorder, fake.clone(), access, PATIENCE)
            .await
            .unwrap();
    let address = endpoint.local_address().to_string();
    tokio::spawn(endpoint.run());

    let service = Service::start(&fake).await;
    let client = service.client().await;
    client.forward(request(backend::ECHO, 3, 8), None).await.unwrap();
    let mut bad = request(backend::ECHO, 3, 8);
    bad.tokens = 2;
    client.forward(bad, None).await.unwrap_err();
    let (sender, mut receiver) = client.stream(1).await.unwrap();
    sender.send(1, request(backend::FAULT, 3, 8), None).await.unwrap();
    receiver.next().await.unwrap().unwrap().1.unwrap_err();

    let (status, text) = get(&address, "/metrics").await;
    assert!(status.contains("200"), "{status}");
    let known: BTreeSet<_> = names::ALL.iter().map(|metric| metric.name).collect();
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = line.split(' ').next().unwrap();
        assert!(known.contains(name), "{name} must be documented");
    }
    for expected in [
        "expertd_requests_total{method=\"Forward\",code=\"OK\"}",
        "expertd_requests_total{method=\"Forward\",code=\"INVALID_ARGUMENT\"}",
        "expertd_requests_total{method=\"ForwardStream\",code=\"UNAVAILABLE\"}",
        "expertd_request_duration_seconds_bucket{method=\"Forward\",le=\"0.0005\"}",
        "expertd_build_info{",
    ] {
        assert!(text.contains(expected), "{expected} is missing in\n{text}");
    }

    assert!(get(&address, "/healthz").await.0.contains("200"));
    assert!(get(&address, "/readyz").await.0.contains("200"));
    fake.set_state(ServiceState::Reforming);
    let (status, reason) = get(&address, "/readyz").await;
    assert!(status.contains("503") && reason.contains("because"), "{status} {reason}");
    assert!(get(&address, "/nothing").await.0.contains("404"));
}

#[tokio::test]
async fn the_commands_talk_to_admin_only() {
    use expertd_cli::admin::AdminAddress;
    use expertd_cli::drain::{DrainArgs, drain};
    use expertd_cli::status::{StatusArgs, status};

    let service = Service::start(&fake()).await;
    let admin = AdminAddress { address: Some(service.admin.clone()), ..AdminAddress::default() };
    let found = status(&StatusArgs { admin: admin.clone(), json: false, expert_rows: false, watch: None })
        .await
        .unwrap();
    assert_eq!(found.model, "fake");
    let public = AdminAddress { address: Some(service.tcp.clone()), ..AdminAddress::default() };
    let error = status(&StatusArgs { admin: public, json: false, expert_rows: false, watch: None })
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("--admin-listen"), "{error}");
    let drained = drain(&DrainArgs { admin, timeout: Some(0.25), json: false }).await.unwrap();
    assert_eq!(drained.requests_dropped, 250, "the fake backend answers with the timeout");
}
