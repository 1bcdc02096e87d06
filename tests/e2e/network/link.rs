//! A client in a network namespace of its own, whose link delays, drops, and breaks. `EXPERTD_NETWORK_NAMESPACES` says that namespaces
//! may be made; scripts/network_tests.sh sets it where they can be.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use expertd_client::network::{self, NetworkOptions};
use expertd_client::session::{SessionClient, SessionError};
use expertd_client::transport::Credentials;

use super::wire::Wire;
use super::{FAMILY, LOST, agents, library, options, sessions, start};
use crate::service::load::{Rows, check};
use crate::service::{Service, eventually, golden};

const ADDRESS: &str = "NETWORK_LINK_ADDRESS";
/// Where the client notes how its calls ended.
const NOTES: &str = "NETWORK_LINK_NOTES";
/// Number of the client's threads, each with a session.
const THREADS: &str = "NETWORK_LINK_THREADS";
/// Deadline of a call, and far more than it may take.
const DEADLINE: Duration = Duration::from_secs(3);
const TOO_LONG: Duration = Duration::from_secs(60);
/// How long a session may take to open.
const OPENING: Duration = Duration::from_secs(8);
/// How long a client may take to notice that its rows no longer arrive: a second until it asks, ten until the kernel gives up, and more on a
/// busy machine.
const NOTICED: Duration = Duration::from_secs(90);

/// Not a test by itself: threads that open sessions and call until the process is killed.
#[test]
#[ignore = "runs as a child process of another test"]
fn client() {
    let (Ok(address), Ok(notes)) = (std::env::var(ADDRESS), std::env::var(NOTES)) else { return };
    let threads: u64 = std::env::var(THREADS).map_or(1, |text| text.parse().unwrap());
    std::thread::scope(|scope| {
        for seed in 0..threads {
            let (address, notes) = (&address, &notes);
            scope.spawn(move || call(address, notes, seed));
        }
    });
}

/// Opens sessions and calls for ever. Notes a letter for each call: `a` answered, `f` failed; and `l` if it, `o` if the opening of
/// its session took too long.
fn call(address: &str, notes: &str, seed: u64) {
    let mut rows = Rows::new(&golden(FAMILY), 4 + seed, 64);
    let note = |letter: &str| {
        use std::io::Write as _;
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(notes).unwrap();
        file.write_all(letter.as_bytes()).unwrap();
    };
    let options = insecure(OPENING);
    let mut session: Option<SessionClient> = None;
    let mut round = seed;
    loop {
        round += 1;
        let (request, wanted) = match round % 5 {
            // More bytes than a notification takes.
            0 => rows.draw_of(rows.layers()[0], 600),
            _ => rows.draw(),
        };
        let begun = Instant::now();
        let opened = match session.take() {
            Some(session) => Ok(session),
            None => network::open(address, &options).and_then(SessionClient::over),
        };
        if begun.elapsed() > TOO_LONG {
            note("o");
        }
        let answered = opened.and_then(|opened| {
            let begun = Instant::now();
            let answer = opened.forward(&request, DEADLINE);
            if begun.elapsed() > TOO_LONG {
                note("l");
            }
            if !matches!(answer, Err(SessionError::Ended { .. })) {
                session = Some(opened);
            }
            answer
        });
        match answered {
            Ok(answer) => {
                check(&answer, &wanted, &request);
                note("a");
            }
            Err(_) => {
                note("f");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

fn insecure(timeout: Duration) -> NetworkOptions {
    let credentials = Credentials { insecure: true, ..Credentials::default() };
    let mut options = NetworkOptions { credentials, ..options(4 << 20) };
    options.session.timeout = timeout;
    options
}

fn run(words: &str) -> bool {
    let words: Vec<&str> = words.split(' ').collect();
    Command::new(words[0])
        .args(&words[1..])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// A namespace with a link to this one, and the address of this end.
struct Namespace {
    name: String,
    here: String,
    wire: Arc<Wire>,
}

impl Namespace {
    fn new() -> Namespace {
        // Each test of this program has its own names and addresses.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = (std::process::id() % 50) * 4 + NEXT.fetch_add(1, Relaxed) % 4 + 20;
        let (name, link) = (format!("expertd-{number}"), format!("expertd{number}"));
        let here = format!("10.213.{number}.1");
        run(&format!("ip netns del {name}"));
        let wire = Wire::start(&link, &format!("{link}p"));
        for command in [
            format!("ip netns add {name}"),
            format!("ip link set {link}p netns {name}"),
            format!("ip address add {here}/24 dev {link}"),
            format!("ip link set {link} up"),
            format!("ip -n {name} address add 10.213.{number}.2/24 dev {link}p"),
            format!("ip -n {name} link set {link}p up"),
            format!("ip -n {name} link set lo up"),
        ] {
            assert!(run(&command), "{command}");
        }
        Namespace { name, here, wire }
    }

    fn spawn_client(&self, address: &str, notes: &Path, threads: usize) -> Child {
        Command::new("ip")
            .args(["netns", "exec", &self.name])
            .arg(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "network::link::client", "--nocapture"])
            .env(ADDRESS, address)
            .env(NOTES, notes)
            .env(THREADS, threads.to_string())
            .env("EXPERTD_NIXL", library())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.wire.end();
        run(&format!("ip netns del {}", self.name));
    }
}

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn a_link_that_delays_drops_and_breaks() {
    if std::env::var_os("EXPERTD_NETWORK_NAMESPACES").is_none() {
        eprintln!("EXPERTD_NETWORK_NAMESPACES is not set: the link is not tried");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let notes = folder.path().join("notes");
    let namespace = Namespace::new();
    let (here, wire) = (&namespace.here, &namespace.wire);
    let listen = format!("{here}:0");
    let service = start(FAMILY, 2, &["--listen", &listen, "--network-listen", here, "--insecure"]);
    let mut client = namespace.spawn_client(&service.address, &notes, 1);
    let counts = || {
        let text = std::fs::read_to_string(&notes).unwrap_or_default();
        assert!(!text.contains('l'), "a call took longer than {TOO_LONG:?}: {text}");
        ['a', 'f'].map(|letter| text.matches(letter).count())
    };
    let answered_more = |what: &str| {
        let before = counts()[0];
        eventually(LOST, what, || counts()[0] > before + 20);
    };
    // A pause of the machine can be longer than a call's deadline: calls of one part of five may fail.
    let fails_over_a_good_link = || {
        let failed = counts()[1];
        answered_more("calls over a good link");
        counts()[1] > failed
    };
    let failed = (0..5).filter(|_| fails_over_a_good_link()).count();
    assert!(failed <= 1, "calls over a good link failed in {failed} parts of five");
    wire.delay_us.store(2_000, Relaxed);
    wire.lost.store(20, Relaxed);
    answered_more("calls over a link that delays and drops");
    assert!(wire.losses.load(Relaxed) > 0, "no packet was lost");
    wire.delay_us.store(0, Relaxed);
    wire.lost.store(0, Relaxed);
    answered_more("calls after that");

    // The call that opened the session lives on: rows alone are cut off.
    let agent = agents(&service)[0];
    wire.spared.store(service.address.rsplit_once(':').unwrap().1.parse().unwrap(), Relaxed);
    wire.is_cut.store(true, Relaxed);
    eventually(NOTICED, "the session whose rows are cut off ends", || !agents(&service).contains(&agent));
    wire.is_cut.store(false, Relaxed);
    answered_more("calls once rows travel again");

    let agent = agents(&service)[0];
    wire.spared.store(0, Relaxed);
    wire.is_cut.store(true, Relaxed);
    let failed = counts()[1];
    eventually(LOST, "calls fail within their deadlines", || counts()[1] > failed + 3);
    eventually(2 * LOST, "the session of a client that is cut off ends", || {
        !agents(&service).contains(&agent) && sessions(&service).len() <= 1
    });
    wire.is_cut.store(false, Relaxed);
    answered_more("calls once the link is back");
    client.kill().unwrap();
    client.wait().unwrap();
    eventually(LOST, "nothing stays", || sessions(&service).is_empty() && agents(&service).is_empty());
}

/// What a service and its client hold: descriptors of both, memory files and threads of the service, mapped sessions of ranks, and TCP
/// ports of this namespace that are listened on.
fn held(service: &Service, client: u32) -> [usize; 6] {
    let entries = |path: String| std::fs::read_dir(path).map_or(0, Iterator::count);
    let links = std::fs::read_dir(format!("/proc/{}/fd", service.pid())).unwrap();
    let is_memory = |link: &std::path::PathBuf| link.to_string_lossy().contains("memfd:");
    let memories = links.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok()).filter(is_memory).count();
    let maps =
        |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().matches("memfd:").count();
    let listening = |line: &&str| line.split_whitespace().nth(3) == Some("0A");
    [
        entries(format!("/proc/{}/fd", service.pid())),
        entries(format!("/proc/{client}/fd")),
        memories,
        entries(format!("/proc/{}/task", service.pid())),
        service.ranks().iter().map(maps).sum(),
        std::fs::read_to_string("/proc/net/tcp").unwrap().lines().filter(listening).count(),
    ]
}

/// Sessions that are cut off while they call, in waves. The opening calls are cut off in every fourth wave only, the second one first. 16 sessions, or
/// `EXPERTD_NETWORK_CUTS` of them; an honest client beside them gets right answers, and nothing stays behind.
#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn sessions_that_are_cut_off_leave_nothing_behind() {
    if std::env::var_os("EXPERTD_NETWORK_NAMESPACES").is_none() {
        eprintln!("EXPERTD_NETWORK_NAMESPACES is not set: the link is not tried");
        return;
    }
    let cuts: usize = std::env::var("EXPERTD_NETWORK_CUTS").map_or(16, |text| text.parse().unwrap());
    let at_once = (cuts / 2).min(32);
    let folder = tempfile::tempdir().unwrap();
    let notes = folder.path().join("notes");
    let namespace = Namespace::new();
    let (here, wire) = (&namespace.here, &namespace.wire);
    let listen = format!("{here}:0");
    let flags = ["--listen", &listen, "--network-listen", here, "--insecure", "--max-sessions", "64"];
    let service = start(FAMILY, 2, &flags);
    let port = service.address.rsplit_once(':').unwrap().1.parse().unwrap();
    let honest = network::open(&service.address, &insecure(LOST)).and_then(SessionClient::over).unwrap();
    let of_honest = agents(&service);
    let mut rows = Rows::new(&golden(FAMILY), 8, 64);
    let mut compared = 0;
    let mut client = namespace.spawn_client(&service.address, &notes, at_once);
    let count = |letter: char| std::fs::read_to_string(&notes).unwrap_or_default().matches(letter).count();
    let mut until = |what: &str, is_true: &mut dyn FnMut() -> bool| {
        let begun = Instant::now();
        while !is_true() {
            assert!(begun.elapsed() < 3 * LOST, "{what}");
            let (request, wanted) = rows.draw();
            check(&honest.forward(&request, LOST).unwrap(), &wanted, &request);
            compared += 1;
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let (mut cut, mut before) = (0, None);
    for wave in 0.. {
        // All sessions at first, most of them later: each takes its time to open again.
        let most = if wave == 0 { at_once } else { at_once.div_ceil(2) };
        let answered = count('a');
        until("sessions are open and call", &mut || {
            agents(&service).len() > most && count('a') > answered + 5 * at_once
        });
        let now = held(&service, client.id());
        let first = *before.get_or_insert(now);
        println!("wave {wave}: {cut} cut off so far, held {now:?}, at first {first:?}");
        let ended: Vec<u32> = agents(&service).into_iter().filter(|pid| !of_honest.contains(pid)).collect();
        let failed = count('f');
        wire.spared.store(if wave % 4 == 1 { 0 } else { port }, Relaxed);
        wire.is_cut.store(true, Relaxed);
        until("the agents of the sessions that are cut off end", &mut || {
            let left = agents(&service);
            !ended.iter().any(|pid| left.contains(pid))
        });
        until("each session that was cut off has a failed call", &mut || count('f') >= failed + ended.len());
        wire.is_cut.store(false, Relaxed);
        cut += ended.len();
        if cut >= cuts {
            break;
        }
    }
    let first = before.unwrap();
    until("all sessions are open again, with as much as at first", &mut || {
        let now = held(&service, client.id());
        agents(&service).len() == at_once + 1 && now.iter().zip(first).all(|(now, first)| *now <= first + 4)
    });
    client.kill().unwrap();
    client.wait().unwrap();
    until("nothing stays", &mut || sessions(&service).len() == 1 && agents(&service) == of_honest);
    assert_eq!(count('l'), 0, "calls took longer than {TOO_LONG:?}");
    println!(
        "{cut} sessions cut off; {compared} answers of another client compared, {} calls failed",
        count('f')
    );
}
