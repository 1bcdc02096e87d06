//! DLPack's C structs (<https://dmlc.github.io/dlpack/latest/c_api.html>) and the capsules that carry them.
//!
//! Arrays are imported through the unversioned struct, which every producer can make, and exported through the struct that the consumer
//! requests.

#![allow(unsafe_code, reason = "DLPack is a C interface: structs behind pointers in capsules")]

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::{ffi, intern};

use crate::element::Element;

pub(crate) const CPU: i32 = 1;
/// Host memory that is pinned for CUDA.
const CUDA_HOST: i32 = 3;
const UNUSED: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";
const UNUSED_VERSIONED: &CStr = c"dltensor_versioned";
/// The DLPack version of the versioned struct.
const VERSION: Version = Version { major: 1, minor: 0 };

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    /// Strides in elements; null means row-major.
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct ManagedVersioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// A tensor that another library owns, in host memory and row-major.
#[derive(Debug)]
pub(crate) struct Imported {
    managed: NonNull<c_void>,
    data: *const u8,
    bytes: usize,
    pub(crate) element: Element,
    pub(crate) shape: Vec<usize>,
}

// SAFETY: `managed` and `data` belong to this value alone until it is dropped, the memory behind `data` is only read, and
// DLPack allows the deleter on any thread.
unsafe impl Send for Imported {}
// SAFETY: `managed` and `data` stay valid until the value is dropped, and shared access only reads.
unsafe impl Sync for Imported {}

impl AsRef<[u8]> for Imported {
    fn as_ref(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: the producer keeps `bytes` bytes at `data` alive until the deleter runs, which is when this is dropped.
        // Callers of the package are told not to write to rows while a call is under way.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let managed = self.managed.cast::<Managed>();
        // Producers in Python may drop references in their deleter, so it runs attached to the interpreter. Without an
        // interpreter, at exit, the memory goes with the process.
        Python::try_attach(|_| {
            // SAFETY: the struct came from a capsule that was marked as used, so this is its only owner and calls the
            // deleter once.
            unsafe {
                if let Some(deleter) = managed.as_ref().deleter {
                    deleter(managed.as_ptr());
                }
            }
        });
    }
}

impl Imported {
    /// Address of the first element.
    pub(crate) const fn data(&self) -> *const u8 {
        self.data
    }
}

/// Takes the tensor of an object that has `__dlpack__`.
///
/// # Errors
/// A message for the user if it lies on a device, is not row-major or has a type that no element has.
pub(crate) fn import(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Imported> {
    let py = object.py();
    let (device, _): (i32, i32) = object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
    if device != CPU && device != CUDA_HOST {
        return Err(PyBufferError::new_err(format!(
            "{what} lies on a device (DLPack device type {device}); expected host memory: pass {what}.cpu(), or make the client with \
             session=\"cuda\""
        )));
    }
    let capsule = object.call_method0(intern!(py, "__dlpack__"))?;
    // SAFETY: `capsule` is a valid reference to a Python object; both functions check that it is a capsule of the name.
    let managed = unsafe {
        let pointer = ffi::PyCapsule_GetPointer(capsule.as_ptr(), UNUSED.as_ptr());
        let Some(managed) = NonNull::new(pointer) else { return Err(PyErr::fetch(py)) };
        // A capsule with this name does not free its tensor; the caller of this function frees it.
        if ffi::PyCapsule_SetName(capsule.as_ptr(), USED.as_ptr()) != 0 {
            return Err(PyErr::fetch(py));
        }
        managed
    };
    // From now on a drop calls the deleter.
    let mut imported =
        Imported { managed, data: ptr::null(), bytes: 0, element: Element::F32, shape: Vec::new() };
    // SAFETY: the capsule's name says that this is a `DLManagedTensor`; its shape and strides have `ndim` entries.
    let (tensor, shape, strides) = unsafe {
        let tensor = &managed.cast::<Managed>().as_ref().tensor;
        let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
        let shape = if ndim == 0 { &[][..] } else { std::slice::from_raw_parts(tensor.shape, ndim) };
        let strides =
            (!tensor.strides.is_null() && ndim > 0).then(|| std::slice::from_raw_parts(tensor.strides, ndim));
        (tensor, shape, strides)
    };
    let Some(element) = Element::from_dlpack(tensor.code, tensor.bits).filter(|_| tensor.lanes == 1) else {
        return Err(PyBufferError::new_err(format!(
            "{what} has DLPack type code {} with {} bits; expected bf16, f16, f32, f64, int32 or int64",
            tensor.code, tensor.bits
        )));
    };
    imported.shape = shape.iter().map(|&size| usize::try_from(size).unwrap_or(0)).collect();
    if strides.is_some_and(|strides| !row_major(&imported.shape, strides)) {
        return Err(PyBufferError::new_err(format!(
            "{what} is not contiguous; expected row-major memory: pass {what}.contiguous()"
        )));
    }
    imported.element = element;
    imported.bytes = imported.shape.iter().product::<usize>() * element.size();
    imported.data = tensor.data.cast::<u8>().wrapping_add(usize::try_from(tensor.byte_offset).unwrap_or(0));
    Ok(imported)
}

fn row_major(shape: &[usize], strides: &[i64]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut expected = 1;
    for (&size, &stride) in shape.iter().zip(strides).rev() {
        // The stride of a dimension with one entry is never used.
        if size > 1 && usize::try_from(stride) != Ok(expected) {
            return false;
        }
        expected *= size;
    }
    true
}

/// An exported struct and the data to which it points. The struct is the first field, so that its address is that of the whole.
#[repr(C)]
struct Export<M> {
    managed: M,
    _shape: Vec<i64>,
    _owner: Owner,
}

/// The owner of exported memory.
pub(crate) type Owner = Arc<dyn Any + Send + Sync>;

/// Memory to export, row-major.
pub(crate) struct Memory<'a> {
    pub(crate) data: *mut c_void,
    /// DLPack's type and number of the device.
    pub(crate) device: (i32, i32),
    pub(crate) element: Element,
    pub(crate) shape: &'a [usize],
}

/// A capsule for `__dlpack__` of memory that `owner` keeps alive.
pub(crate) fn export<'py>(
    py: Python<'py>,
    owner: Owner,
    memory: &Memory<'_>,
    versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let shape = memory.shape.iter().map(|&size| i64::try_from(size).unwrap_or(i64::MAX)).collect();
    let (code, bits) = memory.element.dlpack();
    let tensor = |shape: &mut Vec<i64>| Tensor {
        data: memory.data,
        device_type: memory.device.0,
        device_id: memory.device.1,
        ndim: i32::try_from(shape.len()).unwrap_or(i32::MAX),
        code,
        bits,
        lanes: 1,
        shape: shape.as_mut_ptr(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    };
    if versioned {
        let managed = |tensor| ManagedVersioned {
            version: VERSION,
            context: ptr::null_mut(),
            deleter: Some(delete_versioned),
            flags: 0,
            tensor,
        };
        let pointer = leak(shape, owner, |shape| managed(tensor(shape)));
        // SAFETY: `pointer` begins with its `ManagedVersioned` and is freed by `drop_versioned` or the consumer's deleter.
        unsafe { capsule(py, pointer, UNUSED_VERSIONED, drop_versioned) }
    } else {
        let managed = |tensor| Managed { tensor, context: ptr::null_mut(), deleter: Some(delete) };
        let pointer = leak(shape, owner, |shape| managed(tensor(shape)));
        // SAFETY: as above, with `Managed` and `drop_unused`.
        unsafe { capsule(py, pointer, UNUSED, drop_unused) }
    }
}

/// Leaks a struct with its shape and its memory, and returns its address. The struct's `context` is not needed, because the struct is
/// the first field of the leaked value.
fn leak<M>(mut shape: Vec<i64>, owner: Owner, managed: impl FnOnce(&mut Vec<i64>) -> M) -> *mut c_void {
    let managed = managed(&mut shape);
    let export = Export { managed, _shape: shape, _owner: owner };
    Box::into_raw(Box::new(export)).cast()
}

/// # Safety
/// `pointer` is owned by the capsule from now on, and `destructor` frees it.
unsafe fn capsule<'py>(
    py: Python<'py>,
    pointer: *mut c_void,
    name: &'static CStr,
    destructor: ffi::PyCapsule_Destructor,
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the pointer is not null and the name lives for ever; a null result is an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor))) }
}

/// # Safety
/// `managed` points to an `Export<M>` from [`leak`] that nothing else frees.
unsafe fn free<M>(managed: *mut c_void) {
    // SAFETY: as the caller says; the struct is the first field of `Export`, which is `repr(C)`, so the addresses agree.
    drop(unsafe { Box::from_raw(managed.cast::<Export<M>>()) });
}

unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: consumers call the deleter once, with the struct that they got from `export`.
    unsafe { free::<Managed>(managed.cast()) }
}

unsafe extern "C" fn delete_versioned(managed: *mut ManagedVersioned) {
    // SAFETY: as above.
    unsafe { free::<ManagedVersioned>(managed.cast()) }
}

/// Frees the tensor of a capsule that no consumer took.
unsafe extern "C" fn drop_unused(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the capsule that is being destroyed; a consumer would have renamed it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, UNUSED.as_ptr()) == 1 {
            free::<Managed>(ffi::PyCapsule_GetPointer(capsule, UNUSED.as_ptr()));
        }
    }
}

unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, UNUSED_VERSIONED.as_ptr()) == 1 {
            free::<ManagedVersioned>(ffi::PyCapsule_GetPointer(capsule, UNUSED_VERSIONED.as_ptr()));
        }
    }
}
