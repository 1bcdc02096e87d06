//! Which network device has an address.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr::null_mut;

/// The name of the network device with the address `ip`, as UCX names it.
#[must_use]
pub fn device_of(ip: IpAddr) -> Option<String> {
    let ip = ip.to_canonical();
    addresses().into_iter().find(|(_, own)| *own == ip).map(|(name, _)| name)
}

/// The address of the device at which UCX listens: the first of the family of `ip`.
#[must_use]
pub fn listening_address(device: &str, ip: IpAddr) -> Option<IpAddr> {
    let is_taken = |own: &IpAddr| match own {
        IpAddr::V4(own) => !own.is_link_local(),
        IpAddr::V6(own) => !own.is_unicast_link_local(),
    };
    let own = addresses().into_iter().filter(|(name, _)| name == device).map(|(_, own)| own);
    own.filter(|own| own.is_ipv4() == ip.to_canonical().is_ipv4()).find(is_taken)
}

/// The devices of this host with their addresses.
#[allow(unsafe_code, reason = "walks the list of getifaddrs")]
fn addresses() -> Vec<(String, IpAddr)> {
    let mut found = Vec::new();
    let mut first: *mut libc::ifaddrs = null_mut();
    // SAFETY: the list lives until it is freed; an address has the type that its family says.
    unsafe {
        if libc::getifaddrs(&raw mut first) != 0 {
            return found;
        }
        let mut entry = first;
        while let Some(one) = entry.as_ref() {
            let ip = match one.ifa_addr.as_ref().map(|address| i32::from(address.sa_family)) {
                Some(libc::AF_INET) => {
                    let address = one.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    Some(IpAddr::from(Ipv4Addr::from_bits(u32::from_be(address.sin_addr.s_addr))))
                }
                Some(libc::AF_INET6) => {
                    let address = one.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                    Some(IpAddr::from(Ipv6Addr::from(address.sin6_addr.s6_addr)))
                }
                _ => None,
            };
            let name = CStr::from_ptr(one.ifa_name).to_string_lossy().into_owned();
            found.extend(ip.map(|ip| (name, ip.to_canonical())));
            entry = one.ifa_next;
        }
        libc::freeifaddrs(first);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_found_and_foreign_addresses_are_not() {
        assert_eq!(device_of(IpAddr::from([127, 0, 0, 1])).as_deref(), Some("lo"));
        assert_eq!(device_of(IpAddr::from([192, 0, 2, 77])), None);
        let any = IpAddr::from([10, 0, 0, 1]);
        assert_eq!(listening_address("lo", any), Some(IpAddr::from([127, 0, 0, 1])));
        assert_eq!(listening_address("no-device", any), None);
    }
}
