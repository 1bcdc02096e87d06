//! Tests of a real service in broken surroundings: standard error, signals, descriptors, other processes of the user.

use std::fs::Permissions;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use expertd_proto::v1::admin_client::AdminClient;
use expertd_proto::v1::{DType, ForwardRequest, GetStatusRequest};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use tokio::net::TcpStream;

use crate::attack::{greet, honest, honest_client};
use crate::load::PATIENCE;
use crate::service::{Service, eventually, fixture, ranks_of, send, serve_command, serve_to_the_end};

/// Starts a service that logs a lot to the given standard error. Returns the service and its public address.
fn start(stderr: Stdio) -> (Child, String) {
    let mut command = serve_command(&fixture("qwen3_moe"), &["--ranks", "1"]);
    command.env("EXPERTD_LOG", "trace").stderr(stderr);
    ready(command)
}

/// Starts a service and waits until it is ready. Returns the service and its public address.
fn ready(mut command: Command) -> (Child, String) {
    let until = Instant::now() + PATIENCE;
    let mut child = loop {
        match command.spawn() {
            // A process that another test starts meanwhile holds the program open for writing until it runs its own.
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(10));
            }
            child => break child.unwrap(),
        }
    };
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let ready = lines.find_map(|line| line.ok()?.strip_prefix("ready: listening on ").map(str::to_owned));
    // Read the rest, so that the pipe never fills.
    std::thread::spawn(move || lines.for_each(drop));
    (child, ready.unwrap().split(',').next().unwrap().to_owned())
}

async fn serves_and_ends(mut child: Child, address: &str) {
    let got = honest(address, Duration::from_secs(1)).await;
    assert!(got.failed.is_empty() && got.calls > 0, "{got:?}");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let status = tokio::task::spawn_blocking(move || child.wait().unwrap()).await.unwrap();
    assert_eq!(status.code(), Some(0), "drained");
}

#[tokio::test(flavor = "multi_thread")]
async fn standard_error_that_is_not_read() {
    let (reader, writer) = std::io::pipe().unwrap();
    let (child, address) = start(writer.into());
    serves_and_ends(child, &address).await;
    let mut some = [0; 100];
    let mut reader = reader;
    reader.read_exact(&mut some).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn standard_error_whose_reader_is_gone() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let (child, address) = start(writer.into());
    serves_and_ends(child, &address).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn standard_error_that_is_full() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let (child, address) = start(full.into());
    serves_and_ends(child, &address).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_a_drain() {
    let forever = "600000";
    let flags =
        ["--drain-timeout-ms", forever, "--step-timeout-ms", forever, "--liveness-timeout-ms", forever];
    let mut service = Service::start("qwen3_moe", 1, &flags);
    // A stopped rank never completes the step of this call.
    kill_process(Pid::from_raw(service.ranks()[0] as i32).unwrap(), Signal::STOP).unwrap();
    let client = honest_client(&service.address).await.unwrap();
    let model = client.model("").await.unwrap();
    let rows = Bytes::from(vec![0; model.hidden as usize * 4]);
    let request = ForwardRequest::inline(model.moe_layers[0].layer, 1, DType::DtypeF32, rows);
    let call = tokio::spawn(async move { client.forward(request, None).await });
    let mut admin = AdminClient::new(expertd_client::transport::connect(&service.admin).await.unwrap());
    let begun = Instant::now();
    while admin.get_status(GetStatusRequest {}).await.unwrap().into_inner().requests_in_flight == 0 {
        assert!(begun.elapsed() < PATIENCE, "the call is in no step");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // A terminal that is closed may send several SIGHUPs.
    for signal in [Signal::TERM, Signal::HUP, Signal::HUP] {
        service.signal(signal);
        assert!(service.wait(Duration::from_secs(4)).is_none(), "the drain waits for the call");
    }
    service.signal(Signal::TERM);
    assert!(service.wait(PATIENCE).is_some(), "the second signal ends it");
    assert!(call.await.unwrap().is_err());
}

/// The files of sockets are removed, as cleaners of temporary folders do: clients and operators can connect again soon.
#[tokio::test(flavor = "multi_thread")]
async fn sockets_whose_files_are_removed_are_bound_again() {
    let folder = tempfile::tempdir().unwrap();
    let socket = |name: &str| format!("unix:{}", folder.path().join(name).display());
    let [public, admin, sessions] = ["api", "admin", "sessions"].map(socket);
    let flags = ["--listen", &public, "--admin-listen", &admin, "--session-listen", &sessions];
    let mut service = Service::start("qwen3_moe", 1, &flags);
    for name in ["api", "admin", "sessions"] {
        std::fs::remove_file(folder.path().join(name)).unwrap();
    }
    let is_back = |name: &str| std::os::unix::net::UnixStream::connect(folder.path().join(name)).is_ok();
    eventually(PATIENCE, "all sockets are back", || ["api", "admin", "sessions"].into_iter().all(is_back));
    assert_eq!(std::fs::metadata(folder.path().join("admin")).unwrap().mode() & 0o777, 0o600);
    let client = expertd_client::Client::connect(&public).await.unwrap();
    assert_eq!(client.model("").await.unwrap().name, "qwen3_moe");
    drop(client);
    service.signal(Signal::TERM);
    assert_eq!(service.wait(PATIENCE).unwrap().code(), Some(0), "drained");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the files are removed at the end");
}

/// Clients that are turned away connect at will, users without rights among them. The log has a line, and not one for each.
#[test]
fn sessions_that_are_refused_do_not_fill_the_log() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, log) = (folder.path().join("sessions"), folder.path().join("log"));
    let listen = format!("unix:{}", socket.display());
    let mut command = serve_command(&fixture("qwen3_moe"), &["--ranks", "1", "--session-listen", &listen]);
    command.env("EXPERTD_LOG", "info").stderr(std::fs::File::create(&log).unwrap());
    let (mut child, _) = ready(command);
    for _ in 0..100 {
        let mut client = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        client.write_all(b"no frame, and longer than the head of one").unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        // The service has answered and closed the socket.
        let _ = client.read_to_end(&mut Vec::new());
    }
    let lines = || std::fs::read_to_string(&log).unwrap();
    eventually(PATIENCE, "the log has a line", || lines().contains("refused"));
    child.kill().unwrap();
    child.wait().unwrap();
    let log = lines();
    let lines = log.lines().filter(|line| line.contains("refused")).count();
    assert!((1..10).contains(&lines), "{lines} lines: {log}");
}

/// Services that start at once on the file of an ended service: one serves, the others name the path, and clients reach it.
#[tokio::test(flavor = "multi_thread")]
async fn of_services_that_start_at_once_on_a_stale_socket_one_serves() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("api");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let listen = format!("unix:{}", socket.display());
    let output = |service: usize| folder.path().join(format!("output-{service}"));
    let starting: Vec<_> = (0..4)
        .map(|service| {
            let mut command = serve_command(&fixture("qwen3_moe"), &["--ranks", "1", "--listen", &listen]);
            command.stdout(std::fs::File::create(output(service)).unwrap());
            command.stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let mut serving: Vec<u32> = starting.iter().map(Child::id).collect();
    let (ended, ends) = std::sync::mpsc::channel();
    for child in starting {
        let (ended, pid) = (ended.clone(), child.id());
        std::thread::spawn(move || ended.send((pid, child.wait_with_output().unwrap())));
    }
    for _ in 0..3 {
        let (pid, output) = ends.recv_timeout(PATIENCE).expect("all but one service end");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(69), "{text}");
        assert!(text.contains("another process listens") && text.contains("--listen"), "{text}");
        serving.retain(|other| *other != pid);
    }
    eventually(PATIENCE, "a service is ready", || {
        (0..4).any(|service| std::fs::read_to_string(output(service)).unwrap().contains("ready: "))
    });
    let client = expertd_client::Client::connect(&listen).await.unwrap();
    assert_eq!(client.model("").await.unwrap().name, "qwen3_moe");
    drop(client);
    send(serving[0], Signal::TERM);
    let (_, output) = ends.recv_timeout(PATIENCE).expect("the last service drains");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn too_few_descriptors_are_found_at_the_start() {
    let model = fixture("qwen3_moe");
    let command = serve_command(&model, &["--ranks", "1"]);
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
    let output = Command::new("sh")
        .args(["-c", "ulimit -n 200; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_expertd")])
        .args(words)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(64), "{text}");
    assert!(text.contains("ulimit -n"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_leave_descriptors_for_the_next_generation() {
    let command = serve_command(&fixture("qwen3_moe"), &["--ranks", "1"]);
    let mut limited = Command::new("sh");
    // 960 for the service itself, 56 for connections.
    limited.args(["-c", "ulimit -n 1016; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_expertd")]);
    limited.args(command.get_args()).stdout(Stdio::piped());
    let (child, address) = ready(limited);
    // The sockets of this process are more than many systems allow by default.
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
    let mut idle = Vec::new();
    for _ in 0..1000 {
        let mut socket = TcpStream::connect(&address).await.unwrap();
        let _ = greet(&mut socket, &[]).await;
        idle.push(socket);
    }
    send(ranks_of(child.id())[0], Signal::KILL);
    serves_and_ends(child, &address).await;
}

/// Files in `/proc` of a process that is not dumpable belong to root and not to its user.
#[test]
fn other_processes_of_the_user_cannot_read_memory() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let model = folder.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for file in std::fs::read_dir(fixture("qwen3_moe")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), model.join(file.file_name())).unwrap();
    }
    let program = folder.path().join("expertd");
    std::fs::copy(env!("CARGO_BIN_EXE_expertd"), &program).unwrap();
    let mut command = Command::new(program);
    command.args(serve_command(&model, &["--ranks", "1"]).get_args()).stdout(Stdio::piped());
    if rustix::process::geteuid().is_root() {
        // A user without rights, since everything of root belongs to root.
        command.uid(65534).gid(65534);
    }
    let (mut child, _) = ready(command);
    let processes = [vec![child.id()], ranks_of(child.id())].concat();
    assert_eq!(processes.len(), 2, "a router and a rank");
    for pid in processes {
        assert_ne!(
            std::fs::metadata(format!("/proc/{pid}")).unwrap().uid(),
            0,
            "the process has another user"
        );
        assert_eq!(std::fs::metadata(format!("/proc/{pid}/mem")).unwrap().uid(), 0);
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn plaintext_beyond_loopback_is_refused() {
    let (code, text) = serve_to_the_end(&fixture("qwen3_moe"), &["--listen", "0.0.0.0:0"]);
    assert_eq!(code, Some(64), "{text}");
    assert!(text.contains("--tls-cert") && text.contains("--insecure"), "{text}");
}
