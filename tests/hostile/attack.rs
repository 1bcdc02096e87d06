//! Hundreds of attackers of a real service, and an honest client that uses it at the same time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use expertd_client::Client;
use expertd_client::transport::Channel;
use expertd_proto::v1::{DType, ForwardRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tonic::transport::Endpoint;
use tower::service_fn;

use crate::cores::{self, Burner};
use crate::frames::{self, hello, send};
use crate::load::PATIENCE;
use crate::service::Service;

/// The actions of an attacker on a connection, until the connection ends.
pub type Attack = for<'a> fn(&'a mut TcpStream, &'a AtomicBool) -> Doing<'a>;
pub type Doing<'a> = std::pin::Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// The value of an environment variable, otherwise `default`.
fn size(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Whether the service asks for tokens. The honest client has one, the attackers have none.
fn authenticated() -> bool {
    std::env::var_os("HOSTILE_TOKENS").is_some()
}

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// The results of an honest client.
#[derive(Debug)]
pub struct Honest {
    pub calls: usize,
    pub failed: Vec<String>,
    pub per_second: f64,
    pub p99: Duration,
}

/// Connects from a given address of this host.
pub async fn connect_from(from: &str, to: &str) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::new(from.parse().unwrap(), 0))?;
    let stream = socket.connect(to.parse().unwrap()).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// An honest client whose address differs from the attackers' addresses.
pub async fn honest_client(address: &str) -> Result<Client, String> {
    let to = address.to_owned();
    let connector = service_fn(move |_: http::Uri| {
        let to = to.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(connect_from("127.0.0.2", &to).await?)) }
    });
    let channel = Endpoint::from_static("http://service")
        .connect_with_connector(connector)
        .await
        .map_err(|error| format!("connect: {error}"))?;
    let token = authenticated().then(|| http::HeaderValue::try_from(format!("Bearer {TOKEN}")).unwrap());
    Client::over(Channel::new(channel, token)).await.map_err(|error| format!("GetModel: {error}"))
}

/// Calls for `time`, on a thread (and, with HOSTILE_HONEST_CORES, on cores) of its own, so that the attackers' tasks do not
/// delay the honest client.
pub async fn honest(address: &str, time: Duration) -> Honest {
    let address = address.to_owned();
    let thread = std::thread::spawn(move || {
        cores::move_to(cores::of("HOSTILE_HONEST_CORES").as_ref());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(call_for(&address, time))
    });
    tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap()
}

/// Calls for `time`, one call at a time on each of four tasks.
async fn call_for(address: &str, time: Duration) -> Honest {
    let client = match honest_client(address).await {
        Ok(client) => client,
        Err(error) => return Honest { calls: 0, failed: vec![error], per_second: 0.0, p99: time },
    };
    let model = client.model("").await.unwrap();
    let begun = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let (client, layer, hidden) = (client.clone(), model.moe_layers[0].layer, model.hidden as usize);
        tasks.spawn(async move {
            let (mut times, mut failed) = (Vec::new(), Vec::new());
            loop {
                let rows = Bytes::from(vec![0; hidden * 4]);
                let request = ForwardRequest::inline(layer, 1, DType::DtypeF32, rows);
                let sent = Instant::now();
                match client.forward(request, Some(PATIENCE)).await {
                    Ok(_) => times.push(sent.elapsed()),
                    Err(status) => failed.push(status.to_string()),
                }
                if begun.elapsed() >= time {
                    return (times, failed);
                }
            }
        });
    }
    let (mut times, mut failed) = (Vec::new(), Vec::new());
    for (some, errors) in tasks.join_all().await {
        times.extend(some);
        failed.extend(errors);
    }
    times.sort_unstable();
    Honest {
        calls: times.len(),
        failed,
        per_second: times.len() as f64 / begun.elapsed().as_secs_f64(),
        p99: times.get(times.len() * 99 / 100).copied().unwrap_or(time),
    }
}

/// Resident memory of a process in KiB.
fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0 kB");
    line.trim().split(' ').next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0)
}

/// The metrics of the service.
async fn scrape(metrics: &str) -> String {
    let address = metrics.trim_start_matches("http://").trim_end_matches("/metrics");
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).await.unwrap();
    text
}

/// Connections that the service refused or ended, by reason.
async fn ended(metrics: &str) -> String {
    let text = scrape(metrics).await;
    let counts = text.lines().filter_map(|line| line.strip_prefix("expertd_connections_ended_total"));
    counts.filter(|count| !count.ends_with(" 0")).collect::<Vec<_>>().join(" ")
}

/// Medians over the rounds of a measurement.
struct Medians {
    per_second: f64,
    p99: Duration,
}

fn medians(rounds: &[Honest]) -> Medians {
    let mut per_second: Vec<_> = rounds.iter().map(|round| round.per_second).collect();
    let mut p99: Vec<_> = rounds.iter().map(|round| round.p99).collect();
    per_second.sort_unstable_by(f64::total_cmp);
    p99.sort_unstable();
    Medians { per_second: per_second[rounds.len() / 2], p99: p99[rounds.len() / 2] }
}

fn mib(kib: u64) -> f64 {
    kib as f64 / 1024.0
}

/// One round of an attack.
struct Round {
    honest: Honest,
    /// Connections that the attackers made.
    connected: u64,
    /// Largest resident memory of the router in KiB.
    most: u64,
    /// Processor time of the router per second.
    busy: f64,
}

/// Attacks and calls at the same time.
async fn attacked(service: &Service, attack: Attack, time: Duration, attackers: u64) -> Round {
    let over = Arc::new(AtomicBool::new(false));
    let connected = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..attackers {
        let (over, connected, address) = (Arc::clone(&over), Arc::clone(&connected), service.address.clone());
        tasks.spawn(async move {
            while !over.load(Ordering::Relaxed) {
                if let Ok(mut socket) = TcpStream::connect(&address).await {
                    connected.fetch_add(1, Ordering::Relaxed);
                    attack(&mut socket, &over).await;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let most = tokio::spawn({
        let (over, pid) = (Arc::clone(&over), service.pid());
        async move {
            let mut most = 0;
            while !over.load(Ordering::Relaxed) {
                most = most.max(resident_kib(pid));
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            most
        }
    });
    let (honest, busy) = busy_while(service.pid(), honest(&service.address, time)).await;
    over.store(true, Ordering::Relaxed);
    let most = most.await.unwrap();
    tasks.abort_all();
    while tasks.join_next().await.is_some() {}
    Round { honest, connected: connected.load(Ordering::Relaxed), most, busy }
}

/// The processor time per second that a process uses meanwhile.
async fn busy_while<T>(pid: u32, work: impl Future<Output = T>) -> (T, f64) {
    let (before, begun) = (cores::used(pid), Instant::now());
    let result = work.await;
    (result, (cores::used(pid) - before).as_secs_f64() / begun.elapsed().as_secs_f64())
}

/// Runs an attack and an honest client at the same time, and checks that every call of the honest client has an answer.
///
/// In full size (HOSTILE_ROUNDS), rounds of the attack and of a control alternate: in the control, another process on the
/// cores of the service (HOSTILE_SERVICE_CORES) uses the processor time that the attackers cost the service.
pub async fn run(name: &str, attack: Attack) {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens");
    std::fs::write(&tokens, format!("honest {TOKEN}\n")).unwrap();
    let mut flags = vec!["--max-bytes-in-flight", "67108864"];
    if authenticated() {
        flags.extend(["--token-file", tokens.to_str().unwrap()]);
    }
    let service_cores = cores::of("HOSTILE_SERVICE_CORES");
    let service = cores::on(service_cores.as_ref(), || Service::start("qwen3_moe", 1, &flags));
    let time = Duration::from_secs(size("HOSTILE_SECONDS", 2));
    let (attackers, rounds) = (size("HOSTILE_ATTACKERS", 24), size("HOSTILE_ROUNDS", 0));
    let (alone, busy_alone) = busy_while(service.pid(), honest(&service.address, time)).await;
    let before = resident_kib(service.pid());

    let (mut attacks, mut controls) = (Vec::new(), Vec::new());
    let (mut burned, mut busy_control) = (Vec::new(), Vec::new());
    for _ in 0..rounds.max(1) {
        let round = attacked(&service, attack, time, attackers).await;
        // What the router's own calls did not cost.
        let extra = round.busy - busy_alone * round.honest.per_second / alone.per_second;
        attacks.push(round);
        if rounds > 0 {
            // The connections of the attackers end.
            tokio::time::sleep(Duration::from_secs(2)).await;
            let burner = Burner::start(service_cores.as_ref(), extra.max(0.0));
            let (used, begun) = (burner.used(), Instant::now());
            let (control, busy) = busy_while(service.pid(), honest(&service.address, time)).await;
            controls.push(control);
            busy_control.push(busy);
            burned.push((burner.used() - used).as_secs_f64() / begun.elapsed().as_secs_f64());
        }
    }
    let (most, connected) = (
        attacks.iter().map(|round| round.most).max().unwrap_or(0),
        attacks.iter().map(|round| round.connected).sum::<u64>(),
    );
    let busy = attacks.iter().map(|round| round.busy).sum::<f64>() / attacks.len() as f64;
    let beside: Vec<_> = attacks.into_iter().map(|round| round.honest).collect();
    for (whose, client) in
        beside.iter().map(|client| ("beside the attack", client)).chain([("alone", &alone)])
    {
        assert!(client.failed.is_empty() && client.calls > 0, "{whose}: {:?}", client.failed.first());
    }
    let (attacked, alone) = (medians(&beside), medians(&[alone]));
    let control = if controls.is_empty() { None } else { Some(medians(&controls)) };
    let against = control.as_ref().unwrap_or(&alone);
    println!(
        "| {name} | {attackers} | {connected} | {:.0} | {:.0} | {:.0} | {:.0} % | {:.2} | {:.2} | {:.2} | {busy_alone:.2} | \
         {busy:.2} | {:.2} + {:.2} | {:.1} | {:.1} |",
        alone.per_second,
        against.per_second,
        attacked.per_second,
        100.0 * attacked.per_second / against.per_second,
        alone.p99.as_secs_f64() * 1e3,
        against.p99.as_secs_f64() * 1e3,
        attacked.p99.as_secs_f64() * 1e3,
        busy_control.iter().sum::<f64>() / busy_control.len().max(1) as f64,
        burned.iter().sum::<f64>() / burned.len().max(1) as f64,
        mib(before),
        mib(most),
    );
    if std::env::var_os("HOSTILE_REASONS").is_some() {
        println!("{name}: {}", ended(&service.metrics).await);
    }
    assert!(connected > 0, "the attack took place");
    assert!(most <= before + (256 << 10), "{before} KiB before, {most} KiB under attack");
}

/// Sends the preface with `settings`, and acknowledges the settings of the service.
pub async fn greet(socket: &mut TcpStream, settings: &[(u16, u32)]) -> bool {
    send(socket, &hello(settings)).await
        && send(socket, &frames::frame(frames::SETTINGS, frames::ACK, 0, &[])).await
}

/// Reads until the peer closes the connection, for at most `time`.
pub async fn take(socket: &mut TcpStream, time: Duration) -> bool {
    let mut bytes = vec![0; 16 << 10];
    let until = tokio::time::Instant::now() + time;
    loop {
        match tokio::time::timeout_at(until, socket.read(&mut bytes)).await {
            Ok(Ok(0) | Err(_)) => return false,
            Ok(Ok(_)) => {}
            Err(_) => return true,
        }
    }
}

/// The windows of a stream and of the connection that the service has announced within `time`, in bytes.
pub async fn windows(socket: &mut TcpStream, time: Duration) -> (usize, usize) {
    const DEFAULT: usize = 65_535;
    let until = tokio::time::Instant::now() + time;
    let mut bytes = Vec::new();
    while let Ok(Ok(1..)) = tokio::time::timeout_at(until, socket.read_buf(&mut bytes)).await {}
    let word = |at: &[u8]| u32::from_be_bytes([at[0], at[1], at[2], at[3]]) as usize;
    let (mut of_stream, mut of_connection) = (DEFAULT, DEFAULT);
    let mut rest = &bytes[..];
    while rest.len() >= 9 {
        let length = word(&[0, rest[0], rest[1], rest[2]]);
        let Some((payload, after)) = rest[9..].split_at_checked(length) else { break };
        match (rest[3], word(&rest[5..9])) {
            (frames::SETTINGS, 0) => {
                let window = payload.as_chunks::<6>().0.iter().find(|setting| setting[..2] == [0, 4]);
                of_stream = window.map_or(of_stream, |setting| word(&setting[2..]));
            }
            (frames::WINDOW_UPDATE, 0) => of_connection += word(payload),
            _ => {}
        }
        rest = after;
    }
    (of_stream, of_connection)
}
