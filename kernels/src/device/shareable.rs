//! Device memory that outlives the process that allocated it: allocated as a whole, exported as a descriptor, and mapped by
//! other processes for reading.

use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr;

use cudarc::driver::sys::{
    self, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1,
    CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
};

use super::{Device, DeviceError, check};

const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// One physical allocation, mapped in this process. The memory is freed when no process maps it and no descriptor of it is
/// open.
#[derive(Debug)]
pub struct ShareableMemory {
    address: CUdeviceptr,
    bytes: usize,
    handle: CUmemGenericAllocationHandle,
    device: Device,
}

impl ShareableMemory {
    /// Allocates at least `bytes` bytes of undefined contents and maps them for reading and writing.
    ///
    /// # Errors
    /// If there is not enough device memory, or the device does not support descriptors of memory.
    pub fn allocate(device: &Device, bytes: usize) -> Result<Self, DeviceError> {
        device.bind()?;
        let properties = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: DESCRIPTOR,
            location: location(device),
            win32HandleMetaData: ptr::null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let mut unit = 0;
        let recommended = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: both pointers are valid for the call.
        let status =
            unsafe { sys::cuMemGetAllocationGranularity(&raw mut unit, &raw const properties, recommended) };
        check("cuMemGetAllocationGranularity", status.result())?;
        let bytes = bytes.max(1).next_multiple_of(unit.max(1));
        let mut handle = 0;
        // SAFETY: both pointers are valid for the call, and the context is current.
        let status = unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0) };
        check("cuMemCreate", status.result())?;
        Unmapped::new(device, handle).map(bytes)
    }

    /// Maps `bytes` bytes of memory that another process exported, for reading only.
    ///
    /// # Errors
    /// If `fd` is no descriptor of device memory of this size, or the memory is another device's.
    pub fn import(device: &Device, fd: BorrowedFd<'_>, bytes: usize) -> Result<Self, DeviceError> {
        Unmapped::import(device, fd)?.map_as(bytes, CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ)
    }

    /// A descriptor of the memory, which keeps it allocated. Only the process that allocated the memory can make one.
    ///
    /// # Errors
    /// If the process has no descriptors left, or the memory was imported.
    pub fn export(&self) -> Result<OwnedFd, DeviceError> {
        let mut fd: i32 = -1;
        // SAFETY: the driver writes the number of a new descriptor, which is an `int`.
        let status =
            unsafe { sys::cuMemExportToShareableHandle((&raw mut fd).cast(), self.handle, DESCRIPTOR, 0) };
        check("cuMemExportToShareableHandle", status.result())?;
        // SAFETY: the descriptor is new, and nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Device address of the first byte; a multiple of 2 MiB.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

/// An allocation that this process holds and has not mapped.
#[derive(Debug)]
pub struct Unmapped(ShareableMemory);

impl Unmapped {
    fn new(device: &Device, handle: CUmemGenericAllocationHandle) -> Self {
        // Its drop undoes as much as was done: an address of 0 was not reserved.
        Unmapped(ShareableMemory { address: 0, bytes: 0, handle, device: device.clone() })
    }

    /// Takes hold of memory that another process exported.
    ///
    /// # Errors
    /// If `fd` is no descriptor of memory that this process's GPUs can have.
    pub fn import(device: &Device, fd: BorrowedFd<'_>) -> Result<Self, DeviceError> {
        device.bind()?;
        let mut handle = 0;
        let number = ptr::without_provenance_mut(fd.as_raw_fd().cast_unsigned() as usize);
        // SAFETY: `handle` is valid for writes; the driver takes the descriptor's number in the place of the pointer, and
        // keeps no reference to the descriptor.
        let status = unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, number, DESCRIPTOR) };
        check("cuMemImportFromShareableHandle", status.result())?;
        Ok(Unmapped::new(device, handle))
    }

    /// Number of the GPU whose memory it is; `None` for memory of the host.
    pub fn owner(&self) -> Result<Option<i32>, DeviceError> {
        // SAFETY: integers and null pointers are valid properties.
        let mut found: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        // SAFETY: the handle is alive, and the argument is valid for writes.
        let status = unsafe { sys::cuMemGetAllocationPropertiesFromHandle(&raw mut found, self.0.handle) };
        check("cuMemGetAllocationPropertiesFromHandle", status.result())?;
        let is_device = found.location.type_ == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        Ok(is_device.then_some(found.location.id))
    }

    /// Maps all `bytes` bytes for reading and writing.
    ///
    /// # Errors
    /// If the allocation has another size.
    pub fn map(self, bytes: usize) -> Result<ShareableMemory, DeviceError> {
        self.map_as(bytes, CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    }

    fn map_as(self, bytes: usize, access: CUmemAccess_flags) -> Result<ShareableMemory, DeviceError> {
        let Unmapped(mut memory) = self;
        memory.device.bind()?;
        let mut address = 0;
        // SAFETY: `address` is valid for writes.
        let status = unsafe { sys::cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0) };
        check("cuMemAddressReserve", status.result())?;
        (memory.address, memory.bytes) = (address, bytes);
        // SAFETY: the range was just reserved; the driver checks that the allocation has these bytes.
        check("cuMemMap", unsafe { sys::cuMemMap(address, bytes, 0, memory.handle, 0) }.result())?;
        let access = CUmemAccessDesc { location: location(&memory.device), flags: access };
        // SAFETY: the range was just mapped, and one description is passed.
        let status = unsafe { sys::cuMemSetAccess(address, bytes, &raw const access, 1) };
        check("cuMemSetAccess", status.result())?;
        Ok(memory)
    }
}

impl Drop for ShareableMemory {
    fn drop(&mut self) {
        if self.device.bind().is_err() {
            return;
        }
        if self.address != 0 {
            // SAFETY: the range was reserved by `map_as`, and nothing uses it any more. Unmapping fails if mapping failed. Errors
            // cannot be handled here.
            unsafe {
                let _ = sys::cuMemUnmap(self.address, self.bytes);
                let _ = sys::cuMemAddressFree(self.address, self.bytes);
            }
        }
        // SAFETY: the handle is released once.
        let _ = unsafe { sys::cuMemRelease(self.handle) };
    }
}

fn location(device: &Device) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device.context.cu_device() }
}
