//! The names under which this host's own processes may read the metrics port.
//!
//! A page of another site can make a browser of this host send requests here under that site's name, once the name resolves to a loopback
//! address (DNS rebinding). To the browser the answers then belong to that site. The `Host` header tells such requests from others.

use http::uri::Authority;
use http::{HeaderMap, header};

use crate::access::Access;

/// The answer to requests under other names.
pub(super) const REFUSAL: &str = "this port answers requests of its own host under localhost or an address, and not under the name in the \
     Host header; allow a name with --metrics-hosts, or send `authorization: Bearer TOKEN`\n";

/// Whether a request names this host by an address, as `localhost`, or by a name that a setting gives it. Browsers always name a host.
pub(super) fn is_named(headers: &HeaderMap, access: &Access) -> bool {
    let Some(host) = headers.get(header::HOST) else { return true };
    let authority = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok());
    authority.is_some_and(|authority| {
        let host = authority.host();
        let address = host.trim_start_matches('[').trim_end_matches(']');
        host.eq_ignore_ascii_case("localhost")
            || address.parse::<std::net::IpAddr>().is_ok()
            || access.is_metrics_host(host)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use http::HeaderValue;

    use super::*;
    use crate::access::AccessConfig;

    #[test]
    fn only_addresses_localhost_and_given_names_name_this_host() {
        let config =
            AccessConfig { metrics_hosts: vec!["host.docker.internal".into()], ..AccessConfig::default() };
        let access = Access::load(&config).unwrap();
        let named = |host: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_static(host));
            is_named(&headers, &access)
        };
        for host in [
            "127.0.0.1:9400",
            "localhost",
            "LOCALHOST:1",
            "[::1]:9400",
            "10.0.0.7",
            "host.docker.internal:9464",
            "Host.Docker.Internal",
        ] {
            assert!(named(host), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9400",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "host.docker.internal.evil.example",
            "127.0.0.1@evil.example",
            "",
            "a b",
        ] {
            assert!(!named(host), "{host}");
        }
        assert!(is_named(&HeaderMap::new(), &access));
    }
}
