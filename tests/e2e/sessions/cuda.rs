//! CUDA sessions at a service without GPUs: the opening, refusals, and what they leave behind. The tests with GPUs are in
//! `cuda_gpu` and in `client/session/tests/cuda.rs`.

use std::io::Write as _;
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use bytemuck::NoUninit;
use expertd_session::cuda::wire::{KIND_CUDA, MAX_DOORBELLS, OpenCuda};
use expertd_session::socket;
use expertd_session::wire::{KIND_HOST, Open, VERSION, frame};
use expertd_shm::SharedRegion;
use expertd_shm::descriptors::send_fds;

use rustix::process::Signal;

use super::{FAMILY, Host, LOST, Load, compile_c, libraries};
use crate::service::{eventually, send};

const OPEN: OpenCuda = OpenCuda {
    version: VERSION,
    kind: KIND_CUDA,
    memory_bytes: 2 << 20,
    doorbells: 1,
    routing_bytes: 0,
    device: [1; 16],
};

/// Sends an OPEN frame, then what `more` sends; returns the sentence with which the service refuses it.
fn refused<T: NoUninit>(host: &Host, open: &T, more: impl FnOnce(&UnixStream)) -> String {
    let client = UnixStream::connect(host.path()).unwrap();
    client.set_read_timeout(Some(LOST)).unwrap();
    socket::send(&client, frame::OPEN, bytemuck::bytes_of(open)).unwrap();
    more(&client);
    let (kind, text) = socket::receive(&client, 4096).unwrap().unwrap();
    assert_eq!(kind, frame::REFUSED);
    String::from_utf8(text).unwrap()
}

/// A rank that never answers, and a client that waits no longer.
#[test]
fn a_client_reads_why_its_session_is_not_open() {
    let flags = ["--liveness-timeout-ms", "600000", "--step-timeout-ms", "600000"];
    let host = Host::start(FAMILY, 2, &flags);
    let descriptors = host.descriptors();
    let ranks = host.service.ranks();
    send(ranks[1], Signal::STOP);
    let open = Open { version: VERSION, kind: KIND_HOST, rows_bytes: 2 << 20, calls: 1, reserved: 0 };
    let text = refused(&host, &open, |client| {
        std::thread::sleep(Duration::from_millis(500));
        client.shutdown(Shutdown::Write).unwrap();
    });
    assert!(text.contains("have not attached the memory in time: they are busy"), "{text}");
    send(ranks[1], Signal::CONT);
    // The order that was under way ends, and the ranks serve as before.
    let load = Load::start(&host, 64);
    load.goes_on();
    assert_eq!(load.stop().iter().max(), Some(&1));
    eventually(LOST, "descriptors are released", || host.descriptors() <= descriptors);
}

/// The example in C compiles against the header and links; without a GPU it says why it cannot open a session.
#[test]
fn the_example_in_c_says_what_is_missing() {
    let host = Host::start(FAMILY, 1, &[]);
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("forward_cuda");
    let runtime = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/sessions/cudart");
    let stand_in = runtime.join("libcudart.c");
    compile_c("forward_cuda.c", &program, &[stand_in.to_str().unwrap(), "-I", runtime.to_str().unwrap()]);
    let run = |arguments: &[&str]| {
        let mut program = Command::new(&program);
        let output = program.args(arguments).env("LD_LIBRARY_PATH", libraries()).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(run(&[]).contains("forward_cuda unix:PATH"));
    // With a driver, the GPU's number is what is wrong; without one, the driver is missing.
    let text = run(&[&host.address, "4000000000"]);
    assert!(text.contains("open: -2") && text.to_lowercase().contains("cu"), "{text}");
}

#[test]
fn a_service_without_gpus_refuses_cuda_sessions() {
    let host = Host::start(FAMILY, 2, &[]);
    let load = Load::start(&host, 64);
    load.goes_on();
    let descriptors = host.descriptors();
    let region = SharedRegion::create("test", 2 << 20).unwrap();
    // Linux 6.16 and newer refuse the descriptor; the service may refuse the session before it comes.
    let memory = |client: &UnixStream| drop(send_fds(client, &[region.as_fd()]));
    for _ in 0..5 {
        let text = refused(&host, &OPEN, memory);
        assert!(text.contains("cannot access the memory of a GPU"), "{text}");
    }
    for doorbells in [0, MAX_DOORBELLS + 1] {
        let text = refused(&host, &OpenCuda { doorbells, ..OPEN }, memory);
        assert!(text.contains("1 to 64 doorbells"), "{text}");
    }
    let text = refused(&host, &OpenCuda { version: VERSION + 1, ..OPEN }, |_| {});
    assert!(text.contains(&format!("this service version {VERSION};")), "{text}");
    // Frames that end early leave nothing behind either.
    let mut short = UnixStream::connect(host.path()).unwrap();
    short.write_all(&bytemuck::bytes_of(&OPEN)[..20]).unwrap();
    drop(short);
    load.goes_on();
    eventually(LOST, "descriptors are released", || host.descriptors() <= descriptors);
}
