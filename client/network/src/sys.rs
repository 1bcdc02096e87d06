#![allow(unsafe_code, reason = "declares functions of a C library")]
//! The part of NIXL's C interface (`nixl_capi`, version 1.5) that network sessions use, resolved from a shared library into a table of
//! functions.

#![allow(missing_docs, reason = "the functions are documented by NIXL")]

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

/// A status: 0 is success, 1 in progress, negative numbers are errors.
pub(crate) type Status = c_int;
/// A handle of the library.
pub(crate) type Handle = *mut c_void;

pub(crate) const IN_PROGRESS: Status = 1;
pub(crate) const HOST_MEMORY: c_int = 0;
pub(crate) const WRITE: c_int = 1;

/// Configuration of an agent.
#[repr(C)]
pub(crate) struct AgentConfig {
    pub(crate) enable_prog_thread: bool,
    pub(crate) enable_listen_thread: bool,
    pub(crate) listen_port: c_int,
    pub(crate) thread_sync: c_int,
    pub(crate) num_workers: c_uint,
    pub(crate) pthr_delay_us: u64,
    pub(crate) lthr_delay_us: u64,
    pub(crate) capture_telemetry: bool,
}

macro_rules! functions {
    ($( $name:ident ( $($arg:ty),* ); )*) => {
        /// The functions.
        #[derive(Debug)]
        pub(crate) struct Functions { $( pub(crate) $name: unsafe extern "C" fn($($arg),*) -> Status, )* }

        impl Functions {
            /// Looks all functions up.
            ///
            /// # Safety
            /// `library` is NIXL's, of a version that declares them so.
            pub(crate) unsafe fn resolve(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Functions { $(
                    // SAFETY: the caller vouches for the declarations.
                    $name: unsafe { *library.get(concat!("nixl_capi_", stringify!($name), "\0").as_bytes())? },
                )* })
            }
        }
    };
}

functions! {
    create_configured_agent(*const c_char, *const AgentConfig, *mut Handle);
    destroy_agent(Handle);
    create_params(*mut Handle);
    params_add(Handle, *const c_char, *const c_char);
    destroy_params(Handle);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend(Handle);
    create_opt_args(*mut Handle);
    destroy_opt_args(Handle);
    opt_args_add_backend(Handle, Handle);
    opt_args_set_notif_msg(Handle, *const c_void, usize);
    opt_args_set_has_notif(Handle, bool);
    create_reg_dlist(c_int, *mut Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist(Handle);
    register_mem(Handle, Handle, Handle);
    deregister_mem(Handle, Handle, Handle);
    get_local_md(Handle, *mut *mut c_void, *mut usize);
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(Handle, *const c_char);
    agent_make_connection(Handle, *const c_char, Handle);
    create_xfer_dlist(c_int, *mut Handle);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    destroy_xfer_dlist(Handle);
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
    gen_notif(Handle, *const c_char, *const c_void, usize, Handle);
    create_notif_map(*mut Handle);
    destroy_notif_map(Handle);
    get_notifs(Handle, Handle, Handle);
    notif_map_size(Handle, *mut usize);
    notif_map_get_notifs_size(Handle, *const c_char, *mut usize);
    notif_map_get_notif(Handle, *const c_char, usize, *mut *const c_void, *mut usize);
    notif_map_clear(Handle);
}
