//! CUDA sessions between two processes: the client, and a stand-in for the service whose only rank copies each call's rows to its
//! output. Run with `cargo test -p expertd-session --features cuda --test cuda -- --ignored --test-threads=1`.

#![allow(unsafe_code, reason = "calls the CUDA driver")]
#![allow(clippy::unwrap_used)]

use std::ffi::c_void;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytemuck::Zeroable as _;
use cudarc::driver::sys::{self, CUresult, CUstream};
use expertd_session::cuda::control::ControlMemory;
use expertd_session::cuda::wire::{MAX_PREPARE_FRAME, OpenCuda, PrepareReply, PreparedCall, StatusRecord};
use expertd_session::cuda::{CudaSession, CudaSessionOptions};
use expertd_session::wire::{CompletionRecord, frame};
use expertd_session::{SessionError, socket};
use expertd_shm::descriptors::receive_fds;

const HIDDEN: usize = 2048;
const ROWS: usize = 64;
/// bf16.
const ROW_BYTES: usize = HIDDEN * 2;
/// Variables of the process that stands in for the service.
const SOCKET: &str = "EXPERTD_TEST_SOCKET";
const RANK_GPU: &str = "EXPERTD_TEST_RANK_GPU";

fn ok(status: CUresult) {
    assert_eq!(status, CUresult::CUDA_SUCCESS);
}

fn gpus() -> u32 {
    let mut count = 0;
    // SAFETY: the argument is valid for writes.
    unsafe {
        ok(sys::cuInit(0));
        ok(sys::cuDeviceGetCount(&raw mut count));
    }
    count.cast_unsigned()
}

/// Makes the primary context of a GPU current on this thread.
fn bind(ordinal: u32) {
    let (mut device, mut context) = (0, std::ptr::null_mut());
    // SAFETY: the arguments are valid for writes. The context is never released.
    unsafe {
        ok(sys::cuInit(0));
        ok(sys::cuDeviceGet(&raw mut device, ordinal.cast_signed()));
        ok(sys::cuDevicePrimaryCtxRetain(&raw mut context, device));
        ok(sys::cuCtxSetCurrent(context));
    }
}

fn stream() -> CUstream {
    let mut stream = std::ptr::null_mut();
    // SAFETY: a context is current.
    ok(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
    stream
}

/// Stops a process and waits until all its threads stand still: on a busy machine they run on for a while.
fn stop(process: &Child) {
    let sent = Command::new("kill").args(["-STOP", &process.id().to_string()]).status().unwrap();
    assert!(sent.success());
    // A thread that has ended has no file.
    let is_stopped = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).ok();
        stat.is_none_or(|stat| stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T')))
    };
    let tasks = || std::fs::read_dir(format!("/proc/{}/task", process.id())).unwrap();
    let begin = Instant::now();
    while !tasks().all(|task| is_stopped(task.unwrap())) {
        assert!(begin.elapsed() < Duration::from_secs(10), "the process does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Not a test: the process that stands in for the service. Its rank answers calls by copies on its GPU's stream.
#[test]
#[ignore = "the process of the service in other tests"]
fn stand_in() {
    let (Some(path), Ok(gpu)) = (std::env::var_os(SOCKET), std::env::var(RANK_GPU)) else { return };
    let gpu: u32 = gpu.parse().unwrap();
    let listener = UnixListener::bind(path).unwrap();
    println!("listening");
    std::io::stdout().flush().unwrap();
    let (client, _) = listener.accept().unwrap();
    let (kind, _) = socket::receive(&client, 256).unwrap().unwrap();
    assert_eq!(kind, frame::GET_MODEL);
    socket::send(&client, frame::MODEL, &[]).unwrap();
    let (kind, payload) = socket::receive(&client, 256).unwrap().unwrap();
    assert_eq!(kind, frame::OPEN);
    let open: OpenCuda = socket::record(&payload).unwrap();
    let fd = receive_fds(&client).unwrap().pop().unwrap();
    let begin = Instant::now();
    let Some(memory) = import(fd.as_fd(), open.memory_bytes as usize, gpu) else {
        return socket::send(&client, frame::REFUSED, b"the memory cannot be mapped").unwrap();
    };
    eprintln!("{} bytes imported in {:?}", open.memory_bytes, begin.elapsed());
    let control = ControlMemory::create(open.doorbells, 0).unwrap();
    socket::send(&client, frame::OPENED_CUDA, bytemuck::bytes_of(&control.opened(1, HIDDEN as u32))).unwrap();
    socket::send_region(&client, control.region()).unwrap();
    let (kind, payload) = socket::receive(&client, MAX_PREPARE_FRAME).unwrap().unwrap();
    assert_eq!(kind, frame::PREPARE);
    let calls: Vec<PreparedCall> =
        payload.chunks(size_of::<PreparedCall>()).map(|record| socket::record(record).unwrap()).collect();
    let reply = PrepareReply { first: 0, count: calls.len() as u32 };
    socket::send(&client, frame::PREPARED, bytemuck::bytes_of(&reply)).unwrap();
    serve(&client, &control, memory, &calls, gpu);
}

/// Maps the memory behind a descriptor for a GPU, as a rank does. It is never unmapped.
fn import(fd: BorrowedFd<'_>, bytes: usize, gpu: u32) -> Option<u64> {
    bind(gpu);
    let kind = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    let number = std::ptr::without_provenance_mut(fd.as_raw_fd().cast_unsigned() as usize);
    let (mut handle, mut address) = (0, 0);
    // SAFETY: integers are a valid descriptor.
    let mut access: sys::CUmemAccessDesc = unsafe { std::mem::zeroed() };
    access.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = gpu.cast_signed();
    access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    // SAFETY: for this kind of handle the argument is the descriptor itself; the range of addresses is fresh.
    unsafe {
        let imported = sys::cuMemImportFromShareableHandle(&raw mut handle, number, kind);
        (imported == CUresult::CUDA_SUCCESS).then_some(())?;
        ok(sys::cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0));
        ok(sys::cuMemMap(address, bytes, 0, handle, 0));
        ok(sys::cuMemSetAccess(address, bytes, &raw const access, 1));
    }
    Some(address)
}

/// Answers calls until the socket ends.
fn serve(client: &UnixStream, control: &ControlMemory, memory: u64, calls: &[PreparedCall], gpu: u32) {
    bind(gpu);
    let stream = stream();
    let mut status = StatusRecord::zeroed();
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while matches!(socket::receive(client, 256), Ok(Some(_))) {}
            has_ended.store(true, Ordering::Release);
        });
        while !has_ended.load(Ordering::Acquire) {
            let Some(ring) = control.take(0, 0) else {
                std::hint::spin_loop();
                continue;
            };
            let call = calls[ring.prepared as usize];
            let bytes = ring.rows as usize * ROW_BYTES;
            // SAFETY: both places lie in the client's memory, which is mapped.
            unsafe {
                let (to, from) = (memory + call.output, memory + call.rows);
                ok(sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream));
                ok(sys::cuStreamSynchronize(stream));
            }
            let record = CompletionRecord { call: status.calls + 1, ..CompletionRecord::zeroed() };
            control.complete(0, &record, &mut status);
        }
    });
}

/// The stand-in's process, and the folder of its socket.
struct Service {
    child: Child,
    path: PathBuf,
    /// Open as long as the process runs: it prints at its end.
    _stdout: BufReader<ChildStdout>,
    _folder: tempfile::TempDir,
}

impl Service {
    fn start(gpu: u32) -> Service {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("session.sock");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["stand_in", "--exact", "--ignored", "--nocapture"]);
        command.env(SOCKET, &path).env(RANK_GPU, gpu.to_string()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("listening") {
            line.clear();
            assert!(stdout.read_line(&mut line).unwrap() > 0, "the stand-in ended");
        }
        Service { child, path, _stdout: stdout, _folder: folder }
    }

    fn open(&self, device: u32) -> Result<CudaSession, SessionError> {
        let options = CudaSessionOptions { device, memory_bytes: 8 << 20, ..CudaSessionOptions::default() };
        CudaSession::open(&format!("unix:{}", self.path.display()), &options)
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Pairs of the client's GPU and the rank's GPU.
fn pairs() -> Vec<(u32, u32)> {
    if gpus() > 1 { vec![(1, 0), (0, 0)] } else { vec![(0, 0)] }
}

/// A chain of calls: each one's rows are the output of the one before.
fn chain(length: usize) -> Vec<PreparedCall> {
    let area = (ROWS * ROW_BYTES) as u64;
    let call = |at: u64| PreparedCall {
        dtype: 1,
        max_rows: ROWS as u32,
        rows: at * area,
        output: (at + 1) * area,
        ..PreparedCall::zeroed()
    };
    (0..length as u64).map(call).collect()
}

fn write(address: u64, bytes: &[u8]) {
    // SAFETY: the callers' memory, which no call in flight uses.
    ok(unsafe { sys::cuMemcpyHtoD_v2(address, bytes.as_ptr().cast(), bytes.len()) });
    // The copy of pageable memory may return earlier, and the tests' streams do not wait for the default stream.
    // SAFETY: the default stream.
    ok(unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) });
}

fn read(address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0_u8; len];
    // SAFETY: as above.
    ok(unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast::<c_void>(), address, len) });
    bytes
}

fn pattern(seed: usize) -> Vec<u8> {
    (0..ROWS * ROW_BYTES).map(|at| (at * 31 + seed * 17 + at / 251) as u8).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn calls_on_a_stream_answer_in_order() {
    for (client, rank) in pairs() {
        let service = Service::start(rank);
        let session = service.open(client).unwrap();
        bind(client);
        let stream = stream();
        let calls = session.prepare(&chain(3)).unwrap();
        let base = session.memory().address();
        for round in 0..200 {
            let rows = pattern(round);
            write(base, &rows);
            for call in &calls {
                // SAFETY: a live stream with one call at a time; it is synchronised below.
                unsafe { session.enqueue(*call, 0, ROWS as u32, stream.cast()).unwrap() };
            }
            // SAFETY: a live stream.
            ok(unsafe { sys::cuStreamSynchronize(stream) });
            assert_eq!(read(base + 3 * rows.len() as u64, rows.len()), rows, "round {round}");
        }
        assert_eq!(session.status(0).unwrap().calls, 600);
        let begin = Instant::now();
        for _ in 0..1000 {
            // SAFETY: as above.
            unsafe { session.enqueue(calls[0], 0, 1, stream.cast()).unwrap() };
        }
        // SAFETY: a live stream.
        ok(unsafe { sys::cuStreamSynchronize(stream) });
        println!(
            "client GPU {client}, rank GPU {rank}: {:?} a call of one row on a stream",
            begin.elapsed() / 1000
        );
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_captured_graph_is_replayed() {
    const LENGTH: usize = 8;
    const REPLAYS: usize = 2000;
    for (client, rank) in pairs() {
        let service = Service::start(rank);
        let session = service.open(client).unwrap();
        bind(client);
        let stream = stream();
        let calls = session.prepare(&chain(LENGTH)).unwrap();
        let base = session.memory().address();
        let (mut graph, mut replay) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a live stream, and arguments that are valid for writes.
        unsafe {
            ok(sys::cuStreamBeginCapture_v2(stream, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL));
            for call in &calls {
                session.enqueue(*call, 0, ROWS as u32, stream.cast()).unwrap();
            }
            ok(sys::cuStreamEndCapture(stream, &raw mut graph));
            ok(sys::cuGraphInstantiateWithFlags(&raw mut replay, graph, 0));
        }
        let bytes = ROWS * ROW_BYTES;
        let begin = Instant::now();
        for at in 0..REPLAYS {
            let rows = if at % 100 == 0 { pattern(at) } else { Vec::new() };
            write(base, &rows);
            // SAFETY: a live graph and stream.
            unsafe {
                ok(sys::cuGraphLaunch(replay, stream));
                ok(sys::cuStreamSynchronize(stream));
            }
            if at % 100 == 0 {
                assert_eq!(read(base + (LENGTH * bytes) as u64, bytes), rows, "replay {at}");
            }
        }
        let each = begin.elapsed() / (REPLAYS * LENGTH) as u32;
        println!(
            "client GPU {client}, rank GPU {rank}: {each:?} a call of {ROWS} rows in a graph of {LENGTH}"
        );
        assert_eq!(session.status(0).unwrap().calls, (REPLAYS * LENGTH) as u64);
        drop(session);
        // SAFETY: no work uses the graph.
        unsafe { ok(sys::cuGraphExecDestroy(replay)) };
    }
}

#[test]
#[ignore = "needs a GPU"]
fn streams_are_freed_when_the_service_is_killed() {
    for (client, rank) in pairs() {
        let mut service = Service::start(rank);
        let session = service.open(client).unwrap();
        bind(client);
        let stream = stream();
        let calls = session.prepare(&chain(1)).unwrap();
        // SAFETY: a live stream with one call at a time.
        let enqueue = || unsafe { session.enqueue(calls[0], 0, 1, stream.cast()) };
        enqueue().unwrap();
        // SAFETY: a live stream.
        ok(unsafe { sys::cuStreamSynchronize(stream) });
        // The service takes no doorbell while it is stopped.
        stop(&service.child);
        for _ in 0..5 {
            enqueue().unwrap();
        }
        std::thread::sleep(Duration::from_millis(50));
        // SAFETY: a live stream.
        assert_eq!(unsafe { sys::cuStreamQuery(stream) }, CUresult::CUDA_ERROR_NOT_READY);
        let begin = Instant::now();
        service.kill();
        // SAFETY: a live stream.
        ok(unsafe { sys::cuStreamSynchronize(stream) });
        println!("five waiting calls were freed {:?} after the service was killed", begin.elapsed());
        assert!(matches!(session.status(0), Err(SessionError::Ended { .. })));
        assert!(matches!(enqueue(), Err(SessionError::Ended { .. })));
    }
}
