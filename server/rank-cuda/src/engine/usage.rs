//! Memory and utilisation of the rank's GPU, from NVIDIA's management library (NVML), which comes with the driver and is
//! loaded if it is there.

#![allow(unsafe_code, reason = "calls the functions of a C library")]

use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};

use expertd_rank::ReadUsage;
use expertd_types::DeviceUsage;
use expertd_types::uuid_text;
use libloading::Library;

/// File name of the library.
const NVML: &str = "libnvidia-ml.so.1";

/// `nvmlReturn_t`; 0 is success.
type Code = c_int;
/// `nvmlDevice_t`.
type Handle = *mut c_void;

/// `nvmlMemory_t`, in bytes. What the driver reserves for itself counts as used.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlUtilization_t`, in percent.
#[repr(C)]
#[derive(Default)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// A GPU in the library.
struct Nvml {
    device: Handle,
    memory: unsafe extern "C" fn(Handle, *mut Memory) -> Code,
    utilization: unsafe extern "C" fn(Handle, *mut Utilization) -> Code,
    shutdown: unsafe extern "C" fn() -> Code,
    /// Keeps the functions in memory.
    _library: Library,
}

// SAFETY: the library may be used from any thread, and its handles belong to no thread.
unsafe impl Send for Nvml {}

/// Why a GPU's usage cannot be read.
#[derive(Debug, thiserror::Error)]
enum NvmlError {
    #[error("{NVML}: {0}")]
    Library(#[from] libloading::Error),
    #[error("{function} returned {code}")]
    Call { function: &'static str, code: Code },
}

fn check(function: &'static str, code: Code) -> Result<(), NvmlError> {
    if code == 0 { Ok(()) } else { Err(NvmlError::Call { function, code }) }
}

impl Nvml {
    /// Opens the GPU with this UUID. A part of a GPU (MIG) has a UUID of another kind and is not found.
    fn open(uuid: &[u8; 16]) -> Result<Self, NvmlError> {
        // SAFETY: the driver's library has no requirements on when it is loaded.
        let library = unsafe { Library::new(NVML) }?;
        // SAFETY: these are the functions' types in nvml.h; they are stable.
        let (init, find, memory, utilization, shutdown) = unsafe {
            (
                *library.get::<unsafe extern "C" fn() -> Code>(b"nvmlInit_v2\0")?,
                *library.get::<unsafe extern "C" fn(*const c_char, *mut Handle) -> Code>(
                    b"nvmlDeviceGetHandleByUUID\0",
                )?,
                *library.get(b"nvmlDeviceGetMemoryInfo\0")?,
                *library.get(b"nvmlDeviceGetUtilizationRates\0")?,
                *library.get(b"nvmlShutdown\0")?,
            )
        };
        // SAFETY: the function takes no arguments.
        check("nvmlInit_v2", unsafe { init() })?;
        // From here on, dropping the value shuts the library down.
        let mut nvml =
            Nvml { device: std::ptr::null_mut(), memory, utilization, shutdown, _library: library };
        let text = CString::new(uuid_text(uuid)).unwrap_or_default();
        // SAFETY: the text ends in 0, and the handle is written to memory that lives across the call.
        check("nvmlDeviceGetHandleByUUID", unsafe { find(text.as_ptr(), &raw mut nvml.device) })?;
        Ok(nvml)
    }

    fn read(&self) -> Result<DeviceUsage, NvmlError> {
        let (mut memory, mut utilization) = (Memory::default(), Utilization::default());
        // SAFETY: the handle is the library's, and the result is written to memory of the function's type.
        check("nvmlDeviceGetMemoryInfo", unsafe { (self.memory)(self.device, &raw mut memory) })?;
        // SAFETY: as above.
        let code = unsafe { (self.utilization)(self.device, &raw mut utilization) };
        let percent = u8::try_from(utilization.gpu).ok().filter(|percent| code == 0 && *percent <= 100);
        Ok(DeviceUsage {
            memory_used_bytes: memory.used,
            memory_total_bytes: memory.total,
            utilization_percent: percent,
        })
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: `open` initialised the library; it counts initialisations.
        unsafe { (self.shutdown)() };
    }
}

/// A reader of the usage of the GPU with this UUID; `None` if the library does not list it.
pub(super) fn reader(uuid: [u8; 16]) -> Option<ReadUsage> {
    let nvml = Nvml::open(&uuid).and_then(|nvml| nvml.read().map(|_| nvml));
    match nvml {
        Ok(nvml) => Some(Box::new(move || nvml.read().ok())),
        Err(error) => {
            tracing::info!(%error, "the usage of this GPU is not reported");
            None
        }
    }
}
