//! CUDA sessions at a service without GPUs: the opening, refusals, and what they leave behind. The tests with GPUs are in
//! `cuda_gpu` and in `proto/session/tests/cuda.rs`.

use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;

use expertd_ipc::SharedRegion;
use expertd_ipc::control::send_fds;
use expertd_session::cuda::wire::{KIND_CUDA, MAX_DOORBELLS, OpenCuda};
use expertd_session::socket;
use expertd_session::wire::{VERSION, frame};

use super::{FAMILY, Host, LOST, Load};
use crate::service::eventually;

const OPEN: OpenCuda = OpenCuda {
    version: VERSION,
    kind: KIND_CUDA,
    memory_bytes: 2 << 20,
    doorbells: 1,
    routing_bytes: 0,
    device: [1; 16],
};

/// Sends an OPEN frame, then what `more` sends; returns the sentence with which the service refuses it.
fn refused(host: &Host, open: &OpenCuda, more: impl FnOnce(&UnixStream)) -> String {
    let client = UnixStream::connect(host.path()).unwrap();
    client.set_read_timeout(Some(LOST)).unwrap();
    socket::send(&client, frame::OPEN, bytemuck::bytes_of(open)).unwrap();
    more(&client);
    let (kind, text) = socket::receive(&client, 4096).unwrap().unwrap();
    assert_eq!(kind, frame::REFUSED);
    String::from_utf8(text).unwrap()
}

#[test]
fn a_service_without_gpus_refuses_cuda_sessions() {
    let host = Host::start(FAMILY, 2, &[]);
    let load = Load::start(&host, 64);
    load.goes_on();
    let descriptors = host.descriptors();
    let region = SharedRegion::create("test", 2 << 20).unwrap();
    let memory = |client: &UnixStream| send_fds(client, &[region.as_fd()]).unwrap();
    for _ in 0..5 {
        let text = refused(&host, &OPEN, memory);
        assert!(text.contains("cannot access the memory of a GPU"), "{text}");
    }
    for doorbells in [0, MAX_DOORBELLS + 1] {
        let text = refused(&host, &OpenCuda { doorbells, ..OPEN }, memory);
        assert!(text.contains("1 to 64 doorbells"), "{text}");
    }
    let text = refused(&host, &OpenCuda { memory_bytes: 1 << 40, ..OPEN }, memory);
    assert!(text.contains("exceeds max-session-bytes"), "{text}");
    let text = refused(&host, &OpenCuda { version: VERSION + 1, ..OPEN }, memory);
    assert!(text.contains("this service version 1"), "{text}");
    // A byte without a descriptor.
    let text = refused(&host, &OPEN, |mut client| client.write_all(b"F").unwrap());
    assert!(text.contains("0 descriptors"), "{text}");
    let text = refused(&host, &OPEN, |client| send_fds(client, &[region.as_fd(), region.as_fd()]).unwrap());
    assert!(text.contains("2 descriptors"), "{text}");
    // Frames that end early leave nothing behind either.
    let mut short = UnixStream::connect(host.path()).unwrap();
    short.write_all(&bytemuck::bytes_of(&OPEN)[..20]).unwrap();
    drop(short);
    load.goes_on();
    eventually(LOST, "descriptors are released", || host.descriptors() <= descriptors);
}
