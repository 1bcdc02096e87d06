//! Tests of `credentials`.

#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn tokens_are_read_and_not_shown() {
    let path = std::env::temp_dir().join(format!("expertd-token-{}", std::process::id()));
    let credentials = Credentials { token_file: Some(path.clone()), ..Credentials::default() };
    for (text, token) in [("abc\n", Some("Bearer abc")), ("# x\nme abc", Some("Bearer abc")), ("", None)] {
        std::fs::write(&path, text).unwrap();
        let header = credentials.authorization("localhost:1").ok().flatten();
        assert_eq!(header.as_ref().map(|header| header.to_str().unwrap()), token);
        assert!(!format!("{header:?}").contains("abc"));
    }
    std::fs::remove_file(&path).unwrap();
    let error = credentials.authorization("localhost:1").unwrap_err().to_string();
    assert!(error.contains("expertd-token-"), "{error}");
}

#[test]
fn a_token_is_not_sent_unencrypted_to_another_host() {
    let path = std::env::temp_dir().join(format!("expertd-secret-{}", std::process::id()));
    std::fs::write(&path, "abc").unwrap();
    let credentials = Credentials { token_file: Some(path.clone()), ..Credentials::default() };
    let trusting = Credentials { insecure: true, ..credentials.clone() };
    let encrypted = Credentials { ca: Some("ca.pem".into()), ..credentials.clone() };
    let remote = [
        "192.0.2.2:1",
        "http://192.0.2.2:1",
        "a.example:1",
        "localhost.example:1",
        "[2001:db8::1]:1",
        "me@h:1",
    ];
    for address in remote {
        let error = credentials.authorization(address).unwrap_err().to_string();
        assert!(error.contains("--insecure") && error.contains(address), "{error}");
        assert!(trusting.authorization(address).unwrap().is_some());
        assert!(encrypted.authorization(address).unwrap().is_some());
    }
    for address in
        ["127.0.0.1:1", "http://127.1.2.3:1/", "localhost:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "unix:/x"]
    {
        assert!(credentials.authorization(address).unwrap().is_some(), "{address}");
    }
    let anonymous = Credentials { token_file: None, ..credentials };
    assert!(anonymous.authorization("192.0.2.2:1").unwrap().is_none());
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn tls_without_an_authority_says_what_is_missing() {
    let error = Credentials::default().apply("https://host:1").unwrap_err().to_string();
    assert!(error.contains("--tls-ca"), "{error}");
    let lone = Credentials { cert: Some("c".into()), ..Credentials::default() };
    assert!(lone.apply("host:1").unwrap_err().to_string().contains("--tls-ca"));
}

#[test]
fn a_host_without_a_port_is_refused() {
    let ca = std::env::temp_dir().join(format!("expertd-port-{}", std::process::id()));
    std::fs::write(&ca, "-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----\n").unwrap();
    for credentials in
        [Credentials::default(), Credentials { ca: Some(ca.clone()), ..Credentials::default() }]
    {
        for address in ["localhost", "10.0.0.1", "[::1]", "a.example"] {
            let error = credentials.apply(address).unwrap_err().to_string();
            assert!(error.contains("port is missing") && error.contains(address), "{error}");
        }
        for address in ["localhost:1", "[::1]:1", "http://localhost", "unix:/x", "unix:x"] {
            let error = credentials.apply(address).err().map(|error| error.to_string());
            assert!(!error.is_some_and(|error| error.contains("port")), "{address}");
        }
    }
    std::fs::remove_file(&ca).unwrap();
}

#[test]
fn a_file_without_certificates_is_named() {
    let path = std::env::temp_dir().join(format!("expertd-authority-{}", std::process::id()));
    let credentials = Credentials { ca: Some(path.clone()), ..Credentials::default() };
    for text in ["", "{}", "-----BEGIN PRIVATE KEY-----\nMA==\n-----END PRIVATE KEY-----\n"] {
        std::fs::write(&path, text).unwrap();
        let error = credentials.apply("host:1").unwrap_err().to_string();
        assert!(error.contains("expertd-authority-") && error.contains("`CERTIFICATE`"), "{error}");
    }
    std::fs::remove_file(&path).unwrap();
}
