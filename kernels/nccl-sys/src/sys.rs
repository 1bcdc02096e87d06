//! The C interface of NCCL 2.28, as in `nccl.h`: types, constants, and the functions resolved from a library.
#![allow(unsafe_code, reason = "declares and resolves C functions")]

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

/// `ncclComm_t`.
pub type Comm = *mut c_void;
/// `ncclWindow_t`.
pub type WindowHandle = *mut c_void;
/// `ncclResult_t`, an integer and not an enum because newer libraries may return unknown codes.
pub type Code = c_int;

/// `ncclSuccess`.
pub const SUCCESS: Code = 0;
/// `ncclInProgress`: a non-blocking call was accepted and runs in the background.
pub const IN_PROGRESS: Code = 7;
/// `NCCL_WIN_COLL_SYMMETRIC`.
pub const WINDOW_SYMMETRIC: c_int = 1;
/// `NCCL_WIN_REQUIRED_ALIGNMENT`, in bytes.
pub const WINDOW_ALIGNMENT: usize = 4096;
/// `NCCL_UNIQUE_ID_BYTES`.
pub const UNIQUE_ID_BYTES: usize = 128;

const CONFIG_MAGIC: c_uint = 0xcafe_beef;
const UNDEFINED: c_int = c_int::MIN;
/// The version whose `ncclConfig_t` is declared here. Later libraries recognise the shorter struct by its size.
const CONFIG_VERSION: c_uint = 22800;

/// `ncclUniqueId`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawUniqueId {
    /// Opaque bytes.
    pub internal: [c_char; UNIQUE_ID_BYTES],
}

/// `ncclConfig_t` of 2.28. Only [`Config::new`] makes it, so that size, magic and version are always set.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    /// 0 makes calls return at once and finish in the background.
    pub blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    channels_per_net_peer: c_int,
    nvlink_centric_sched: c_int,
}

impl Config {
    /// The values of `NCCL_CONFIG_INITIALIZER`: all options are undefined, so that the library chooses.
    #[must_use]
    pub const fn new() -> Config {
        Config {
            size: size_of::<Config>(),
            magic: CONFIG_MAGIC,
            version: CONFIG_VERSION,
            blocking: UNDEFINED,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: std::ptr::null(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
            channels_per_net_peer: UNDEFINED,
            nvlink_centric_sched: UNDEFINED,
        }
    }
}

impl Default for Config {
    fn default() -> Config {
        Config::new()
    }
}

/// The head of the device-side table that an `ncclWindow_t` of NCCL 2.28 points to. Later versions provide the addresses
/// through `ncclGetLsaDevicePointer`, which is preferred if the library has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowTable {
    /// Device address of the LSA (load/store accessible) range, which begins with rank 0's window.
    pub base: u64,
    /// Index of this rank in the LSA team.
    pub lsa_rank: u32,
    /// Index of this rank in the communicator.
    pub world_rank: u32,
    /// Distance between the windows of consecutive ranks, in units of 4 GiB.
    pub stride_4g: u32,
}

impl WindowTable {
    /// Number of bytes that are read from the table.
    pub const BYTES: usize = 28;

    /// Decodes the head of the table: `{u64 host object, u64 base, u32 LSA rank, u32 world rank, u32 stride}`.
    #[must_use]
    pub fn decode(bytes: &[u8; WindowTable::BYTES]) -> WindowTable {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        WindowTable {
            base: u64::from(word(8)) | u64::from(word(12)) << 32,
            lsa_rank: word(16),
            world_rank: word(20),
            stride_4g: word(24),
        }
    }

    /// Device address of `peer`'s window, for loads and stores by this rank.
    #[must_use]
    pub fn peer(&self, peer: u32) -> u64 {
        self.base + u64::from(peer) * (u64::from(self.stride_4g) << 32)
    }
}

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal: fn($($arg:ident: $ty:ty),*) $(-> $ret:ty)?;)*) => {
        /// The functions of one loaded library.
        pub struct Functions {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($arg: $ty),*) $(-> $ret)?,)*
            /// `ncclGetLsaDevicePointer(window, offset, lsa_rank, out)`, from 2.29 on.
            pub lsa_pointer: Option<unsafe extern "C" fn(WindowHandle, usize, c_int, *mut *mut c_void) -> Code>,
        }

        impl Functions {
            /// Names of all functions that must be present.
            pub const REQUIRED: &'static [&'static str] = &[$($symbol),*];

            /// Resolves every function. The error is the name of the first function that is missing.
            ///
            /// # Safety
            /// `library` must be an NCCL library, and must outlive the result.
            pub unsafe fn resolve(library: &Library) -> Result<Functions, &'static str> {
                Ok(Functions {
                    $($field: {
                        // SAFETY: the caller promises that this is NCCL; the signature is that of nccl.h.
                        let symbol = unsafe {
                            library.get::<unsafe extern "C" fn($($ty),*) $(-> $ret)?>($symbol.as_bytes())
                        };
                        *symbol.map_err(|_| $symbol)?
                    },)*
                    lsa_pointer: {
                        // SAFETY: as above.
                        let symbol = unsafe {
                            library.get::<unsafe extern "C" fn(WindowHandle, usize, c_int, *mut *mut c_void) -> Code>(
                                b"ncclGetLsaDevicePointer",
                            )
                        };
                        symbol.ok().map(|symbol| *symbol)
                    },
                })
            }
        }
    };
}

functions! {
    /// `ncclGetVersion`.
    get_version = "ncclGetVersion": fn(version: *mut c_int) -> Code;
    /// `ncclGetErrorString`.
    error_string = "ncclGetErrorString": fn(code: Code) -> *const c_char;
    /// `ncclGetLastError`.
    last_error = "ncclGetLastError": fn(comm: Comm) -> *const c_char;
    /// `ncclGetUniqueId`.
    get_unique_id = "ncclGetUniqueId": fn(id: *mut RawUniqueId) -> Code;
    /// `ncclCommInitRankConfig`.
    comm_init = "ncclCommInitRankConfig":
        fn(comm: *mut Comm, ranks: c_int, id: RawUniqueId, rank: c_int, config: *mut Config) -> Code;
    /// `ncclCommGetAsyncError`.
    async_error = "ncclCommGetAsyncError": fn(comm: Comm, code: *mut Code) -> Code;
    /// `ncclCommFinalize`.
    comm_finalize = "ncclCommFinalize": fn(comm: Comm) -> Code;
    /// `ncclCommDestroy`.
    comm_destroy = "ncclCommDestroy": fn(comm: Comm) -> Code;
    /// `ncclCommAbort`.
    comm_abort = "ncclCommAbort": fn(comm: Comm) -> Code;
    /// `ncclMemAlloc`.
    mem_alloc = "ncclMemAlloc": fn(address: *mut *mut c_void, bytes: usize) -> Code;
    /// `ncclMemFree`.
    mem_free = "ncclMemFree": fn(address: *mut c_void) -> Code;
    /// `ncclCommWindowRegister`.
    window_register = "ncclCommWindowRegister":
        fn(comm: Comm, address: *mut c_void, bytes: usize, window: *mut WindowHandle, flags: c_int) -> Code;
    /// `ncclCommWindowDeregister`.
    window_deregister = "ncclCommWindowDeregister": fn(comm: Comm, window: WindowHandle) -> Code;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// Sizes and offsets as the C compiler lays out `ncclConfig_v22800` on x86-64 Linux.
    #[test]
    fn config_has_the_layout_of_nccl_h() {
        assert_eq!(size_of::<Config>(), 80);
        assert_eq!(offset_of!(Config, magic), 8);
        assert_eq!(offset_of!(Config, version), 12);
        assert_eq!(offset_of!(Config, blocking), 16);
        assert_eq!(offset_of!(Config, net_name), 32);
        assert_eq!(offset_of!(Config, comm_name), 48);
        assert_eq!(offset_of!(Config, nvlink_centric_sched), 76);
        assert_eq!(size_of::<RawUniqueId>(), UNIQUE_ID_BYTES);
    }

    #[test]
    fn a_new_config_has_size_magic_and_version_and_no_options() {
        let config = Config::new();
        assert_eq!(config.size, size_of::<Config>());
        assert_eq!(config.magic, 0xcafe_beef);
        assert_eq!(config.version, 22800);
        for field in [config.blocking, config.min_ctas, config.cta_policy, config.nvlink_centric_sched] {
            assert_eq!(field, c_int::MIN);
        }
    }

    #[test]
    fn the_window_table_is_decoded() {
        let mut bytes = [0_u8; WindowTable::BYTES];
        bytes[..8].copy_from_slice(&0x1111_2222_3333_4444_u64.to_le_bytes());
        bytes[8..16].copy_from_slice(&0x0a00_0000_0020_0000_u64.to_le_bytes());
        bytes[16..20].copy_from_slice(&2_u32.to_le_bytes());
        bytes[20..24].copy_from_slice(&6_u32.to_le_bytes());
        bytes[24..28].copy_from_slice(&32_u32.to_le_bytes());
        let table = WindowTable::decode(&bytes);
        assert_eq!(
            table,
            WindowTable { base: 0x0a00_0000_0020_0000, lsa_rank: 2, world_rank: 6, stride_4g: 32 }
        );
        assert_eq!(table.peer(0), table.base);
        assert_eq!(table.peer(3) - table.base, 3 * 32 * (1 << 32));
    }
}
