//! Who may open a session, and where its rows travel: TLS, tokens, IPv6, ports.

use expertd_client::network::{self, NetworkOptions};
use expertd_client::session::{SessionClient, SessionError};
use expertd_client::transport::Credentials;
use tonic::Code;

use super::{FAMILY, LOST, agents, open, options, sessions, start, try_open, two_ports};
use crate::service::load::{Rows, check};
use crate::service::{Service, eventually, golden};

#[path = "../../hostile/certificates.rs"]
mod certificates;

fn call(session: &SessionClient) {
    let (request, wanted) = Rows::new(&golden(FAMILY), 11, 48).draw();
    check(&session.forward(&request, LOST).unwrap(), &wanted, &request);
}

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn the_call_that_opens_a_session_has_tls_and_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let authority = certificates::Authority::new(folder.path(), "ca");
    authority.sign("service", "localhost");
    certificates::Authority::new(folder.path(), "other");
    std::fs::write(path("tokens"), "engine engine-token-0123456789\n").unwrap();
    std::fs::write(path("wrong"), "wrong-token-0123456789\n").unwrap();
    for name in ["tokens", "wrong", "service.key"] {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(path(name), std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    let [cert, key, tokens] =
        ["service.pem", "service.key", "tokens"].map(|name| path(name).display().to_string());
    let service = start(FAMILY, 2, &["--tls-cert", &cert, "--tls-key", &key, "--token-file", &tokens]);
    let try_with = |ca: &str, token: Option<&str>| {
        let credentials = Credentials {
            ca: Some(path(ca)),
            server_name: Some("localhost".to_owned()),
            token_file: token.map(path),
            ..Credentials::default()
        };
        network::open(&service.address, &NetworkOptions { credentials, ..options(4 << 20) })
    };
    call(&SessionClient::over(try_with("ca.pem", Some("tokens")).unwrap()).unwrap());
    for token in [None, Some("wrong")] {
        let error = try_with("ca.pem", token).unwrap_err();
        let unauthenticated = Code::Unauthenticated as u32;
        assert!(matches!(error, SessionError::Status { code, .. } if code == unauthenticated), "{error}");
    }
    let error = try_with("other.pem", Some("tokens")).unwrap_err().to_string();
    assert!(error.contains("cannot connect"), "{error}");
    eventually(LOST, "nothing stays", || sessions(&service).is_empty() && agents(&service).is_empty());
}

/// Addresses at which processes listen, by family: `(address, port)` as the kernel prints them.
fn listeners(ipv6: bool) -> Vec<(String, u16)> {
    let table = if ipv6 { "/proc/net/tcp6" } else { "/proc/net/tcp" };
    let text = std::fs::read_to_string(table).unwrap_or_default();
    let rows = text.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.filter(|fields| fields[3] == "0A")
        .map(|fields| {
            let (address, port) = fields[1].rsplit_once(':').unwrap();
            (address.to_owned(), u16::from_str_radix(port, 16).unwrap())
        })
        .collect()
}

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn sessions_listen_on_ports_of_the_range_and_on_the_address() {
    let first = two_ports();
    let range = format!("127.0.0.1:{first}-{}", first + 1);
    let service = start(FAMILY, 1, &["--network-listen", &range]);
    let both = [open(&service), open(&service)];
    both.iter().for_each(call);
    // `0100007F` is 127.0.0.1.
    for port in [first, first + 1] {
        assert!(listeners(false).contains(&("0100007F".to_owned(), port)), "{port}: {:?}", listeners(false));
    }
    let error = try_open(&service).unwrap_err();
    // UCX looks for a free port longer than clients wait.
    assert!(matches!(&error, SessionError::Refused { .. } | SessionError::Network(_)), "{error}");
    both.iter().for_each(call);
    drop(both);
    eventually(LOST, "agents are gone", || agents(&service).is_empty());
    // The system keeps a port for a minute after the end of a connection.
    eventually(4 * LOST, "a port is free again", || try_open(&service).map(|session| call(&session)).is_ok());
}

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn rows_travel_over_ipv6() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        eprintln!("this machine has no IPv6");
        return;
    }
    let first = two_ports();
    let range = format!("[::1]:{first}-{}", first + 1);
    let flags = ["--listen", "[::1]:0", "--network-listen", &range];
    let service: Service = start(FAMILY, 1, &flags);
    assert!(service.address.starts_with("[::1]:"), "{}", service.address);
    let session = open(&service);
    call(&session);
    let own =
        |ipv6| listeners(ipv6).into_iter().filter(|(_, port)| (first..=first + 1).contains(port)).count();
    assert_eq!((own(false), own(true)), (0, 1), "{:?} {:?}", listeners(false), listeners(true));
}
