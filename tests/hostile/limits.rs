//! Limits on connections and messages, against a server in this process with short deadlines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use expertd_client::{Client, RetryPolicy};
use expertd_core::backend::Limits;
use expertd_grpc::{Access, AccessConfig, ConnectionLimits, ConnectionTimeouts, MetricsPort};
use expertd_telemetry::install_recorder;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Code;

use crate::attack::{connect_from, greet, honest_client, take};
use crate::backend::{ECHO, Fake, limits};
use crate::frames::{DATA, call, frame, send};
use crate::harness::{FORWARD, PATIENCE, Service, pass, prefix, request, rows_of};

const HIDDEN: usize = 256;

async fn start(tcp: usize, timeouts: ConnectionTimeouts) -> Service {
    let fake = Fake::new(HIDDEN, Limits { max_bytes_in_flight: 64 << 20, ..limits(HIDDEN, 16 << 10) });
    Service::start_guarded(&fake, timeouts, ConnectionLimits::for_tcp(tcp), &AccessConfig::default(), None)
        .await
}

async fn works(client: &Client) {
    let good = request(ECHO, 4, HIDDEN);
    assert_eq!(client.forward(good.clone(), None).await.unwrap().rows, rows_of(&good));
}

/// Whether the service ends a connection.
async fn is_ended(socket: &mut TcpStream) -> bool {
    !take(socket, PATIENCE).await
}

/// Time limits that no connection of a test reaches.
fn patient() -> ConnectionTimeouts {
    ConnectionTimeouts { silent: 10 * PATIENCE, stalled: 10 * PATIENCE, ..ConnectionTimeouts::default() }
}

#[tokio::test]
async fn announced_lengths_take_no_room_from_others() {
    let service = start(64, patient()).await;
    let mut sockets = Vec::new();
    for _ in 0..2 {
        let mut socket = TcpStream::connect(&service.tcp).await.unwrap();
        assert!(greet(&mut socket, &[]).await);
        for stream in (0..32).map(|call| 2 * call + 1) {
            let bytes = [call(stream, FORWARD, &[]), frame(DATA, 0, stream, &prefix(16 << 20))].concat();
            assert!(send(&mut socket, &bytes).await);
        }
        sockets.push(socket);
    }
    pass(Duration::from_millis(200)).await;
    // The largest legal request.
    let client = Client::connect(&service.tcp).await.unwrap();
    let largest = request(ECHO, 16 << 10, HIDDEN);
    assert_eq!(client.forward(largest.clone(), None).await.unwrap().rows, rows_of(&largest));
}

#[tokio::test]
async fn names_are_short_and_errors_are_one_line() {
    let service = start(64, ConnectionTimeouts::default()).await;
    let client = Client::connect(&service.tcp).await.unwrap();
    let mut wrong = request(ECHO, 1, HIDDEN);
    wrong.model = "m".repeat(10 << 20);
    let status = client.forward(wrong.clone(), None).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().len() < 200 && status.details().len() < 1000);
    wrong.model = "m\n".repeat(100);
    let status = client.forward(wrong, None).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    assert!(!status.message().contains('\n'));
    let long = client.model(&"n".repeat(3000)).await.unwrap_err();
    assert_eq!(long.code(), Code::InvalidArgument);
    let longer = client.model(&"n".repeat(30_000)).await.unwrap_err();
    assert_eq!(longer.code(), Code::InvalidArgument);
    works(&client).await;
}

#[tokio::test]
async fn idle_connections_are_closed_and_clients_come_back() {
    let timeouts = ConnectionTimeouts {
        idle: Duration::from_secs(1),
        silent: Duration::from_secs(2),
        ..ConnectionTimeouts::default()
    };
    let service = start(64, timeouts).await;
    let mut idle = TcpStream::connect(&service.tcp).await.unwrap();
    assert!(greet(&mut idle, &[]).await);
    // A call without a message does not keep a connection.
    let mut waiting = TcpStream::connect(&service.tcp).await.unwrap();
    assert!(greet(&mut waiting, &[]).await && send(&mut waiting, &call(1, FORWARD, &[])).await);
    // A call can begin just when its connection is closed.
    let client = Client::connect(&service.tcp).await.unwrap().with_retry(RetryPolicy::default());
    works(&client).await;
    assert!(is_ended(&mut idle).await && is_ended(&mut waiting).await);
    works(&client).await;
}

#[tokio::test]
async fn old_connections_are_closed_and_clients_come_back() {
    let timeouts =
        ConnectionTimeouts { max_age: Duration::from_millis(300), ..ConnectionTimeouts::default() };
    let service = start(64, timeouts).await;
    let client = Client::connect(&service.tcp).await.unwrap().with_retry(RetryPolicy::default());
    let begun = std::time::Instant::now();
    while begun.elapsed() < Duration::from_secs(2) {
        works(&client).await;
    }
}

#[tokio::test]
async fn one_address_leaves_places_for_others_and_sockets_have_their_own() {
    // So that none of them ends because it makes no call.
    let service = start(8, patient()).await;
    let mut attackers = Vec::new();
    for _ in 0..8 {
        let mut socket = connect_from("127.0.0.3", &service.tcp).await.unwrap();
        let _ = greet(&mut socket, &[]).await;
        attackers.push(socket);
    }
    assert!(is_ended(attackers.last_mut().unwrap()).await, "one address gets half");
    works(&honest_client(&service.tcp).await.unwrap()).await;
    works(&Client::connect(&service.unix).await.unwrap()).await;
}

/// A metrics endpoint, and its address.
async fn metrics() -> String {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, 64));
    let access = Arc::new(Access::load(&AccessConfig::default()).unwrap());
    // Probes must not fail because a thread of another test is late.
    let (any, health_timeout) = ("127.0.0.1:0".parse().unwrap(), Duration::from_secs(600));
    let endpoint = MetricsPort::bind(any, install_recorder(""), fake, access, health_timeout);
    let endpoint = endpoint.await.unwrap();
    let address = endpoint.local_address().to_string();
    tokio::spawn(endpoint.run());
    address
}

/// The answer to a request of the metrics endpoint on a socket of its own, after `pause`.
async fn probe(mut socket: TcpStream, pause: Duration) -> String {
    tokio::time::sleep(pause).await;
    let _ = socket.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    let mut answer = String::new();
    let _ = socket.read_to_string(&mut answer).await;
    answer
}

/// Makes attempts on metrics endpoints of their own until two succeed: a pause of the machine spoils one or two, and a fault all of them.
async fn two_succeed(attempt: impl AsyncFn(&str) -> Result<(), String>) {
    let (mut succeeded, mut failures) = (0, Vec::new());
    while succeeded < 2 {
        match attempt(&metrics().await).await {
            Ok(()) => succeeded += 1,
            Err(why) => failures.push(why),
        }
        assert!(failures.len() <= 2, "{failures:?}");
    }
}

/// Whether a probe was answered.
fn answered(answer: &str) -> Result<(), String> {
    if answer.contains("alive") { Ok(()) } else { Err(format!("the answer is {answer:?}")) }
}

#[tokio::test]
async fn connections_of_one_address_do_not_end_the_slow_probe_of_another() {
    two_succeed(async |address| {
        let slow = connect_from("127.0.0.2", address).await.unwrap();
        let slow = tokio::spawn(probe(slow, Duration::from_secs(2)));
        let mut flood = Vec::new();
        for _ in 0..500 {
            flood.push(TcpStream::connect(address).await.unwrap());
        }
        answered(&slow.await.unwrap())
    })
    .await;
}

#[tokio::test]
async fn requests_of_one_scraper_are_paced() {
    /// Requests of a connection that are answered at once, and the pause before each further one.
    const AT_ONCE: u32 = 32;
    const PAUSE: Duration = Duration::from_millis(50);
    const REQUESTS: u32 = AT_ONCE + 20;
    two_succeed(async |address| {
        let mut socket = TcpStream::connect(address).await.unwrap();
        let begun = Instant::now();
        socket
            .write_all(&b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n".repeat(REQUESTS as usize))
            .await
            .unwrap();
        let (mut answers, mut alive) = (Vec::new(), 0);
        let mut part = [0; 4096];
        while alive < REQUESTS as usize {
            match tokio::time::timeout(PATIENCE, socket.read(&mut part)).await {
                Ok(Ok(bytes @ 1..)) => answers.extend_from_slice(&part[..bytes]),
                end => return Err(format!("{alive} answers, then {end:?}")),
            }
            alive = answers.windows(5).filter(|word| word == b"alive").count();
        }
        assert!(
            begun.elapsed() >= (REQUESTS - AT_ONCE) * PAUSE,
            "{REQUESTS} answers within {:?}",
            begun.elapsed()
        );
        answered(&probe(TcpStream::connect(address).await.unwrap(), Duration::ZERO).await)
    })
    .await;
}

#[tokio::test]
async fn idle_sockets_on_the_metrics_port_delay_no_probe() {
    two_succeed(async |address| {
        let mut idle = Vec::new();
        for _ in 0..200 {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        let socket = TcpStream::connect(address).await.unwrap();
        // The limit is shorter than the 5 s that idle sockets have to send a header.
        let answer = tokio::time::timeout(Duration::from_secs(4), probe(socket, Duration::ZERO)).await;
        answered(&answer.map_err(|_| "no answer within 4 s".to_owned())?)
    })
    .await;
}
