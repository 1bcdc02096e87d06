//! Limits on the number of connections: in all, and for each address, user of this host and client.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use expertd_telemetry::names;
use metrics::counter;

use crate::bytes::budget::Owner;

/// Number of owners without connections that are kept before they are removed.
const STALE_OWNERS: usize = 256;

/// Reasons why the service refuses or ends connections. The last six stay at 0: no
/// connection ends for them any more.
const ENDS: [&str; 15] = [
    "limit",
    "address_limit",
    "client_limit",
    "tls",
    "silent",
    "unauthenticated",
    "stalled_answer",
    "idle",
    "age",
    "unauthenticated_limit",
    "evicted",
    "stalled_request",
    "stalled_write",
    "unread",
    "flood",
];

/// Counts a connection that the service refused or ended.
pub(super) fn count_end(reason: &'static str) {
    counter!(names::CONNECTIONS_ENDED_TOTAL, "reason" => reason).increment(1);
}

/// Limits on the number of connections.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// All TCP connections.
    pub tcp: usize,
    /// TCP connections from one address (IPv6: from one /64 network).
    pub per_address: usize,
    /// Connections of one authenticated client.
    pub per_client: usize,
    /// Connections over Unix-domain sockets; one user has half of them at most.
    pub unix: usize,
}

impl ConnectionLimits {
    /// The limits for `tcp` connections, half of them for one address or client, and for 256 over Unix-domain sockets.
    #[must_use]
    pub fn for_tcp(tcp: usize) -> ConnectionLimits {
        let tcp = tcp.max(1);
        ConnectionLimits { tcp, per_address: tcp.div_ceil(2), per_client: tcp.div_ceil(2), unix: 256 }
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
            ..self
        }
    }
}

/// Origin of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Origin {
    /// An IP address. The lower half of an IPv6 address, which a host may choose freely, is cleared.
    Address(IpAddr),
    /// A user of this host.
    User(u32),
}

impl Origin {
    pub(crate) fn address(address: IpAddr) -> Origin {
        Origin::Address(match address.to_canonical() {
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                IpAddr::from([a, b, c, d, 0, 0, 0, 0])
            }
            address => address,
        })
    }
}

/// Whose connections are counted together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum OwnerKey {
    Origin(Origin),
    Client(Arc<str>),
}

/// The places for connections of one kind of listener.
pub(crate) struct ConnectionPlaces {
    limits: ConnectionLimits,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    tcp: usize,
    unix: usize,
    owners: HashMap<OwnerKey, Weak<Owner>>,
}

impl Taken {
    fn owner(&mut self, key: OwnerKey) -> Arc<Owner> {
        if let Some(owner) = self.owners.get(&key).and_then(Weak::upgrade) {
            return owner;
        }
        if self.owners.len() > 2 * (self.tcp + self.unix) + STALE_OWNERS {
            self.owners.retain(|_, owner| owner.strong_count() > 0);
        }
        let owner: Arc<Owner> = Arc::default();
        self.owners.insert(key, Arc::downgrade(&owner));
        owner
    }

    fn of(&mut self, origin: Origin) -> &mut usize {
        match origin {
            Origin::Address(_) => &mut self.tcp,
            Origin::User(_) => &mut self.unix,
        }
    }
}

impl ConnectionPlaces {
    pub(crate) fn new(limits: ConnectionLimits) -> Arc<ConnectionPlaces> {
        // Counters start at 0, so that a rate includes the first increment.
        for reason in ENDS {
            counter!(names::CONNECTIONS_ENDED_TOTAL, "reason" => reason).increment(0);
        }
        Arc::new(ConnectionPlaces { limits, taken: Mutex::default() })
    }

    /// Takes a place for a connection. `Err` holds the limit that was reached.
    pub(crate) fn take(self: &Arc<Self>, origin: Origin) -> Result<ConnectionPlace, &'static str> {
        let (all, own, reason) = match origin {
            Origin::Address(_) => (self.limits.tcp, self.limits.per_address, "address_limit"),
            Origin::User(_) => (self.limits.unix, self.limits.unix.div_ceil(2), "address_limit"),
        };
        let mut taken = self.locked();
        if *taken.of(origin) >= all {
            return Err("limit");
        }
        let owner = taken.owner(OwnerKey::Origin(origin));
        if !enter(&owner, own) {
            return Err(reason);
        }
        *taken.of(origin) += 1;
        Ok(ConnectionPlace { places: Arc::clone(self), origin, owner: Seat(owner) })
    }

    /// Counts a connection for a client until the seat is dropped; `Err` holds the limit if it is reached.
    pub(crate) fn join(&self, client: &Arc<str>) -> Result<Seat, usize> {
        let mut taken = self.locked();
        let owner = taken.owner(OwnerKey::Client(Arc::clone(client)));
        if enter(&owner, self.limits.per_client) { Ok(Seat(owner)) } else { Err(self.limits.per_client) }
    }

    fn locked(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a connection of `owner` unless it has `limit`. The places are locked.
fn enter(owner: &Owner, limit: usize) -> bool {
    let has_place = owner.connections.load(Ordering::Relaxed) < limit;
    if has_place {
        owner.connections.fetch_add(1, Ordering::Relaxed);
    }
    has_place
}

/// One connection of an owner.
pub(crate) struct Seat(Arc<Owner>);

impl Seat {
    /// The owner, which calls are charged to.
    pub(crate) const fn owner(&self) -> &Arc<Owner> {
        &self.0
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The place of a connection.
pub(crate) struct ConnectionPlace {
    places: Arc<ConnectionPlaces>,
    origin: Origin,
    owner: Seat,
}

impl ConnectionPlace {
    /// The owner of connections from the same origin.
    pub(crate) const fn owner(&self) -> &Arc<Owner> {
        self.owner.owner()
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        *self.places.locked().of(self.origin) -= 1;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    fn from(last: u8) -> Origin {
        Origin::address(Ipv4Addr::new(10, 0, 0, last).into())
    }

    #[test]
    fn one_address_user_or_client_leaves_places_for_others() {
        let limits = ConnectionLimits { tcp: 8, per_address: 6, per_client: 2, unix: 4 };
        let places = ConnectionPlaces::new(limits);
        let mut open: Vec<_> = (0..6).map(|_| places.take(from(1)).unwrap()).collect();
        assert_eq!(places.take(from(1)).err(), Some("address_limit"));
        assert!(Arc::ptr_eq(open[0].owner(), open[5].owner()), "an address is one owner");
        open.extend((2..4).map(|last| places.take(from(last)).unwrap()));
        assert_eq!(places.take(from(4)).err(), Some("limit"));
        drop(open.pop());
        open.push(places.take(from(4)).unwrap());

        let users: Vec<_> = (0..2).map(|_| places.take(Origin::User(1)).unwrap()).collect();
        assert_eq!(places.take(Origin::User(1)).err(), Some("address_limit"));
        let others: Vec<_> = (0..2).map(|_| places.take(Origin::User(2)).unwrap()).collect();
        assert_eq!(places.take(Origin::User(3)).err(), Some("limit"));
        drop((users, others));

        let name: Arc<str> = Arc::from("engine");
        let seats: Vec<_> = (0..2).map(|_| places.join(&name).unwrap()).collect();
        assert_eq!(places.join(&name).err(), Some(2));
        assert!(places.join(&Arc::from("other")).is_ok());
        drop(seats);
        assert!(places.join(&name).is_ok());
    }

    #[test]
    fn fewer_connections_leave_room_for_other_addresses() {
        let limits = ConnectionLimits::for_tcp(1024);
        let fewer = limits.with_tcp(56);
        assert_eq!((fewer.tcp, fewer.per_address, fewer.per_client), (56, 28, 28));
        assert_eq!((fewer.unix, limits.with_tcp(2000).tcp), (256, 1024));
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let address = |last| Origin::address(Ipv6Addr::new(0x2001, 0xdb8, 0, 1, 0, 0, 0, last).into());
        assert_eq!(address(1), address(2));
        let mapped = Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped();
        assert_eq!(Origin::address(mapped.into()), from(1));
    }
}
