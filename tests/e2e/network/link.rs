//! A client in a network namespace of its own, whose link delays, drops, and breaks. `EXPERTD_NETWORK_NAMESPACES` says that namespaces
//! may be made; scripts/network_tests.sh sets it where they can be.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use expertd_client::network::{self, NetworkOptions};
use expertd_client::session::{SessionClient, SessionError};
use expertd_client::transport::Credentials;

use super::wire::Wire;
use super::{FAMILY, LOST, agents, library, options, sessions, start};
use crate::service::load::{Rows, check};
use crate::service::{eventually, golden};

const ADDRESS: &str = "NETWORK_LINK_ADDRESS";
/// Where the client notes how its calls ended.
const NOTES: &str = "NETWORK_LINK_NOTES";
/// Deadline of a call, and far more than it may take.
const DEADLINE: Duration = Duration::from_secs(3);
const TOO_LONG: Duration = Duration::from_secs(15);
/// How long a client may take to notice that its rows no longer arrive: a second until it asks, ten until the kernel gives up.
const NOTICED: Duration = Duration::from_secs(25);

/// Not a test by itself: a client that opens sessions and calls until it is killed. It notes a letter for each call: `a` answered,
/// `f` failed; and `l` if it took too long.
#[test]
#[ignore = "runs as a child process of another test"]
fn client() {
    let (Ok(address), Ok(notes)) = (std::env::var(ADDRESS), std::env::var(NOTES)) else { return };
    let mut rows = Rows::new(&golden(FAMILY), 4, 64);
    let note = |letter: &str| {
        use std::io::Write as _;
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(&notes).unwrap();
        file.write_all(letter.as_bytes()).unwrap();
    };
    let credentials = Credentials { insecure: true, ..Credentials::default() };
    let mut options = NetworkOptions { credentials, ..options(4 << 20) };
    options.session.timeout = DEADLINE;
    let mut session: Option<SessionClient> = None;
    let mut round = 0;
    loop {
        round += 1;
        let begun = Instant::now();
        let (request, wanted) = match round % 5 {
            // More bytes than a notification takes.
            0 => rows.draw_of(rows.layers()[0], 600),
            _ => rows.draw(),
        };
        let opened = match session.take() {
            Some(session) => Ok(session),
            None => network::open(&address, &options).and_then(SessionClient::over),
        };
        let answered = opened.and_then(|opened| {
            let answer = opened.forward(&request, DEADLINE);
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
        if begun.elapsed() > TOO_LONG {
            note("l");
        }
    }
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
        let number = std::process::id() % 200 + 20;
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

    fn spawn_client(&self, address: &str, notes: &Path) -> Child {
        Command::new("ip")
            .args(["netns", "exec", &self.name])
            .arg(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "network::link::client", "--nocapture"])
            .env(ADDRESS, address)
            .env(NOTES, notes)
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
    let mut client = namespace.spawn_client(&service.address, &notes);
    let counts = || {
        let text = std::fs::read_to_string(&notes).unwrap_or_default();
        assert!(!text.contains('l'), "a call took longer than {TOO_LONG:?}: {text}");
        ['a', 'f'].map(|letter| text.matches(letter).count())
    };
    let answered_more = |what: &str| {
        let before = counts()[0];
        eventually(LOST, what, || counts()[0] > before + 20);
    };
    answered_more("calls over a good link");
    assert_eq!(counts()[1], 0, "a call over a good link failed");
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
