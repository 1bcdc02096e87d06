//! Limits on the number of connections.

/// Limits on the number of connections.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// All TCP connections.
    pub tcp: usize,
    /// TCP connections from one address (IPv6: from one /64 network).
    pub per_address: usize,
    /// Connections of one authenticated client.
    pub per_client: usize,
    /// Connections over Unix-domain sockets.
    pub unix: usize,
    /// TCP connections without valid credentials so far, if credentials are required.
    pub unauthenticated: usize,
    /// Sockets of refused and ended peers that are kept open for a second, so that they do not come back at once. Each takes
    /// one file descriptor.
    pub tarpit: usize,
}

impl ConnectionLimits {
    /// Default limits for `tcp` connections: half of them for one address or client, a quarter for unauthenticated ones, 256
    /// over Unix-domain sockets, and as many sockets in the tarpit.
    #[must_use]
    pub fn for_tcp(tcp: usize) -> ConnectionLimits {
        let tcp = tcp.max(1);
        ConnectionLimits {
            tcp,
            per_address: tcp.div_ceil(2),
            per_client: tcp.div_ceil(2),
            unix: 256,
            unauthenticated: tcp.div_ceil(4),
            tarpit: tcp,
        }
    }

    /// The same limits for fewer TCP connections, of which one address or client has half at most.
    #[must_use]
    pub fn with_tcp(self, tcp: usize) -> ConnectionLimits {
        if tcp >= self.tcp {
            return self;
        }
        let fewer = ConnectionLimits::for_tcp(tcp);
        ConnectionLimits {
            tcp: fewer.tcp,
            per_address: self.per_address.min(fewer.per_address),
            per_client: self.per_client.min(fewer.per_client),
            unauthenticated: self.unauthenticated.min(fewer.unauthenticated),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_connections_leave_room_for_other_addresses() {
        let limits = ConnectionLimits::for_tcp(1024);
        let fewer = limits.with_tcp(56);
        assert_eq!((fewer.tcp, fewer.per_address, fewer.per_client, fewer.unauthenticated), (56, 28, 28, 14));
        assert_eq!((fewer.unix, limits.with_tcp(2000).tcp), (256, 1024));
    }
}
