//! TLS, client certificates and tokens over real sockets.

use std::path::Path;
use std::time::Duration;

use expertd_client::transport::{self, Credentials};
use expertd_client::{Client, ClientError};
use expertd_grpc::{AccessConfig, ConnectionLimits, ConnectionTimeouts};
use expertd_proto::v1::GetStatusRequest;
use expertd_proto::v1::admin_client::AdminClient;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::Code;

use crate::backend::{ECHO, Fake, limits};
use crate::certificates::Authority;
use crate::harness::{PATIENCE, Service, request, rows_of};

const HIDDEN: usize = 64;
const TOKEN: &str = "engine-token-0123456789";
const ADMIN: &str = "admin-token-0123456789";

fn write_tokens(folder: &Path) {
    std::fs::write(folder.join("tokens"), format!("engine {TOKEN}\n")).unwrap();
    std::fs::write(folder.join("admin-tokens"), format!("operator {ADMIN}\n")).unwrap();
    std::fs::write(folder.join("wrong"), "not-a-known-token-01234").unwrap();
}

fn with_tls(folder: &Path) -> AccessConfig {
    let authority = Authority::new(folder, "ca");
    authority.sign("server", "localhost");
    AccessConfig {
        tls_cert: Some(folder.join("server.pem")),
        tls_key: Some(folder.join("server.key")),
        ..AccessConfig::default()
    }
}

fn client_side(folder: &Path) -> Credentials {
    Credentials {
        ca: Some(folder.join("ca.pem")),
        server_name: Some("localhost".to_owned()),
        ..Credentials::default()
    }
}

async fn start(access: &AccessConfig, admin: Option<&str>) -> Service {
    let fake = Fake::new(HIDDEN, limits(HIDDEN, 32));
    Service::start_guarded(&fake, ConnectionTimeouts::default(), ConnectionLimits::for_tcp(64), access, admin)
        .await
}

async fn works(address: &str, credentials: &Credentials) {
    let client = Client::connect_with(address, credentials).await.unwrap();
    let good = request(ECHO, 2, HIDDEN);
    assert_eq!(client.forward(good.clone(), None).await.unwrap().rows, rows_of(&good));
}

async fn refused(address: &str, credentials: &Credentials) -> Code {
    match Client::connect_with(address, credentials).await {
        Err(ClientError::Model(status)) => status.code(),
        Err(error) => panic!("not a status: {error}"),
        Ok(_) => Code::Ok,
    }
}

#[tokio::test]
async fn tokens_are_required_over_tcp_and_name_the_client() {
    let folder = tempfile::tempdir().unwrap();
    write_tokens(folder.path());
    let access = AccessConfig {
        token_file: Some(folder.path().join("tokens")),
        admin_token_file: Some(folder.path().join("admin-tokens")),
        ..AccessConfig::default()
    };
    let service = start(&access, Some("127.0.0.1:0")).await;
    let with =
        |name: &str| Credentials { token_file: Some(folder.path().join(name)), ..Credentials::default() };
    works(&service.tcp, &with("tokens")).await;
    assert_eq!(refused(&service.tcp, &Credentials::default()).await, Code::Unauthenticated);
    assert_eq!(refused(&service.tcp, &with("wrong")).await, Code::Unauthenticated);
    // The kernel reports the user at the other end of a Unix-domain socket.
    works(&service.unix, &Credentials::default()).await;

    for (file, code) in
        [("tokens", Code::PermissionDenied), ("wrong", Code::Unauthenticated), ("admin-tokens", Code::Ok)]
    {
        let mut admin = AdminClient::new(transport::connect_with(&service.admin, &with(file)).await.unwrap());
        let answer = admin.get_status(GetStatusRequest {}).await;
        assert_eq!(answer.map_or_else(|status| status.code(), |_| Code::Ok), code, "{file}");
    }
}

/// A stream lasts as long as its client likes; its requests are computed as long as the token is one of the file.
#[tokio::test]
async fn a_token_that_is_removed_ends_the_streams_of_its_client() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens");
    let other = "other-token-0123456789";
    std::fs::write(&file, format!("engine {TOKEN}\nother {other}\n")).unwrap();
    let access = AccessConfig { token_file: Some(file.clone()), ..AccessConfig::default() };
    let service = start(&access, None).await;
    let mut streams = Vec::new();
    for token in [TOKEN, other] {
        let own = folder.path().join(token);
        std::fs::write(&own, token).unwrap();
        let credentials = Credentials { token_file: Some(own), ..Credentials::default() };
        let client = Client::connect_with(&service.tcp, &credentials).await.unwrap();
        streams.push(client.stream(1).await.unwrap());
    }
    let good = request(ECHO, 2, HIDDEN);
    std::fs::write(&file, format!("other {other}\n")).unwrap();
    let begun = std::time::Instant::now();
    let status = loop {
        let (sender, receiver) = &mut streams[0];
        sender.send(1, good.clone(), None).await.unwrap();
        match receiver.next().await {
            Ok(answer) => assert_eq!(answer.unwrap().1.unwrap().rows, rows_of(&good)),
            Err(status) => break status,
        }
        assert!(begun.elapsed() < PATIENCE, "the stream goes on without its token");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(status.code(), Code::Unauthenticated, "{status:?}");
    let (sender, receiver) = &mut streams[1];
    sender.send(2, good.clone(), None).await.unwrap();
    let (id, answer) = receiver.next().await.unwrap().unwrap();
    assert_eq!((id, answer.unwrap().rows), (2, rows_of(&good)));
}

#[tokio::test]
async fn tls_keeps_plaintext_and_strangers_out() {
    let folder = tempfile::tempdir().unwrap();
    let service = start(&with_tls(folder.path()), None).await;
    works(&service.tcp, &client_side(folder.path())).await;
    assert!(Client::connect(&service.tcp).await.is_err(), "plaintext");
    let by_address = Credentials { server_name: None, ..client_side(folder.path()) };
    let error = Client::connect_with(&service.tcp, &by_address).await.err().unwrap().to_string();
    assert!(error.contains("--tls-server-name NAME") && error.contains("localhost"), "{error}");
    assert!(!error.contains("is `expertd serve` running"), "{error}");
    let other = tempfile::tempdir().unwrap();
    Authority::new(other.path(), "ca");
    let error =
        Client::connect_with(&service.tcp, &client_side(other.path())).await.err().unwrap().to_string();
    assert!(error.contains("another authority") && error.contains("--tls-ca"), "{error}");
    // Bytes that are no handshake end the connection.
    let mut socket = tokio::net::TcpStream::connect(&service.tcp).await.unwrap();
    socket.write_all(&[0x16, 3, 1, 255, 255, 1, 2, 3]).await.unwrap();
    socket.shutdown().await.unwrap();
    let end = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut Vec::new())).await;
    assert!(end.is_ok(), "the connection ends");
    works(&service.tcp, &client_side(folder.path())).await;
}

#[tokio::test]
async fn client_certificates_are_required_and_their_names_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let mut access = with_tls(folder.path());
    let clients = Authority::new(folder.path(), "clients");
    clients.sign("good", "engine.example");
    clients.sign("bad", "other.example");
    access.tls_client_ca = Some(folder.path().join("clients.pem"));
    access.tls_client_names = vec!["engine.example".to_owned()];
    let service = start(&access, None).await;
    let with = |name: &str| Credentials {
        cert: Some(folder.path().join(format!("{name}.pem"))),
        key: Some(folder.path().join(format!("{name}.key"))),
        ..client_side(folder.path())
    };
    works(&service.tcp, &with("good")).await;
    assert_eq!(refused(&service.tcp, &with("bad")).await, Code::PermissionDenied);
    assert!(Client::connect_with(&service.tcp, &client_side(folder.path())).await.is_err(), "none at all");
    // A certificate that another authority signed.
    Authority::new(folder.path(), "others").sign("foreign", "engine.example");
    assert!(Client::connect_with(&service.tcp, &with("foreign")).await.is_err());
}

#[tokio::test]
async fn certificates_are_replaced_without_a_failed_call() {
    let folder = tempfile::tempdir().unwrap();
    let access = with_tls(folder.path());
    let service = start(&access, None).await;
    let old = folder.path().join("old.pem");
    std::fs::copy(folder.path().join("ca.pem"), &old).unwrap();
    let before = Client::connect_with(&service.tcp, &client_side(folder.path())).await.unwrap();

    // Another authority, and a certificate that only it has signed.
    Authority::new(folder.path(), "ca").sign("server", "localhost");
    let begun = std::time::Instant::now();
    loop {
        let good = request(ECHO, 2, HIDDEN);
        assert_eq!(before.forward(good.clone(), None).await.unwrap().rows, rows_of(&good), "under way");
        if Client::connect_with(&service.tcp, &client_side(folder.path())).await.is_ok() {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "the new certificate is never used");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let former = Credentials { ca: Some(old), ..client_side(folder.path()) };
    assert!(
        Client::connect_with(&service.tcp, &former).await.is_err(),
        "the former one is not used any more"
    );
}
