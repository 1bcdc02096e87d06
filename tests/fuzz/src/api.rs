//! What clients send: connections, requests, headers, tokens, sessions.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use expertd_grpc::fuzzing;
use expertd_grpc::{Access, AccessConfig, ConnectionLimits, ConnectionTimeouts, Server, ServerConfig};
use expertd_sessions::fuzzing as sessions;
use tokio_util::sync::CancellationToken;

use crate::echo::Echo;

/// A `ForwardRequest`: what passes validation has the shape that the ranks rely on.
pub fn request(data: &[u8]) {
    fuzzing::request(data);
}

/// `grpc-timeout`, addresses and token files.
pub fn texts(data: &[u8]) {
    fuzzing::texts(data);
}

/// The bytes of a session socket.
pub fn session(data: &[u8]) {
    sessions::socket(data);
}

/// The memory of a session: rings, requests, ids and weights.
pub fn records(data: &[u8]) {
    sessions::records(data);
}

/// Prepared calls and the control region of a CUDA session.
pub fn doorbells(data: &[u8]) {
    sessions::cuda::doorbells(data);
}

/// The opening record and the socket of a CUDA session.
pub fn cuda_session(data: &[u8]) {
    sessions::cuda::socket(data);
}

struct Running {
    path: PathBuf,
    _directory: tempfile::TempDir,
    _runtime: tokio::runtime::Runtime,
}

/// A server on a Unix-domain socket with a backend that echoes rows.
static SERVER: LazyLock<Running> = LazyLock::new(|| {
    let directory = tempfile::tempdir().expect("a directory for sockets");
    let path = directory.path().join("api.sock");
    let address = |path: &PathBuf| format!("unix:{}", path.display()).parse().expect("an address");
    let config = ServerConfig {
        listen: vec![address(&path)],
        admin: Some(address(&directory.path().join("admin.sock"))),
        insecure: false,
        connections: ConnectionLimits::for_tcp(64),
        shutdown_grace: Duration::from_millis(100),
        timeouts: ConnectionTimeouts::default(),
    };
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(1).enable_all().build().expect("a runtime");
    let access = Arc::new(Access::load(&AccessConfig::default()).expect("no files to read"));
    let server = runtime.block_on(Server::bind(&config, access, Arc::new(Echo::new()))).expect("sockets");
    runtime.spawn(server.run(CancellationToken::new()));
    Running { path, _directory: directory, _runtime: runtime }
});

/// A whole connection: the server ends it once the client has closed its half, and serves the next one.
pub fn connection(data: &[u8]) {
    let mut socket = UnixStream::connect(&SERVER.path).expect("the server accepts connections");
    // The fuzzer's own limit for an input is shorter.
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    // The server may end the connection while it is written to.
    let written = socket.write_all(data).and_then(|()| socket.shutdown(Shutdown::Write));
    let mut answer = Vec::new();
    if let Err(error) = socket.read_to_end(&mut answer)
        && written.is_ok()
    {
        assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "the server does not end the connection");
    }
}
