//! What operators see of sessions, and sessions that stay open while weights are reloaded.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use expertd_client::session::SessionError;
use expertd_proto::v1::SessionStatus;
use expertd_session::socket;

use super::{FAMILY, Host, LOST, Load, runtime};
use crate::reload::reload_to;
use crate::service::load::{Rows, check};
use crate::service::{eventually, fixture, golden};

/// The values of a metric, with their labels.
fn metric(host: &Host, name: &str) -> Vec<(String, f64)> {
    let address = host.service.metrics.trim_start_matches("http://").trim_end_matches("/metrics");
    let mut socket = TcpStream::connect(address).unwrap();
    socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    let samples = text.lines().filter_map(|line| line.strip_prefix(name)?.rsplit_once(' '));
    let samples = samples.filter(|(labels, _)| labels.is_empty() || labels.starts_with('{'));
    samples.map(|(labels, value)| (labels.to_owned(), value.parse().unwrap())).collect()
}

/// The sum of a metric's values whose labels contain `label`.
pub(super) fn value(host: &Host, name: &str, label: &str) -> f64 {
    let all = metric(host, name);
    assert!(!all.is_empty(), "no {name}");
    all.iter().filter(|(labels, _)| labels.contains(label)).map(|(_, value)| value).sum()
}

#[test]
fn operators_see_sessions_and_their_calls() {
    let runtime = runtime();
    let host = Host::start(FAMILY, 2, &[]);
    assert_eq!(value(&host, "expertd_sessions", ""), 0.0);
    let (busy, idle) = (host.open(), host.open());
    let mut rows = Rows::new(&golden(FAMILY), 12, 8);
    let layer = rows.layers()[0];
    for tokens in [1, 5, 8] {
        let (request, wanted) = rows.draw_of(layer, tokens);
        check(&busy.forward(&request, LOST).unwrap(), &wanted, &request);
    }
    let (mut unknown, _) = rows.draw_of(layer, 3);
    unknown.layer = 9999;
    assert!(matches!(busy.forward(&unknown, LOST), Err(SessionError::Status { code: 5, .. })));
    let refused = UnixStream::connect(host.path()).unwrap();
    socket::send(&refused, 77, &[]).unwrap();
    assert!(socket::receive(&refused, 4096).unwrap().is_some());

    host.in_place(&runtime);
    let in_flight =
        || host.status(&runtime).sessions.iter().map(|session| session.calls_in_flight).sum::<u64>();
    eventually(LOST, "no call is in flight", || in_flight() == 0);
    let seen = host.status(&runtime).sessions;
    let own = rustix::process::geteuid().as_raw();
    let counts = |session: &SessionStatus| (session.calls_total, session.rows_total, session.calls_in_flight);
    assert_eq!(
        seen.iter().map(counts).collect::<Vec<_>>(),
        [(4, 14, 0), (0, 0, 0)],
        "rows of answered calls"
    );
    assert!(seen.iter().all(|session| session.pid == std::process::id() && session.in_place));
    assert!(seen.iter().all(|session| session.user == own));
    assert_eq!(seen[1].session, idle.session().number());

    // The router and two ranks map each region.
    let bytes: u64 = seen.iter().map(|session| session.bytes).sum();
    // A client may have its answer a moment before it is counted.
    for (name, label, wanted) in [
        ("expertd_session_bytes", "", 3.0 * bytes as f64),
        ("expertd_sessions", "", 2.0),
        ("expertd_sessions_opened_total", "", 2.0),
        ("expertd_sessions_refused_total", "protocol", 1.0),
    ] {
        eventually(LOST, &format!("{name} is {wanted}"), || value(&host, name, label) == wanted);
    }
    let calls = |code: &str| {
        let all = metric(&host, "expertd_requests_total");
        let of_sessions = all.iter().filter(|(labels, _)| labels.contains("method=\"Session\""));
        let of_code = of_sessions.filter(|(labels, _)| labels.contains(&format!("code=\"{code}\"")));
        of_code.map(|(_, value)| value).sum::<f64>()
    };
    eventually(LOST, "calls are counted", || (calls("OK"), calls("NOT_FOUND")) == (3.0, 1.0));
    eventually(LOST, "the times of calls are counted", || {
        value(&host, "expertd_request_duration_seconds_count", "method=\"Session\"") == 4.0
    });

    drop((busy, idle));
    eventually(LOST, "the sessions are gone", || {
        value(&host, "expertd_sessions", "") + value(&host, "expertd_session_bytes", "") == 0.0
    });
    assert!(host.status(&runtime).sessions.is_empty());
    // Nothing is counted a second time, now that all is over.
    assert_eq!((calls("OK"), calls("NOT_FOUND")), (3.0, 1.0));
    for (name, label, wanted) in [
        ("expertd_sessions_opened_total", "", 2.0),
        ("expertd_sessions_refused_total", "", 1.0),
        ("expertd_request_duration_seconds_count", "method=\"Session\"", 4.0),
    ] {
        assert_eq!(value(&host, name, label), wanted, "{name}");
    }
}

#[test]
fn open_sessions_go_on_through_reloads() {
    let runtime = runtime();
    let host = Host::start(FAMILY, 2, &[]);
    let load = Load::start(&host, 64);
    let open = || host.status(&runtime).sessions.iter().map(|session| session.session).collect::<Vec<_>>();
    load.goes_on();
    let before = open();
    for _ in 0..3 {
        let generation = host.status(&runtime).generation;
        runtime.block_on(reload_to(&host.service, &fixture(FAMILY))).unwrap();
        assert!(host.status(&runtime).generation > generation, "a reload forms a generation");
        load.goes_on();
        // Its ranks have attached the memories that clients opened before.
        host.in_place(&runtime);
        load.goes_on();
    }
    assert_eq!(open(), before, "the same sessions are open");
    assert!(load.stop().iter().max() >= Some(&4));
}
