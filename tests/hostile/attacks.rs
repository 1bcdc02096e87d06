//! One test per attack. Attackers reconnect as soon as the service closes their connections.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::net::TcpStream;

use crate::attack::{Doing, greet, run, take, windows};
use crate::frames::*;
use crate::harness::{FORWARD, FORWARD_STREAM, prefix};

const HEALTH: &str = "/grpc.health.v1.Health/Check";

/// Sends the same bytes again and again.
fn flood<'a>(socket: &'a mut TcpStream, over: &'a AtomicBool, bytes: Vec<u8>) -> Doing<'a> {
    Box::pin(async move {
        if !greet(socket, &[]).await {
            return;
        }
        let bytes = bytes.repeat(200);
        while !over.load(Ordering::Relaxed) {
            if !send(socket, &bytes).await || !take(socket, Duration::from_millis(1)).await {
                return;
            }
        }
    })
}

/// Begins calls, sends a part of a message on each, and then sends nothing.
fn half_sent<'a>(
    socket: &'a mut TcpStream,
    over: &'a AtomicBool,
    path: &'static str,
    announced: usize,
    sent: usize,
) -> Doing<'a> {
    Box::pin(async move {
        if !greet(socket, &[]).await {
            return;
        }
        for stream in (0..32).map(|call| 2 * call + 1) {
            let part = [&prefix(announced)[..], &vec![7u8; sent][..]].concat();
            let bytes = [call(stream, path, &[]), frame(DATA, 0, stream, &part)].concat();
            if !send(socket, &bytes).await {
                return;
            }
        }
        while !over.load(Ordering::Relaxed) && take(socket, Duration::from_millis(100)).await {}
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn prefixes_alone() {
    run("prefix only", |socket, over| half_sent(socket, over, FORWARD, 200_000, 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_never_end() {
    run("half a message", |socket, over| half_sent(socket, over, FORWARD_STREAM, 200_000, 15_000)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn half_sent_health_checks() {
    run("half a health check of 4 MiB", |socket, over| half_sent(socket, over, HEALTH, 4 << 20, 15_000))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn floods_of_settings() {
    run("SETTINGS", |socket, over| flood(socket, over, frame(SETTINGS, 0, 0, &[]))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn floods_of_pings() {
    run("PING", |socket, over| flood(socket, over, frame(PING, 0, 0, &[1; 8]))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn floods_of_window_updates() {
    run("WINDOW_UPDATE", |socket, over| flood(socket, over, frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn floods_of_resets() {
    run("RST_STREAM", |socket, over| {
        Box::pin(async move {
            if !greet(socket, &[]).await {
                return;
            }
            let mut stream = 1;
            while !over.load(Ordering::Relaxed) {
                let mut bytes = Vec::new();
                for _ in 0..50 {
                    bytes.extend(call(stream, FORWARD, &[]));
                    bytes.extend(frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]));
                    stream += 2;
                }
                if !send(socket, &bytes).await || !take(socket, Duration::from_millis(1)).await {
                    return;
                }
            }
        })
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn floods_of_continuations() {
    run("CONTINUATION", |socket, over| {
        Box::pin(async move {
            if !greet(socket, &[]).await || !send(socket, &frame(HEADERS, 0, 1, &[])).await {
                return;
            }
            let bytes = frame(CONTINUATION, 0, 1, &[]).repeat(200);
            while !over.load(Ordering::Relaxed) {
                if !send(socket, &bytes).await || !take(socket, Duration::from_millis(1)).await {
                    return;
                }
            }
        })
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn minted_headers() {
    run("minted headers", |socket, over| {
        Box::pin(async move {
            if !greet(socket, &[]).await {
                return;
            }
            for stream in (0u32..).map(|call| 2 * call + 1) {
                let token = format!("Bearer {stream}-{}", "x".repeat(8000));
                let bytes = call(stream, FORWARD, &[("authorization", &token), ("x-minted", &token)]);
                let reset = frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]);
                if over.load(Ordering::Relaxed)
                    || !send(socket, &[bytes, reset].concat()).await
                    || !take(socket, Duration::from_millis(5)).await
                {
                    return;
                }
            }
        })
    })
    .await;
}

/// Streams whose answers are not read, so that the service does not read their requests, and as many bytes of requests as windows allow.
#[tokio::test(flavor = "multi_thread")]
async fn unread_requests() {
    run("unread requests", |socket, over| {
        Box::pin(async move {
            if !greet(socket, &[(4, 0)]).await {
                return;
            }
            let (of_stream, of_connection) = windows(socket, Duration::from_millis(500)).await;
            let each = of_stream.min(of_connection / 4) - 5;
            for stream in (0..4).map(|call| 2 * call + 1) {
                let begun = [call(stream, FORWARD_STREAM, &[]), frame(DATA, 0, stream, &prefix(0))].concat();
                if !send(socket, &begun).await {
                    return;
                }
                for part in vec![7u8; each].chunks(16 << 10) {
                    if !send(socket, &frame(DATA, 0, stream, part)).await {
                        return;
                    }
                }
            }
            while !over.load(Ordering::Relaxed) && take(socket, Duration::from_millis(100)).await {}
        })
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unread_answers() {
    run("unread answers", |socket, over| {
        Box::pin(async move {
            // SETTINGS_INITIAL_WINDOW_SIZE = 0 keeps the service from sending any answer.
            if !greet(socket, &[(4, 0)]).await {
                return;
            }
            for stream in (0..32).map(|call| 2 * call + 1) {
                let bytes =
                    [call(stream, "/expertd.v1.Moe/GetModel", &[]), frame(DATA, 1, stream, &prefix(0))]
                        .concat();
                if !send(socket, &bytes).await {
                    return;
                }
            }
            while !over.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_do_nothing() {
    run("idle", |socket, over| {
        Box::pin(async move {
            if greet(socket, &[]).await {
                while !over.load(Ordering::Relaxed) && take(socket, Duration::from_millis(100)).await {}
            }
        })
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_a_byte_at_a_time() {
    run("slow", |socket, over| {
        Box::pin(async move {
            let begin = [call(1, FORWARD, &[]), frame(DATA, 0, 1, &prefix(200_000))].concat();
            if !greet(socket, &[]).await || !send(socket, &begin).await {
                return;
            }
            while !over.load(Ordering::Relaxed) {
                if !send(socket, &frame(DATA, 0, 1, b"x")).await
                    || !take(socket, Duration::from_millis(5)).await
                {
                    return;
                }
            }
        })
    })
    .await;
}
