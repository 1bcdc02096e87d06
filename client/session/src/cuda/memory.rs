//! Memory of a GPU that two processes map: the client allocates it, and each rank of the service maps it.
//!
//! Only memory of the virtual memory functions has a descriptor; pools and `cudaMalloc` have none.

#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::mem::zeroed;
use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle,
    CUmemLocationType,
};

use super::driver::{Gpu, check};
use crate::client::SessionError;

/// An allocation that this process holds, mapped readable and writable for one GPU.
#[derive(Debug)]
struct Mapped {
    gpu: Arc<Gpu>,
    handle: CUmemGenericAllocationHandle,
    address: CUdeviceptr,
    bytes: usize,
    is_mapped: bool,
}

impl Mapped {
    /// Maps `bytes` bytes of an allocation, whose handle it takes over.
    fn new(gpu: &Arc<Gpu>, handle: CUmemGenericAllocationHandle, bytes: usize) -> Result<Self, SessionError> {
        let mut mapped = Mapped { gpu: Arc::clone(gpu), handle, address: 0, bytes, is_mapped: false };
        let access = access(gpu.ordinal());
        // SAFETY: a fresh range of addresses; drop undoes whatever was done before an error.
        unsafe {
            let address = &raw mut mapped.address;
            check("cuMemAddressReserve", sys::cuMemAddressReserve(address, bytes, 0, 0, 0))?;
            check("cuMemMap", sys::cuMemMap(mapped.address, bytes, 0, handle, 0))?;
            mapped.is_mapped = true;
            check("cuMemSetAccess", sys::cuMemSetAccess(mapped.address, bytes, &raw const access, 1))?;
        }
        Ok(mapped)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let Ok(_entered) = self.gpu.enter() else { return };
        // SAFETY: undoes `new` once; the owner keeps streams from using the range. Errors cannot be handled here.
        unsafe {
            if self.is_mapped {
                let _ = sys::cuMemUnmap(self.address, self.bytes);
            }
            if self.address != 0 {
                let _ = sys::cuMemAddressFree(self.address, self.bytes);
            }
            let _ = sys::cuMemRelease(self.handle);
        }
    }
}

/// Memory that this process allocated on its GPU and can pass on.
#[derive(Debug)]
pub struct DeviceMemory(Mapped);

impl DeviceMemory {
    /// Allocates at least `bytes` zero bytes, rounded up to the allocation's granularity (2 MiB).
    ///
    /// # Errors
    /// If the GPU has no room.
    pub fn allocate(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, SessionError> {
        let _entered = gpu.enter()?;
        let properties = properties(gpu.ordinal());
        let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let (mut granularity, mut handle) = (0, 0);
        // SAFETY: the arguments are valid for reads and writes.
        unsafe {
            let found =
                sys::cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, minimum);
            check("cuMemGetAllocationGranularity", found)?;
        }
        let too_large = || SessionError::Device(format!("{bytes} bytes exceed the address space"));
        let bytes = bytes.max(1).checked_next_multiple_of(granularity.max(1)).ok_or_else(too_large)?;
        // SAFETY: as above; `Mapped` takes the handle over.
        unsafe {
            check("cuMemCreate", sys::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0))?;
        }
        let mapped = Mapped::new(gpu, handle, bytes)?;
        // SAFETY: the range is mapped, and nothing else uses it yet.
        unsafe {
            check("cuMemsetD8", sys::cuMemsetD8_v2(mapped.address, 0, bytes))?;
            check("cuCtxSynchronize", sys::cuCtxSynchronize())?;
        }
        Ok(DeviceMemory(mapped))
    }

    /// A descriptor of the memory, which another process of this host can import.
    ///
    /// # Errors
    /// The driver's error.
    pub fn export(&self) -> Result<OwnedFd, SessionError> {
        let mut fd: RawFd = -1;
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let _entered = self.0.gpu.enter()?;
        // SAFETY: for this kind of handle the driver stores a descriptor, an `int`.
        let status =
            unsafe { sys::cuMemExportToShareableHandle((&raw mut fd).cast(), self.0.handle, kind, 0) };
        check("cuMemExportToShareableHandle", status)?;
        // SAFETY: the driver made the descriptor for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Copies bytes from the host to byte `offset` on, and waits until that is done. Calls in flight must not use the place.
    ///
    /// # Errors
    /// If the bytes exceed the memory, or the driver's error.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), SessionError> {
        self.check_range(offset, bytes.len())?;
        let _entered = self.0.gpu.enter()?;
        let to = self.0.address + offset as u64;
        // SAFETY: the range lies in the memory (checked), and the driver has read `bytes` when the copy returns.
        unsafe {
            check("cuMemcpyHtoD", sys::cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len()))?;
            // A small copy may return before the GPU's memory has changed; streams that do not block could overtake it.
            check("cuStreamSynchronize", sys::cuStreamSynchronize(std::ptr::null_mut()))
        }
    }

    /// Copies bytes from byte `offset` on to the host.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), SessionError> {
        self.check_range(offset, bytes.len())?;
        let _entered = self.0.gpu.enter()?;
        let from = self.0.address + offset as u64;
        // SAFETY: the range lies in the memory (checked), and the copy has ended when it returns.
        check("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, bytes.len()) })
    }

    fn check_range(&self, offset: usize, bytes: usize) -> Result<(), SessionError> {
        let all = self.0.bytes;
        if offset.checked_add(bytes).is_none_or(|end| end > all) {
            return Err(SessionError::Device(format!(
                "{bytes} bytes at {offset} exceed the {all} bytes of the memory"
            )));
        }
        Ok(())
    }

    /// Address on the GPU.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.0.address
    }

    /// Size in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.0.bytes
    }
}

fn properties(ordinal: i32) -> CUmemAllocationProp {
    // SAFETY: integers and null pointers are valid properties.
    let mut properties: CUmemAllocationProp = unsafe { zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = ordinal;
    properties
}

fn access(ordinal: i32) -> CUmemAccessDesc {
    // SAFETY: integers are a valid descriptor.
    let mut access: CUmemAccessDesc = unsafe { zeroed() };
    access.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = ordinal;
    access.flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    access
}
