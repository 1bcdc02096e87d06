//! Tests of the status page and of the state that it reads.

use std::sync::Arc;

use expertd_core::backend::ServiceState;
use expertd_grpc::{Access, AccessConfig, MetricsPort};
use expertd_telemetry::install_recorder;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::backend::{Fake, limits};

async fn start() -> (Arc<Fake>, String) {
    let fake = Fake::new(8, limits(8, 32));
    let access = Arc::new(Access::load(&AccessConfig::default()).unwrap());
    let any = "127.0.0.1:0".parse().unwrap();
    // Probes must not fail because a thread of another test is late.
    let health_timeout = std::time::Duration::from_secs(600);
    let endpoint =
        MetricsPort::bind(any, install_recorder(""), fake.clone(), access, health_timeout).await.unwrap();
    let address = endpoint.local_address().to_string();
    tokio::spawn(endpoint.run());
    (fake, address)
}

/// Head and body of an answer.
async fn get(address: &str, host: &str, path: &str) -> (String, String) {
    let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_ascii_lowercase(), body.to_owned())
}

async fn state(address: &str) -> Value {
    let (head, body) = get(address, "localhost", "/status.json").await;
    assert!(head.starts_with("http/1.1 200") && head.contains("content-type: application/json"), "{head}");
    assert!(head.contains("cache-control: no-store"), "{head}");
    serde_json::from_str(&body).unwrap()
}

#[tokio::test]
async fn the_page_is_whole_and_runs_its_own_script_only() {
    let (_fake, address) = start().await;
    let (head, body) = get(&address, "localhost", "/").await;
    assert!(head.starts_with("http/1.1 200") && head.contains("content-type: text/html"), "{head}");
    let policy = head.lines().find(|line| line.starts_with("content-security-policy:")).unwrap();
    assert!(policy.contains("default-src 'none'") && policy.contains("script-src 'sha256-"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");
    assert!(head.contains("x-content-type-options: nosniff"), "{head}");
    assert!(body.starts_with("<!DOCTYPE html>") && body.trim_end().ends_with("</html>"));
}

#[tokio::test]
async fn the_state_says_what_the_service_does() {
    let (fake, address) = start().await;
    let found = state(&address).await;
    assert_eq!(found["state"], "serving");
    assert_eq!(found["model"]["name"], "fake");
    assert_eq!(found["model"]["hidden"], 8);
    assert_eq!(found["tokens_queued"], 3);
    let tier = serde_json::json!({
        "layers": [{ "layer": 1, "source": 1, "copied": 2, "cpu": 5 }],
        "copied_bytes": 9,
    });
    assert_eq!(found["tier"], tier);
    let rank = json!({
        "rank": 0, "device": "cpu", "state": "ready", "weight_bytes_loaded": 10, "weight_bytes_total": 20, "gpu": null,
    });
    assert_eq!(found["ranks"], json!([rank]), "no process ids");
    assert_eq!(found["sessions"], json!([]));
    assert!(found["model"]["layers"].as_array().is_some_and(|layers| !layers.is_empty()));
    let (head, body) = get(&address, "localhost", "/experts.json").await;
    assert!(head.starts_with("http/1.1 200"), "{head}");
    let layers = json!([{ "layer": 4, "rows": [3, 0, 7] }]);
    assert_eq!(serde_json::from_str::<Value>(&body).unwrap()["layers"], layers, "all ranks together");
    fake.set_state(ServiceState::Reforming);
    assert_eq!(state(&address).await["state"], "re-forming");
}

#[tokio::test]
async fn pages_of_other_sites_read_no_state() {
    let (_fake, address) = start().await;
    for host in [address.as_str(), "localhost:9464", "[::1]"] {
        for path in ["/", "/status.json", "/metrics"] {
            let (head, _) = get(&address, host, path).await;
            assert!(head.starts_with("http/1.1 200"), "{host} {path}: {head}");
        }
    }
    for path in ["/", "/status.json", "/experts.json", "/metrics"] {
        let (head, body) = get(&address, "rebound.example", path).await;
        assert!(head.starts_with("http/1.1 403"), "{path}: {head}");
        assert!(body.contains("--metrics-hosts") && body.lines().count() == 1, "{path}: {body}");
    }
    for probe in ["/healthz", "/readyz"] {
        let (head, _) = get(&address, "probed.example", probe).await;
        assert!(head.starts_with("http/1.1 200"), "{probe}: {head}");
    }
}
