//! Clients that open sessions wrongly, or write and send what they like.

use bytemuck::Zeroable as _;
use expertd_client::network;
use expertd_client::session::SessionError;
use expertd_network::wire::{Head, Place, VERSION};
use expertd_network::{Card, Endpoint, Library, Transports};
use expertd_proto::v1::network_client::NetworkClient;
use expertd_proto::v1::network_session_response::Message;
use expertd_proto::v1::{
    NetworkSessionOpened, NetworkSessionRequest, NetworkSessionResponse, OpenNetworkSession,
};
use expertd_session::wire::RequestRecord;
use expertd_shm::SharedRegion;
use rand::rngs::SmallRng;
use rand::{Rng as _, RngExt as _, SeedableRng as _};
use tonic::{Code, Status};

use super::{FAMILY, LOST, agents, library, open, options, runtime, sessions, start, try_open};
use crate::service::load::{Rows, check};
use crate::service::{Service, eventually, golden};

/// Makes a mistake.
type Change<'a> = &'a dyn Fn(&mut OpenNetworkSession);
/// Bytes of a hostile client's row area.
pub(super) const ROWS: usize = 1 << 20;

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn calls_that_open_no_session_are_refused_with_a_sentence() {
    let service = start(FAMILY, 2, &["--max-sessions", "4"]);
    let runtime = runtime();
    let good = OpenNetworkSession {
        version: VERSION,
        metadata: vec![1; 400].into(),
        rows_address: 1 << 40,
        rows_bytes: 1 << 20,
        calls: 8,
    };
    let refused = |open: Option<OpenNetworkSession>| {
        let status = runtime.block_on(async {
            let channel = expertd_client::transport::connect(&service.address).await.unwrap();
            let message = NetworkSessionRequest { open };
            let call = NetworkClient::new(channel).session(tokio_stream::iter([message])).await;
            match call {
                Err(status) => Some(status),
                Ok(answers) => answers.into_inner().message().await.err(),
            }
        });
        let status = status.expect("a refusal");
        (status.code(), status.message().to_owned())
    };
    let wrong = |change: &dyn Fn(&mut OpenNetworkSession)| {
        let mut open = good.clone();
        change(&mut open);
        refused(Some(open))
    };
    let (code, text) = refused(None);
    assert!(code == Code::InvalidArgument && text.contains("must open a session"), "{text}");
    let mistakes: [(Change<'_>, &str); 8] = [
        (&|open| open.version = 9, "version 9"),
        (&|open| open.calls = 3, "power of two"),
        (&|open| open.calls = 4096, "power of two"),
        (&|open| open.rows_bytes = 100, "whole pages"),
        (&|open| open.rows_bytes = 1 << 60, "max-session-bytes"),
        (&|open| open.metadata = Vec::new().into(), "metadata"),
        // Bytes that are no metadata: the agent says so, or dies of them.
        (&|_| {}, ""),
        (&|open| open.rows_address = u64::MAX, ""),
    ];
    for (change, sentence) in mistakes {
        let (code, text) = wrong(change);
        assert!(code == Code::ResourceExhausted && text.contains(sentence), "{sentence}: {code}, {text}");
    }
    eventually(LOST, "nothing stays", || sessions(&service).is_empty() && agents(&service).is_empty());

    // One client has three quarters of the sessions at most; without credentials each connection is a client.
    let all: Vec<_> = (0..4).map(|_| open(&service)).collect();
    let error = try_open(&service).unwrap_err();
    assert!(matches!(&error, SessionError::Refused { reason } if reason.contains("max-sessions")), "{error}");
    drop(all);
    eventually(LOST, "sessions are closed", || sessions(&service).is_empty() && agents(&service).is_empty());
    let plain = Service::start(FAMILY, 1, &[]);
    let error = network::open(&plain.address, &options(1 << 20)).unwrap_err();
    assert!(error.to_string().contains("--network-listen"), "{error}");
}

/// A client that speaks the protocol by itself.
struct Client {
    endpoint: Endpoint,
    /// The session ends with it.
    _call: OpenCall,
}

/// A call that lasts as long as its session.
type OpenCall = (tokio::sync::mpsc::Sender<NetworkSessionRequest>, tonic::Streaming<NetworkSessionResponse>);

/// Asks for a session.
pub(super) fn open_call(
    runtime: &tokio::runtime::Runtime,
    service: &Service,
    open: OpenNetworkSession,
) -> Result<(OpenCall, NetworkSessionOpened), Status> {
    runtime.block_on(async {
        let channel = expertd_client::transport::connect(&service.address).await.unwrap();
        let (sender, receiver) = tokio::sync::mpsc::channel(2);
        sender.send(NetworkSessionRequest { open: Some(open) }).await.unwrap();
        let messages = tokio_stream::wrappers::ReceiverStream::new(receiver);
        let mut call = NetworkClient::new(channel).session(messages).await?.into_inner();
        match call.message().await?.unwrap().message.unwrap() {
            Message::Opened(opened) => Ok(((sender, call), opened)),
            Message::Ended(reason) => panic!("{reason}"),
        }
    })
}

impl Client {
    fn open(
        runtime: &tokio::runtime::Runtime,
        library: &std::sync::Arc<Library>,
        service: &Service,
    ) -> Client {
        let rows = SharedRegion::create("rows", ROWS).unwrap().slice(0, ROWS).unwrap();
        let transports =
            Transports { transports: Some("^sm".into()), device: Some("lo".into()), ..Transports::default() };
        let name = format!("hostile-{}", rand::random::<u64>());
        let mut endpoint = Endpoint::new(library, &name, &transports, rows).unwrap();
        let card = endpoint.card().unwrap();
        let open = OpenNetworkSession {
            version: VERSION,
            metadata: card.metadata.into(),
            rows_address: card.rows_address,
            rows_bytes: ROWS as u64,
            calls: 8,
        };
        let (call, opened) = open_call(runtime, service, open).unwrap();
        let agent = Card { metadata: opened.metadata.to_vec(), rows_address: opened.rows_address };
        endpoint.connect(&agent).unwrap();
        Client { endpoint, _call: call }
    }
}

/// Random notifications and writes from several clients; an honest one beside them gets right answers. Ten clients, or
/// `EXPERTD_NETWORK_CLIENTS`.
#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn clients_that_write_and_send_anything_harm_no_other() {
    let clients: u64 = std::env::var("EXPERTD_NETWORK_CLIENTS").map_or(10, |text| text.parse().unwrap());
    let service = start(FAMILY, 2, &[]);
    let runtime = runtime();
    let library = Library::open(Some(&library())).unwrap();
    let honest = open(&service);
    let mut rows = Rows::new(&golden(FAMILY), 8, 64);
    let layer = rows.layers()[0];
    for seed in 0..clients {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut client = Client::open(&runtime, &library, &service);
        for round in 0..200_u64 {
            let mut record = RequestRecord {
                call: round,
                rows: rng.random_range(0..ROWS as u64 / 64) * 64,
                output: rng.random_range(0..ROWS as u64 / 64) * 64,
                layer,
                tokens: rng.random_range(1..64),
                dtype: 3,
                ..RequestRecord::zeroed()
            };
            // Most are valid, so that the agent lives for a while; then bits flip.
            if rng.random_range(0..40) == 0 {
                let bytes = bytemuck::bytes_of_mut(&mut record);
                let at = rng.random_range(0..bytes.len());
                bytes[at] ^= 1 << rng.random_range(0..8);
            }
            let mut message = bytemuck::bytes_of(&Head { kind: 1, inline_bytes: 0 }).to_vec();
            message.extend_from_slice(bytemuck::bytes_of(&record));
            if rng.random_range(0..60) == 0 {
                message.truncate(rng.random_range(0..message.len()));
            }
            if rng.random_range(0..60) == 0 {
                rng.fill_bytes(&mut message);
            }
            let start = rng.random_range(0..ROWS / 2);
            let place = Place { start, bytes: rng.random_range(1..ROWS / 2) };
            if client.endpoint.send(&[place], &message).is_err() {
                break;
            }
            let polled = (0..50).try_for_each(|_| client.endpoint.poll(|_| Ok(())));
            if polled.is_err() {
                break;
            }
            if round % 8 == 0 {
                let (request, wanted) = rows.draw();
                check(&honest.forward(&request, LOST).unwrap(), &wanted, &request);
            }
        }
    }
    let (request, wanted) = rows.draw();
    check(&honest.forward(&request, LOST).unwrap(), &wanted, &request);
    eventually(LOST, "their sessions are gone", || {
        sessions(&service).len() == 1 && agents(&service).len() == 1
    });
}
