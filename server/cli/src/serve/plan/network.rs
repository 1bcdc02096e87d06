//! Settings of network sessions.

use std::net::IpAddr;

use super::PlanError;
use super::values::value;
use crate::serve::settings::Given;
use expertd_network::{Transports, VARIABLE, device_of, listening_address};
use expertd_sessions::NetworkConfig;

/// The configuration of network sessions, if there are to be any. `insecure` permits addresses beyond loopback.
pub(super) fn config(given: &Given, insecure: bool) -> Result<Option<NetworkConfig>, PlanError> {
    let Some(text) = &given.network_listen.0 else { return Ok(None) };
    let wrong = |problem: String| value("network-listen", format!("`{text}` {problem}"));
    let (ip, ports) = parse(text).ok_or_else(|| {
        wrong("is not IP, IP:PORT or IP:FIRST-LAST; use the address of a network device, e.g. 10.0.0.5:18500-18563".to_owned())
    })?;
    if !ip.to_canonical().is_loopback() && !insecure {
        return Err(wrong(
            "can be reached from other hosts, and rows of network sessions are neither encrypted nor authenticated, whatever TLS and \
             tokens there are; pass --insecure if a network policy keeps everyone but the clients away"
                .to_owned(),
        ));
    }
    let device = if ip.is_unspecified() {
        None
    } else {
        Some(
            device_of(ip)
                .ok_or_else(|| wrong("is not an address of a network device of this host".to_owned()))?,
        )
    };
    if let Some(first) = device.as_deref().and_then(|device| listening_address(device, ip))
        && first != ip.to_canonical()
    {
        return Err(wrong(format!(
            "is not the first address of its device, at which UCX listens; use {first}"
        )));
    }
    // Memory that processes of one host share belongs to host sessions.
    let transports = Some("^sm".to_owned());
    let transports = Transports { transports, device, ports, ipv6: ip.to_canonical().is_ipv6() };
    let library = given.network_library.0.clone();
    Ok(Some(NetworkConfig {
        transports,
        library: library.or_else(|| std::env::var_os(VARIABLE).map(Into::into)),
    }))
}

/// Parses `IP`, `IP:PORT` or `IP:FIRST-LAST`; addresses of IPv6 with ports stand in brackets.
fn parse(text: &str) -> Option<(IpAddr, Option<(u16, u16)>)> {
    if let Ok(ip) = text.trim_start_matches('[').trim_end_matches(']').parse() {
        return Some((ip, None));
    }
    let (ip, ports) = text.rsplit_once(':')?;
    let ip = ip.trim_start_matches('[').trim_end_matches(']').parse().ok()?;
    let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
    let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
    let ports = match (first, last) {
        (0, 0) => None,
        (1.., last) if last >= first => Some((first, last)),
        _ => return None,
    };
    Some((ip, ports))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::serve::settings::ServeArgs;

    fn of(listen: &str, insecure: bool) -> Result<Option<NetworkConfig>, String> {
        let args = ServeArgs { network_listen: Some(listen.into()), ..ServeArgs::default() };
        config(&Given::merge(&args, None).unwrap(), insecure).map_err(|error| error.to_string())
    }

    #[test]
    fn addresses_and_ports_are_understood() {
        assert_eq!(config(&Given::merge(&ServeArgs::default(), None).unwrap(), false).unwrap(), None);
        let transports = |listen| of(listen, true).unwrap().unwrap().transports;
        assert_eq!(transports("127.0.0.1").device.as_deref(), Some("lo"));
        assert_eq!(transports("127.0.0.1:0").ports, None);
        assert_eq!(transports("127.0.0.1:18500-18563").ports, Some((18500, 18563)));
        assert_eq!(["[::1]", "127.0.0.1"].map(|listen| transports(listen).ipv6), [true, false]);
        assert_eq!((transports("0.0.0.0").device, transports("[::]:7").ports), (None, Some((7, 7))));
        for wrong in ["", "localhost", "127.0.0.1:9-8", "127.0.0.1:0-8", "127.0.0.1:70000", "127.0.0.1:"] {
            assert!(of(wrong, true).unwrap_err().contains("IP:FIRST-LAST"), "{wrong}");
        }
        assert!(of("192.0.2.7", true).unwrap_err().contains("is not an address of a network device"));
    }

    #[test]
    fn other_hosts_need_permission() {
        for open in ["0.0.0.0:18500", "192.0.2.7"] {
            let refused = of(open, false).unwrap_err();
            assert!(refused.starts_with("network-listen: ") && refused.contains("--insecure"), "{refused}");
        }
        assert!(of("127.0.0.1", false).is_ok());
    }
}
