//! Several services used as one, with a network session with each.

use std::time::Duration;

use expertd_client::fleet::{FleetClient, FleetConfig, FleetError};
use expertd_client::network::NetworkOptions;
use rustix::process::Signal;

use super::{FAMILY, LOST, agents, library, options, start};
use crate::fleet::services_fail_one_after_the_other;
use crate::service::load::{Rows, check};
use crate::service::{Service, eventually, golden, send};

/// The agent of the client's session, which the calls before have opened.
fn agent(service: &Service) -> u32 {
    eventually(LOST, "the service has the client's session", || agents(service).len() == 1);
    agents(service)[0]
}

fn config() -> FleetConfig {
    FleetConfig { network: Some(options(4 << 20)), ..FleetConfig::default() }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
async fn no_call_fails_while_one_service_after_the_other_fails() {
    let library = library();
    let flags = ["--network-listen", "127.0.0.1", "--network-library", library.to_str().unwrap()];
    services_fail_one_after_the_other(config(), &flags, |services| {
        // A session was lost with its service, and another one is opened.
        for service in services {
            eventually(LOST, "each service has the client's session", || agents(service).len() == 1);
        }
    })
    .await;
}

/// The service lives, and its session breaks: calls are made again through the next one.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
async fn a_killed_agent_fails_no_call_and_a_stopped_one_no_longer_than_the_deadline() {
    let service = start(FAMILY, 1, &[]);
    let client = FleetClient::connect(&service.address, config()).await.unwrap();
    let mut rows = Rows::new(&golden(FAMILY), 5, 48);
    for round in 0..60 {
        let (request, wanted) = rows.draw();
        check(&client.forward(request.clone(), Some(LOST)).await.unwrap(), &wanted, &request);
        if round % 20 == 10 {
            send(agent(&service), Signal::KILL);
        }
    }
    let (request, wanted) = rows.draw();
    let stopped = agent(&service);
    send(stopped, Signal::STOP);
    let begun = std::time::Instant::now();
    let status = client.forward(request.clone(), Some(Duration::from_secs(1))).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::DeadlineExceeded, "{status:?}");
    assert!(begun.elapsed() < LOST, "a call outlives its deadline");
    send(stopped, Signal::CONT);
    check(&client.forward(request.clone(), Some(LOST)).await.unwrap(), &wanted, &request);
    drop(client);
    eventually(LOST, "the session ends with the client", || agents(&service).is_empty());
}

/// Calls that no session takes go over gRPC: larger ones than a session has room for, and all to services without network sessions.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
async fn calls_that_no_session_takes_go_over_grpc() {
    let mut rows = Rows::new(&golden(FAMILY), 6, 8);
    let (large, wanted) = rows.draw_of(rows.layers()[0], 600);
    for service in [start(FAMILY, 1, &[]), crate::service::Service::start(FAMILY, 1, &[])] {
        let config = FleetConfig { network: Some(options(64 << 10)), ..FleetConfig::default() };
        let client = FleetClient::connect(&service.address, config).await.unwrap();
        check(&client.forward(large.clone(), Some(LOST)).await.unwrap(), &wanted, &large);
        let (small, wanted) = rows.draw();
        check(&client.forward(small.clone(), Some(LOST)).await.unwrap(), &wanted, &small);
    }
    let nowhere = NetworkOptions { library: Some("/nowhere".into()), ..options(1 << 20) };
    let config = FleetConfig { network: Some(nowhere), ..FleetConfig::default() };
    let error = FleetClient::connect("127.0.0.1:1", config).await.unwrap_err();
    assert!(matches!(&error, FleetError::Network(text) if text.contains("pip install")), "{error}");
}
