//! One end of a connection: an agent of NIXL with one registered row area, which writes into the row area of its peer.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;

use expertd_shm::region::SharedSlice;

use crate::library::{Library, NetworkError, Owned, check, take_text, text};
use crate::sys::{AgentConfig, HOST_MEMORY, Handle, IN_PROGRESS, WRITE};
use crate::wire::Place;

/// Transfers that stay prepared for their next use.
const PREPARED: usize = 256;

/// The address of an endpoint, for its peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// The agent's metadata: its name, its addresses and the keys of its memory.
    pub metadata: Vec<u8>,
    /// Address of the row area in the agent's process.
    pub rows_address: u64,
}

/// How UCX is set up. Variables of the environment (`UCX_TLS`, `UCX_NET_DEVICES` and others) come first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transports {
    /// Transports, as in `UCX_TLS`, without commas; `None` leaves the choice to UCX.
    pub transports: Option<String>,
    /// The network device, as in `UCX_NET_DEVICES`; `None` for all.
    pub device: Option<String>,
    /// First and last TCP port to listen on; `None` lets the system choose.
    pub ports: Option<(u16, u16)>,
    /// Whether TCP takes the device's address of IPv6; otherwise that of IPv4, if it has one.
    pub ipv6: bool,
}

impl Transports {
    fn engine_config(&self) -> String {
        let parts = [
            // By default TCP sends 8 KiB at once. Peers receive 64 KiB. What a peer does not acknowledge breaks the connection.
            may_use_tcp().then(|| "TCP_TX_SEG_SIZE=64k,TCP_USER_TIMEOUT=10s".to_owned()),
            self.transports.as_ref().map(|transports| format!("TLS={transports}")),
            self.device.as_ref().map(|device| format!("NET_DEVICES={device}")),
            self.ports.map(|(first, last)| format!("TCP_PORT_RANGE={first}-{last}")),
            self.ipv6.then(|| "TCP_AF_PRIO=inet6".to_owned()),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(",")
    }
}

/// Whether UCX's environment leaves TCP in: UCX warns of settings without a use.
fn may_use_tcp() -> bool {
    std::env::var("UCX_TLS").map_or(true, |transports| {
        transports.starts_with('^') || transports.split(',').any(|one| one == "tcp" || one == "all")
    })
}

/// One end of a connection. It belongs to one thread at a time.
#[derive(Debug)]
pub struct Endpoint {
    // Dropped in this order: what the agent made, then the agent, then the memory that was registered.
    transfers: HashMap<Vec<Place>, Vec<Transfer>>,
    active: Vec<(Vec<Place>, Transfer)>,
    notifications: Owned,
    notifying: Owned,
    registered: Owned,
    options: Owned,
    _backend: Owned,
    agent: Owned,
    peer: Option<Peer>,
    rows: SharedSlice<u8>,
    library: Arc<Library>,
}

#[derive(Debug)]
struct Peer {
    name: CString,
    rows_address: usize,
}

/// A transfer between the same places of both row areas.
#[derive(Debug)]
struct Transfer {
    library: Arc<Library>,
    agent: Handle,
    request: Handle,
}

// SAFETY: an agent may be used by any thread, one at a time, and its handles are used by the owner of the endpoint only.
#[allow(unsafe_code, reason = "handles of a library without thread affinity")]
unsafe impl Send for Endpoint {}

impl Drop for Transfer {
    #[allow(unsafe_code, reason = "calls NIXL")]
    fn drop(&mut self) {
        let functions = &self.library.functions;
        // SAFETY: both live: the endpoint drops its transfers before the agent. A request that is still active is cancelled by its
        // release; if that fails, the handle is leaked instead of being destroyed.
        unsafe {
            if (functions.release_xfer_req)(self.agent, self.request) >= 0 {
                (functions.destroy_xfer_req)(self.request);
            }
        }
    }
}

impl Drop for Endpoint {
    #[allow(unsafe_code, reason = "calls NIXL")]
    fn drop(&mut self) {
        self.transfers.clear();
        self.active.clear();
        let functions = &self.library.functions;
        // SAFETY: the handles live; nothing is in flight any more.
        unsafe {
            if let Some(peer) = &self.peer {
                (functions.invalidate_remote_md)(self.agent.handle, peer.name.as_ptr());
            }
            (functions.deregister_mem)(self.agent.handle, self.registered.handle, self.options.handle);
        }
    }
}

#[allow(unsafe_code, reason = "calls NIXL")]
impl Endpoint {
    /// An endpoint with the row area `rows`, whose agent has a name that differs from its peer's.
    ///
    /// # Errors
    /// If UCX finds no transport, or the memory cannot be registered.
    pub fn new(
        library: &Arc<Library>,
        name: &str,
        transports: &Transports,
        rows: SharedSlice<u8>,
    ) -> Result<Self, NetworkError> {
        let f = &library.functions;
        let name = text(name)?;
        let config = AgentConfig {
            enable_prog_thread: false,
            enable_listen_thread: false,
            listen_port: 0,
            thread_sync: 0,
            num_workers: 1,
            pthr_delay_us: 0,
            lthr_delay_us: 0,
            capture_telemetry: false,
        };
        // SAFETY: here and below: arguments live during each call, handles until their owners are dropped, and each
        // handle is destroyed by the function that belongs to the one that made it.
        unsafe {
            let agent = Owned::make("create_agent", f.destroy_agent, |to| {
                (f.create_configured_agent)(name.as_ptr(), &raw const config, to)
            })?;
            let params = Owned::make("create_params", f.destroy_params, |to| (f.create_params)(to))?;
            let config = transports.engine_config();
            if !config.is_empty() {
                let value = text(&config)?;
                let key = c"engine_config".as_ptr();
                check("params_add", (f.params_add)(params.handle, key, value.as_ptr()))?;
            }
            let backend = Owned::make("create_backend(UCX)", f.destroy_backend, |to| {
                (f.create_backend)(agent.handle, c"UCX".as_ptr(), params.handle, to)
            })?;
            let options = Owned::make("create_opt_args", f.destroy_opt_args, |to| (f.create_opt_args)(to))?;
            check("opt_args_add_backend", (f.opt_args_add_backend)(options.handle, backend.handle))?;
            let notifying = Owned::make("create_opt_args", f.destroy_opt_args, |to| (f.create_opt_args)(to))?;
            check("opt_args_add_backend", (f.opt_args_add_backend)(notifying.handle, backend.handle))?;
            let registered = Owned::make("create_reg_dlist", f.destroy_reg_dlist, |to| {
                (f.create_reg_dlist)(HOST_MEMORY, to)
            })?;
            let (at, len) = (rows.as_ptr() as usize, rows.len());
            check("reg_dlist_add_desc", (f.reg_dlist_add_desc)(registered.handle, at, len, 0, null(), 0))?;
            check("register_mem", (f.register_mem)(agent.handle, registered.handle, options.handle))?;
            let notifications =
                Owned::make("create_notif_map", f.destroy_notif_map, |to| (f.create_notif_map)(to))?;
            Ok(Endpoint {
                transfers: HashMap::new(),
                active: Vec::new(),
                notifications,
                notifying,
                registered,
                options,
                _backend: backend,
                agent,
                peer: None,
                rows,
                library: Arc::clone(library),
            })
        }
    }

    /// The address of this endpoint, for its peer.
    ///
    /// # Errors
    /// If the agent has no metadata.
    pub fn card(&self) -> Result<Card, NetworkError> {
        let (mut data, mut len): (*mut c_void, usize) = (null_mut(), 0);
        // SAFETY: the library stores `len` bytes of `malloc`, which are copied and freed.
        let metadata = unsafe {
            let status =
                (self.library.functions.get_local_md)(self.agent.handle, &raw mut data, &raw mut len);
            check("get_local_md", status)?;
            let copy = std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec();
            libc::free(data);
            copy
        };
        Ok(Card { metadata, rows_address: self.rows.as_ptr() as u64 })
    }

    /// Connects to the peer, whose row area has the size of this one.
    ///
    /// # Errors
    /// If the metadata is not of an agent, or the peer cannot be reached.
    pub fn connect(&mut self, card: &Card) -> Result<(), NetworkError> {
        let f = &self.library.functions;
        let rows_address = usize::try_from(card.rows_address).unwrap_or(0);
        if rows_address == 0 || rows_address.checked_add(self.rows.len()).is_none() {
            return Err(NetworkError::Protocol("a row area outside of the address space".to_owned()));
        }
        let mut name = null_mut();
        // SAFETY: the metadata lives during the call; the name is a string of `malloc`.
        let name = unsafe {
            let data = card.metadata.as_ptr().cast();
            check(
                "load_remote_md",
                (f.load_remote_md)(self.agent.handle, data, card.metadata.len(), &raw mut name),
            )?;
            take_text(name)
        };
        let (agent, options) = (self.agent.handle, self.options.handle);
        // SAFETY: all live during the call.
        check("make_connection", unsafe { (f.agent_make_connection)(agent, name.as_ptr(), options) })?;
        self.peer = Some(Peer { name, rows_address });
        Ok(())
    }

    /// Writes the bytes of `places` to the same places of the peer's row area, then sends it `notification`. Without places the
    /// notification is sent alone. The bytes must not change until the peer's answer.
    ///
    /// # Errors
    /// If a place exceeds the row area, or the peer is gone.
    pub fn send(&mut self, places: &[Place], notification: &[u8]) -> Result<(), NetworkError> {
        let Some(peer) = &self.peer else {
            return Err(NetworkError::Protocol("nothing: it is not connected".to_owned()));
        };
        let f = &self.library.functions;
        let (data, len) = (notification.as_ptr().cast(), notification.len());
        if places.is_empty() {
            let (agent, options) = (self.agent.handle, self.options.handle);
            // SAFETY: all live during the call, which copies the notification.
            check("gen_notif", unsafe { (f.gen_notif)(agent, peer.name.as_ptr(), data, len, options) })?;
            return Ok(());
        }
        let transfer = match self.transfers.get_mut(places).and_then(Vec::pop) {
            Some(prepared) => prepared,
            None => self.prepare(places)?,
        };
        let options = self.notifying.handle;
        // SAFETY: all live; the library copies the notification, and the request is not active.
        let status = unsafe {
            check("set_notif_msg", (f.opt_args_set_notif_msg)(options, data, len))?;
            check("set_has_notif", (f.opt_args_set_has_notif)(options, true))?;
            check("post_xfer_req", (f.post_xfer_req)(self.agent.handle, transfer.request, options))?
        };
        if status == IN_PROGRESS {
            self.active.push((places.to_vec(), transfer));
        } else {
            self.keep(places.to_vec(), transfer);
        }
        Ok(())
    }

    fn prepare(&self, places: &[Place]) -> Result<Transfer, NetworkError> {
        let f = &self.library.functions;
        let Some(peer) = &self.peer else {
            return Err(NetworkError::Protocol("nothing: it is not connected".to_owned()));
        };
        // SAFETY: lists live until the request is made, which copies them; the places lie in both row areas.
        unsafe {
            let list = || {
                Owned::make("create_xfer_dlist", f.destroy_xfer_dlist, |to| {
                    (f.create_xfer_dlist)(HOST_MEMORY, to)
                })
            };
            let (local, remote) = (list()?, list()?);
            for place in places {
                if !place.is_within(self.rows.len()) {
                    return Err(NetworkError::Protocol("a place outside of the row area".to_owned()));
                }
                for (list, base) in [(&local, self.rows.as_ptr() as usize), (&remote, peer.rows_address)] {
                    let status = (f.xfer_dlist_add_desc)(list.handle, base + place.start, place.bytes, 0);
                    check("xfer_dlist_add_desc", status)?;
                }
            }
            let mut request = null_mut();
            let status = (f.create_xfer_req)(
                self.agent.handle,
                WRITE,
                local.handle,
                remote.handle,
                peer.name.as_ptr(),
                &raw mut request,
                self.options.handle,
            );
            check("create_xfer_req", status)?;
            Ok(Transfer { library: Arc::clone(&self.library), agent: self.agent.handle, request })
        }
    }

    /// Keeps a transfer that has ended for its next use.
    fn keep(&mut self, places: Vec<Place>, transfer: Transfer) {
        if self.transfers.len() >= PREPARED {
            self.transfers.clear();
        }
        self.transfers.entry(places).or_default().push(transfer);
    }

    /// Drives transfers, and passes the notifications that have arrived from the peer to `take`, in order.
    ///
    /// # Errors
    /// If the peer is gone, or `take` fails.
    pub fn poll(
        &mut self,
        mut take: impl FnMut(&[u8]) -> Result<(), NetworkError>,
    ) -> Result<(), NetworkError> {
        let agent = self.agent.handle;
        let mut at = 0;
        while at < self.active.len() {
            // SAFETY: the request is active and belongs to the agent.
            let status =
                unsafe { (self.library.functions.get_xfer_status)(agent, self.active[at].1.request) };
            if check("get_xfer_status", status)? == IN_PROGRESS {
                at += 1;
            } else {
                let (places, transfer) = self.active.swap_remove(at);
                self.keep(places, transfer);
            }
        }
        let f = &self.library.functions;
        let (map, mut agents) = (self.notifications.handle, 0_usize);
        // SAFETY: the map lives, and the bytes of a notification until it is cleared.
        unsafe {
            check("get_notifs", (f.get_notifs)(agent, map, null_mut()))?;
            check("notif_map_size", (f.notif_map_size)(map, &raw mut agents))?;
            if agents == 0 {
                return Ok(());
            }
            let mut taken = Ok(());
            if let Some(peer) = &self.peer {
                let mut count = 0_usize;
                // Notifications that name another sender are dropped.
                if (f.notif_map_get_notifs_size)(map, peer.name.as_ptr(), &raw mut count) < 0 {
                    count = 0;
                }
                for index in 0..count {
                    let (mut data, mut len): (*const c_void, usize) = (null(), 0);
                    let name = peer.name.as_ptr();
                    let status = (f.notif_map_get_notif)(map, name, index, &raw mut data, &raw mut len);
                    check("notif_map_get_notif", status)?;
                    taken = take(std::slice::from_raw_parts(data.cast::<u8>(), len));
                    if taken.is_err() {
                        break;
                    }
                }
            }
            (f.notif_map_clear)(map);
            taken
        }
    }

    /// Whether a transfer is under way.
    #[must_use]
    pub fn is_sending(&self) -> bool {
        !self.active.is_empty()
    }

    /// The row area.
    #[must_use]
    pub const fn rows(&self) -> &SharedSlice<u8> {
        &self.rows
    }
}
