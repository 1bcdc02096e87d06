//! Tests of Unix-domain sockets.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::api::transport::address::Listener;

#[tokio::test]
async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.sock");
    let address = Address::Unix(path.clone());

    // A killed process leaves its file behind.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let live = Listener::bind(&address, 0o600).await.unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);

    assert!(matches!(Listener::bind(&address, 0o600).await, Err(BindError::InUse { .. })));
    drop(live);
    assert!(!path.exists(), "dropping the listener removes its file");

    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(Listener::bind(&address, 0o600).await, Err(BindError::NotASocket { .. })));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

#[tokio::test]
async fn a_socket_of_another_owner_is_not_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.sock");
    let ours = Listener::bind(&Address::Unix(path.clone()), 0o600).await.unwrap();
    std::fs::remove_file(&path).unwrap();
    let _theirs = std::os::unix::net::UnixListener::bind(&path).unwrap();
    drop(ours);
    assert!(path.exists());
}

/// Tries to connect until a connection is accepted, and returns whether that happened within the time of several checks.
async fn is_reachable(listener: &mut Listener, path: &Path) -> bool {
    let deadline = Instant::now() + 8 * FILE_ROUND;
    while Instant::now() < deadline {
        let client = std::os::unix::net::UnixStream::connect(path);
        let accepted = tokio::time::timeout(Duration::from_millis(100), listener.accept()).await;
        if client.is_ok() && matches!(accepted, Ok(Ok(_))) {
            return true;
        }
    }
    false
}

#[tokio::test]
async fn a_socket_whose_file_was_removed_is_bound_again_and_one_of_another_owner_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.sock");
    let mut ours = Listener::bind(&Address::Unix(path.clone()), 0o600).await.unwrap();
    let before = FileId::of(&path).unwrap();
    tokio::time::sleep(2 * FILE_ROUND).await;
    assert!(is_reachable(&mut ours, &path).await);
    assert!(FileId::of(&path).unwrap() == before, "a file that is there stays");
    std::fs::remove_file(&path).unwrap();
    assert!(is_reachable(&mut ours, &path).await);
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);

    std::fs::remove_file(&path).unwrap();
    let theirs = std::os::unix::net::UnixListener::bind(&path).unwrap();
    assert!(!is_reachable(&mut ours, &path).await, "another process has taken the path");
    drop(theirs);
    std::fs::remove_file(&path).unwrap();
    assert!(is_reachable(&mut ours, &path).await);
    drop(ours);
    assert!(!path.exists());
}

/// A stopped process accepts nothing: its socket has no room for further connections and is in use all the same.
#[tokio::test]
async fn a_full_socket_is_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.sock");
    let full = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&full, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&full, 0).unwrap();
    let _waiting = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let address = Address::Unix(path.clone());
    let bound = tokio::task::spawn(async move { Listener::bind(&address, 0o600).await.err() });
    let error = tokio::time::timeout(Duration::from_secs(20), bound).await.expect("no wait").unwrap();
    assert!(matches!(error, Some(BindError::InUse { .. })), "{error:?}");
}

/// Services that start in one instant on the file of an ended one: one serves, and the others say that it does.
#[test]
fn of_services_that_start_at_once_on_a_stale_file_one_gets_the_socket() {
    const SERVICES: usize = 4;
    let directory = tempfile::tempdir().unwrap();
    for round in 0..200 {
        let path = directory.path().join(format!("s{round}.sock"));
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let begin = std::sync::Barrier::new(SERVICES);
        let bound: Vec<_> = std::thread::scope(|scope| {
            let start = || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                begin.wait();
                let bound = runtime.block_on(UnixSocket::bind(&path, 0o600));
                bound.map(|socket| (runtime, socket))
            };
            let started: Vec<_> = (0..SERVICES).map(|_| scope.spawn(start)).collect();
            started.into_iter().map(|service| service.join().unwrap()).collect()
        });
        let refused = bound.iter().filter(|bound| matches!(bound, Err(BindError::InUse { .. }))).count();
        assert_eq!(refused, SERVICES - 1, "round {round}");
        assert!(connect(&path).is_ok());
    }
}

#[tokio::test]
async fn a_folder_that_stays_locked_keeps_no_service_from_its_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.sock");
    let held = FolderLock::try_take(&path).unwrap();
    assert!(FolderLock::try_take(&path).is_none());
    let waiting = UnixSocket::bind(&path, 0o600);
    assert!(tokio::time::timeout(Duration::from_millis(100), waiting).await.is_err(), "services take turns");
    let mut socket = UnixSocket::bind_within(&path, 0o600, Duration::from_millis(100)).await.unwrap();
    std::fs::remove_file(&path).unwrap();
    check(&mut socket).await;
    assert!(connect(&path).is_err(), "the next round tries again");
    check(&mut socket).await;
    assert!(connect(&path).is_ok());
    drop(held);
    assert!(FolderLock::try_take(&path).is_some());
}

/// Runs one check to its end.
async fn check(socket: &mut UnixSocket) {
    socket.next_check = Instant::now();
    socket.check_file();
    while socket.check.is_some() {
        tokio::time::sleep(Duration::from_millis(1)).await;
        socket.check_file();
    }
}

#[tokio::test]
async fn a_file_whose_number_changes_stays_the_file_of_its_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.sock");
    let mut socket = UnixSocket::bind(&path, 0o600).await.unwrap();
    let found = FileId::of(&path).unwrap();
    socket.file.id = FileId(found.0, found.1 + 1);
    check(&mut socket).await;
    assert_eq!(socket.file.id, found, "clients still reach the socket");

    // A socket of this process that was bound to another path is not the one that clients expect.
    let other = directory.path().join("other.sock");
    let _other = UnixSocket::bind(&other, 0o600).await.unwrap();
    std::fs::rename(&other, &path).unwrap();
    check(&mut socket).await;
    assert_eq!(socket.file.id, found);
    assert!(!leads_here(&path));
}

/// A file system that does not answer holds up no connection.
#[tokio::test]
async fn a_check_that_lasts_holds_nothing_up() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s.sock");
    let mut socket = UnixSocket::bind(&path, 0o600).await.unwrap();
    let (end, wait) = std::sync::mpsc::channel::<()>();
    let id = socket.file.id;
    socket.check = Some(tokio::task::spawn_blocking(move || {
        let _ = wait.recv();
        Found::Own(id)
    }));
    let _client = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let accepted = tokio::time::timeout(Duration::from_secs(10), socket.accept()).await;
    assert!(accepted.is_ok_and(|accepted| accepted.is_ok()));
    assert!(socket.check.is_some(), "the check goes on");
    drop(end);
}

/// Whatever the umask, which other tests of this process share: a socket before `chmod` allows no more than its mode.
#[tokio::test]
async fn a_file_allows_no_more_than_its_mode_from_the_first_moment_on() {
    let directory = tempfile::tempdir().unwrap();
    for mode in [0o600, 0o640, 0o400] {
        let path = directory.path().join(format!("{mode:o}"));
        let _listener = listen(&path, mode).unwrap();
        let found = std::fs::symlink_metadata(&path).unwrap().mode() & 0o777;
        assert_eq!(found & !mode, 0, "{found:o}");
    }
}
