//! The table of open connections and its limits: in all, per peer address, and a reserve for clients that authenticate
//! themselves.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::connections::count_end;
use super::limits::ConnectionLimits;
use crate::api::framing::connection::{Connection, Owner};
use crate::backend::ClientKey;

/// A connection younger than this is not ended in favour of a new one.
const SETTLED: Duration = Duration::from_secs(1);
/// Owners without connections that the table keeps before it removes them.
const STALE_OWNERS: usize = 256;

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

/// Key of an owner.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum OwnerKey {
    Origin(Origin),
    Client(Arc<str>),
}

/// The open connections of one kind of listener.
pub(in crate::api) struct ConnectionTable {
    limits: ConnectionLimits,
    /// Whether TCP connections have to authenticate themselves.
    must_authenticate: bool,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    open: HashMap<u64, Entry>,
    tcp: usize,
    unix: usize,
    /// TCP connections without valid credentials so far.
    unauthenticated: usize,
    by_origin: HashMap<Origin, OfOrigin>,
    owners: HashMap<OwnerKey, Weak<Owner>>,
}

struct Entry {
    origin: Origin,
    connection: Arc<Connection>,
}

/// The open connections of one origin.
#[derive(Default)]
struct OfOrigin {
    count: usize,
    /// Numbers of those without valid credentials so far; the oldest is the lowest.
    unauthenticated: BTreeSet<u64>,
}

impl ConnectionTable {
    pub(in crate::api) fn new(limits: ConnectionLimits, must_authenticate: bool) -> ConnectionTable {
        ConnectionTable { limits, must_authenticate, entries: Mutex::default() }
    }

    /// Whether a connection from `origin` has to authenticate itself.
    pub(in crate::api) fn must_authenticate(&self, origin: Origin) -> bool {
        self.must_authenticate && matches!(origin, Origin::Address(_))
    }

    /// Adds a connection to the table, if necessary by ending an idle one. `Err` holds the limit that was reached.
    pub(in crate::api) fn open(
        &self,
        origin: Origin,
        end: &CancellationToken,
    ) -> Result<Arc<Connection>, &'static str> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut entries = self.locked();
        match origin {
            Origin::User(_) if entries.unix >= self.limits.unix => return Err("limit"),
            Origin::User(_) => {}
            Origin::Address(_) => {
                if entries.count(origin) >= self.limits.per_address {
                    return Err("address_limit");
                }
                if self.must_authenticate
                    && entries.unauthenticated >= self.limits.unauthenticated
                    && !entries.replace_unauthenticated(origin)
                {
                    return Err("unauthenticated_limit");
                }
                if entries.tcp >= self.limits.tcp && !entries.make_room(origin) {
                    return Err("limit");
                }
            }
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let owner = entries.owner(OwnerKey::Origin(origin));
        let connection = Connection::new(ClientKey(number), owner, end.child_token());
        entries.insert(number, Entry { origin, connection: Arc::clone(&connection) });
        Ok(connection)
    }

    /// Notes that a call on a connection had valid credentials.
    pub(in crate::api) fn authenticate(&self, connection: &Connection) {
        if connection.authenticate() {
            self.locked().authenticated(connection.key.0);
        }
    }

    /// Removes a connection that has ended.
    pub(in crate::api) fn close(&self, connection: &Connection) {
        self.locked().remove(connection.key.0);
    }

    /// The owner that calls of a client are charged to.
    pub(in crate::api) fn client(&self, name: &Arc<str>) -> Arc<Owner> {
        self.locked().owner(OwnerKey::Client(Arc::clone(name)))
    }

    /// Largest number of sockets in the tarpit.
    pub(super) fn tarpit(&self) -> usize {
        self.limits.tarpit
    }

    /// Limit on connections of one client.
    pub(in crate::api) fn per_client(&self) -> usize {
        self.limits.per_client
    }

    /// All open connections.
    pub(in crate::api) fn all(&self) -> Vec<(Origin, Arc<Connection>)> {
        self.locked().open.values().map(|entry| (entry.origin, Arc::clone(&entry.connection))).collect()
    }

    fn locked(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn count(&self, origin: Origin) -> usize {
        self.by_origin.get(&origin).map_or(0, |of_origin| of_origin.count)
    }

    fn insert(&mut self, number: u64, entry: Entry) {
        let of_origin = self.by_origin.entry(entry.origin).or_default();
        of_origin.count += 1;
        match entry.origin {
            Origin::Address(_) => {
                self.tcp += 1;
                self.unauthenticated += 1;
                of_origin.unauthenticated.insert(number);
            }
            Origin::User(_) => self.unix += 1,
        }
        self.open.insert(number, entry);
    }

    fn remove(&mut self, number: u64) {
        self.authenticated(number);
        let Some(entry) = self.open.remove(&number) else { return };
        if let Some(of_origin) = self.by_origin.get_mut(&entry.origin) {
            of_origin.count -= 1;
            if of_origin.count == 0 {
                self.by_origin.remove(&entry.origin);
            }
        }
        match entry.origin {
            Origin::Address(_) => self.tcp -= 1,
            Origin::User(_) => self.unix -= 1,
        }
    }

    /// Stops counting a connection among those without valid credentials.
    fn authenticated(&mut self, number: u64) {
        let Some(entry) = self.open.get(&number) else { return };
        if let Some(of_origin) = self.by_origin.get_mut(&entry.origin)
            && of_origin.unauthenticated.remove(&number)
        {
            self.unauthenticated -= 1;
        }
    }

    /// Ends the oldest connection without valid credentials of the address that has the most of them, so that one from `origin`
    /// can take its place. Connections of an address that would then have the most itself must wait until the oldest has had
    /// [`SETTLED`] to authenticate itself. Returns whether there is a place.
    fn replace_unauthenticated(&mut self, origin: Origin) -> bool {
        let waiting = |of_origin: &OfOrigin| of_origin.unauthenticated.len();
        let own = self.by_origin.get(&origin).map_or(0, waiting) + 1;
        let Some(most) = self.by_origin.values().max_by_key(|of_origin| waiting(of_origin)) else {
            return false;
        };
        let Some(entry) = most.unauthenticated.first().and_then(|oldest| self.open.get(oldest)) else {
            return false;
        };
        if waiting(most) <= own && entry.connection.age() < SETTLED {
            return false;
        }
        let connection = Arc::clone(&entry.connection);
        self.evict(&connection);
        true
    }

    fn evict(&mut self, connection: &Connection) {
        count_end("evicted");
        connection.end.cancel();
        self.remove(connection.key.0);
    }

    /// Ends the oldest idle connection of the address that has the most connections, unless `origin` would have as many.
    fn make_room(&mut self, origin: Origin) -> bool {
        let own = self.count(origin) + 1;
        let addresses = self.by_origin.iter().filter(|(origin, _)| matches!(origin, Origin::Address(_)));
        let Some((&largest, most)) = addresses.max_by_key(|(_, of_origin)| of_origin.count) else {
            return false;
        };
        if most.count <= own {
            return false;
        }
        let may_go = |entry: &&Entry| {
            entry.origin == largest && entry.connection.is_idle() && entry.connection.age() > SETTLED
        };
        let oldest = self.open.values().filter(may_go).min_by_key(|entry| entry.connection.key.0);
        let Some(connection) = oldest.map(|entry| Arc::clone(&entry.connection)) else { return false };
        self.evict(&connection);
        true
    }

    fn owner(&mut self, key: OwnerKey) -> Arc<Owner> {
        if let Some(owner) = self.owners.get(&key).and_then(Weak::upgrade) {
            return owner;
        }
        if self.owners.len() > 2 * self.open.len() + STALE_OWNERS {
            self.owners.retain(|_, owner| owner.strong_count() > 0);
        }
        let owner: Arc<Owner> = Arc::default();
        self.owners.insert(key, Arc::downgrade(&owner));
        owner
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

    fn limits() -> ConnectionLimits {
        ConnectionLimits { tcp: 8, per_address: 6, per_client: 4, unix: 2, unauthenticated: 4, tarpit: 8 }
    }

    #[test]
    fn one_address_does_not_take_all_places() {
        let table = ConnectionTable::new(limits(), false);
        let end = CancellationToken::new();
        let open: Vec<_> = (0..6).map(|_| table.open(from(1), &end).unwrap()).collect();
        assert_eq!(table.open(from(1), &end).err(), Some("address_limit"));
        assert!(Arc::ptr_eq(&open[0].peer, &open[5].peer), "an address is one owner");
        table.open(from(2), &end).unwrap();
        table.open(from(3), &end).unwrap();
        // Full, and no connection has been idle for long enough.
        assert_eq!(table.open(from(4), &end).err(), Some("limit"));
        table.close(&open[0]);
        table.open(from(4), &end).unwrap();
    }

    #[test]
    fn a_new_address_gets_the_place_of_an_idle_connection_of_the_largest() {
        let table = ConnectionTable::new(ConnectionLimits { per_address: 8, ..limits() }, false);
        let end = CancellationToken::new();
        let open: Vec<_> = (0..8).map(|_| table.open(from(1), &end).unwrap()).collect();
        std::thread::sleep(SETTLED + Duration::from_millis(50));
        open.iter().take(3).for_each(|connection| connection.body_begins());
        table.open(from(2), &end).unwrap();
        let ended: Vec<_> = open.iter().map(|connection| connection.end.is_cancelled()).collect();
        assert_eq!(ended.iter().filter(|&&ended| ended).count(), 1);
        assert!(!ended[..3].contains(&true), "busy connections stay");
    }

    #[test]
    fn an_address_without_credentials_makes_way_for_another_one() {
        let table = ConnectionTable::new(limits(), true);
        let end = CancellationToken::new();
        let honest: Vec<_> = (0..3).map(|_| table.open(from(1), &end).unwrap()).collect();
        honest.iter().for_each(|connection| table.authenticate(connection));
        let waiting: Vec<_> = (0..4).map(|_| table.open(from(2), &end).unwrap()).collect();
        assert_eq!(table.open(from(2), &end).err(), Some("unauthenticated_limit"));
        let other = table.open(from(3), &end).unwrap();
        assert!(waiting[0].end.is_cancelled(), "the oldest goes first");
        assert!(waiting[1..].iter().all(|connection| !connection.end.is_cancelled()));
        // Once it has authenticated itself, there is a place again.
        table.authenticate(&other);
        table.open(from(2), &end).unwrap();
        assert_eq!(table.open(from(2), &end).err(), Some("unauthenticated_limit"));
        std::thread::sleep(SETTLED);
        table.close(&honest[0]);
        table.open(from(2), &end).unwrap();
        assert!(waiting[1].end.is_cancelled(), "it has had its time");
        assert!(!other.end.is_cancelled() && !honest[1].end.is_cancelled());
    }

    #[test]
    fn unix_sockets_have_places_of_their_own() {
        let table = ConnectionTable::new(limits(), true);
        let end = CancellationToken::new();
        for at in 0..8 {
            table.authenticate(&table.open(from(at % 2), &end).unwrap());
        }
        table.open(Origin::User(1), &end).unwrap();
        table.open(Origin::User(1), &end).unwrap();
        assert_eq!(table.open(Origin::User(1), &end).err(), Some("limit"));
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let address = |last| Origin::address(Ipv6Addr::new(0x2001, 0xdb8, 0, 1, 0, 0, 0, last).into());
        assert_eq!(address(1), address(2));
        let mapped = Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped();
        assert_eq!(Origin::address(mapped.into()), from(1));
    }
}
