//! Tests of access rules.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use expertd_core::failure::Code;

use super::*;

const TOKEN: &str = "engine-token-0123456789";
const ADMIN: &str = "admin-token-0123456789";

fn headers(token: Option<&str>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Some(token) = token {
        headers.insert("authorization", token.parse().unwrap());
    }
    headers
}

fn with_tokens(folder: &Path) -> AccessConfig {
    fs::write(folder.join("tokens"), format!("engine {TOKEN}\n")).unwrap();
    fs::write(folder.join("admin"), format!("operator {ADMIN}\n")).unwrap();
    AccessConfig {
        token_file: Some(folder.join("tokens")),
        admin_token_file: Some(folder.join("admin")),
        ..AccessConfig::default()
    }
}

fn code<T: std::fmt::Debug>(result: Result<T, Failure>) -> Code {
    result.unwrap_err().code()
}

#[test]
fn without_credentials_configured_all_may_call_and_only_the_own_user_operates() {
    let access = Access::load(&AccessConfig::default()).unwrap();
    assert!(!access.required());
    assert_eq!(access.client(&headers(None), &Peer::Unknown).unwrap(), None);
    assert_eq!(access.client(&headers(Some("Basic x")), &Peer::Unknown).unwrap(), None, "not looked at");
    let own = rustix::process::geteuid().as_raw();
    assert_eq!(*access.admin(&headers(None), &Peer::User(own)).unwrap(), *format!("uid:{own}"));
    assert!(access.admin(&headers(None), &Peer::User(0)).is_ok());
    assert_eq!(code(access.admin(&headers(None), &Peer::User(own + 77))), Code::PermissionDenied);
    assert_eq!(code(access.admin(&headers(None), &Peer::Unknown)), Code::Unauthenticated);
}

#[test]
fn tokens_let_in_and_name() {
    let folder = tempfile::tempdir().unwrap();
    let access = Access::load(&with_tokens(folder.path())).unwrap();
    assert!(access.required());
    let bearer = |token: &str| headers(Some(&format!("Bearer {token}")));
    assert_eq!(access.client(&bearer(TOKEN), &Peer::Unknown).unwrap().as_deref(), Some("engine"));
    assert_eq!(
        access.client(&headers(Some(&format!("bearer {TOKEN}"))), &Peer::Unknown).unwrap().as_deref(),
        Some("engine")
    );
    for wrong in [headers(None), bearer("no-such-token-0123"), headers(Some("Basic abc")), bearer("")] {
        assert_eq!(code(access.client(&wrong, &Peer::Unknown)), Code::Unauthenticated);
    }
    assert_eq!(access.client(&headers(None), &Peer::User(5)).unwrap().as_deref(), Some("uid:5"));

    assert_eq!(access.admin(&bearer(ADMIN), &Peer::Unknown).unwrap().as_ref(), "operator");
    assert_eq!(code(access.admin(&bearer(TOKEN), &Peer::Unknown)), Code::PermissionDenied);
    assert_eq!(code(access.admin(&bearer("no-such-token-0123"), &Peer::Unknown)), Code::Unauthenticated);
    assert!(access.may_scrape(&bearer(ADMIN)) && access.may_scrape(&bearer(TOKEN)));
    assert!(!access.may_scrape(&headers(None)));
}

#[test]
fn certificates_name_and_some_may_not_call() {
    let folder = tempfile::tempdir().unwrap();
    let mut access = Access::load(&with_tokens(folder.path())).unwrap();
    let call = |access: &Access, names: &[&str]| {
        let peer = access.certificate_peer(names.iter().map(|&name| name.to_owned()).collect());
        access.client(&headers(None), &peer)
    };
    assert_eq!(call(&access, &["a.example", "b"]).unwrap().as_deref(), Some("a.example"));
    assert_eq!(call(&access, &[]).unwrap().as_deref(), Some("certificate"));
    access.client_names = vec!["b.example".to_owned()];
    assert_eq!(call(&access, &["a.example", "b.example"]).unwrap().as_deref(), Some("b.example"));
    assert_eq!(code(call(&access, &["a.example"])), Code::PermissionDenied);
}

#[test]
fn settings_and_files_that_cannot_be_used_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| Some(folder.path().join(name));
    fs::write(folder.path().join("empty"), "").unwrap();
    for (config, word) in [
        (AccessConfig { tls_cert: path("c"), ..AccessConfig::default() }, "--tls-key"),
        (AccessConfig { tls_client_ca: path("c"), ..AccessConfig::default() }, "needs --tls-cert"),
        (AccessConfig { tls_client_names: vec!["a".into()], ..AccessConfig::default() }, "--tls-client-ca"),
        (AccessConfig { token_file: path("missing"), ..AccessConfig::default() }, "missing"),
        (AccessConfig { token_file: path("empty"), ..AccessConfig::default() }, "no token"),
        (
            AccessConfig { tls_cert: path("empty"), tls_key: path("empty"), ..AccessConfig::default() },
            "expected certificates in PEM",
        ),
    ] {
        let error = Access::load(&config).err().unwrap().to_string();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn changed_tokens_are_taken_and_broken_ones_leave_the_earlier_in_force() {
    let folder = tempfile::tempdir().unwrap();
    let access = Access::load(&with_tokens(folder.path())).unwrap();
    let works = |token: &str| {
        access.tokens.as_ref().unwrap().refresh();
        access.client(&headers(Some(&format!("Bearer {token}"))), &Peer::Unknown).is_ok()
    };
    assert!(works(TOKEN));
    fs::write(folder.path().join("tokens"), "engine another-token-0123456789\n").unwrap();
    assert!(works("another-token-0123456789") && !works(TOKEN));
    fs::write(folder.path().join("tokens"), "engine\n").unwrap();
    assert!(works("another-token-0123456789"));
    fs::remove_file(folder.path().join("tokens")).unwrap();
    assert!(works("another-token-0123456789"));
    fs::write(folder.path().join("tokens"), format!("engine {TOKEN}\n")).unwrap();
    assert!(works(TOKEN));
}

#[test]
fn the_metric_has_the_date_of_the_certificate_in_force() {
    let folder = tempfile::tempdir().unwrap();
    let (cert, key) = (folder.path().join("server.pem"), folder.path().join("server.key"));
    let sign = |year| {
        let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let pair = rcgen::KeyPair::generate().unwrap();
        fs::write(&cert, params.self_signed(&pair).unwrap().pem()).unwrap();
        fs::write(&key, pair.serialize_pem()).unwrap();
    };
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    metrics::with_local_recorder(&recorder, || {
        Access::load(&AccessConfig::default()).unwrap().record_expiry();
        assert!(!handle.render().contains("expertd_certificate"), "no TLS");
        sign(2027);
        let config = AccessConfig {
            tls_cert: Some(cert.clone()),
            tls_key: Some(key.clone()),
            ..AccessConfig::default()
        };
        let access = Access::load(&config).unwrap();
        for (year, seconds) in [(2027, 1_798_761_600_u64), (2028, 1_830_297_600)] {
            sign(year);
            access.tls.as_ref().unwrap().refresh();
            access.record_expiry();
            let shown = handle.render();
            assert!(
                shown.contains(&format!("expertd_certificate_expires_seconds {seconds}\n")),
                "{year}: {shown}"
            );
        }
    });
}
