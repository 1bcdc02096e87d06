//! Arrays that calls return: host memory with a shape and an element type, shared with numpy or torch without a copy.

#![allow(unsafe_code, reason = "the buffer protocol hands out pointers to memory")]

use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;

use bytes::{Buf as _, Bytes, BytesMut};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{ffi, intern};

use crate::dlpack;
use crate::element::Element;

/// Alignment of memory that this module allocates: a cache line.
const ALIGNMENT: usize = 64;

/// Memory of an array. Views, buffers and DLPack tensors share it.
#[derive(Debug)]
pub(crate) struct Storage {
    data: *mut u8,
    /// Owns the memory at `data`; nothing touches it through this field.
    _bytes: BytesMut,
}

// SAFETY: the memory belongs to `_bytes`, which can be sent; this type itself never reads or writes it.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}

impl Storage {
    /// Takes over the bytes if this is their only handle and elements are aligned. Otherwise copies them to aligned memory.
    fn new(bytes: Bytes, element: Element) -> Storage {
        let aligned = bytes.as_ptr().addr().is_multiple_of(element.size());
        let mut bytes = match bytes.try_into_mut() {
            Ok(own) if aligned => own,
            Ok(other) => aligned_copy(&other),
            Err(shared) => aligned_copy(&shared),
        };
        Storage { data: bytes.as_mut_ptr(), _bytes: bytes }
    }

    fn copy_of(bytes: &[u8]) -> Storage {
        let mut bytes = aligned_copy(bytes);
        Storage { data: bytes.as_mut_ptr(), _bytes: bytes }
    }

    pub(crate) const fn data(&self) -> *mut u8 {
        self.data
    }
}

fn aligned_copy(bytes: &[u8]) -> BytesMut {
    let mut copy = BytesMut::with_capacity(bytes.len() + ALIGNMENT);
    let skipped = copy.as_ptr().align_offset(ALIGNMENT);
    copy.resize(skipped, 0);
    copy.advance(skipped);
    copy.extend_from_slice(bytes);
    copy
}

/// An array in host memory, row-major.
#[pyclass(frozen, module = "expertd")]
#[derive(Debug)]
pub(crate) struct Array {
    storage: Arc<Storage>,
    element: Element,
    shape: Vec<usize>,
    /// Shape, and strides in bytes, as the buffer protocol requires them: `[ndim]` each.
    layout: Vec<ffi::Py_ssize_t>,
}

impl Array {
    /// An array over the bytes of a message; `None` if the shape has another number of bytes.
    pub(crate) fn new(bytes: Bytes, element: Element, shape: Vec<usize>) -> Option<Array> {
        (bytes.len() == shape.iter().product::<usize>() * element.size())
            .then(|| Array::over(Arc::new(Storage::new(bytes, element)), element, shape))
    }

    /// An array with a copy of these bytes; `None` if the shape has another number of bytes.
    pub(crate) fn copy_of(bytes: &[u8], element: Element, shape: Vec<usize>) -> Option<Array> {
        (bytes.len() == shape.iter().product::<usize>() * element.size())
            .then(|| Array::over(Arc::new(Storage::copy_of(bytes)), element, shape))
    }

    fn over(storage: Arc<Storage>, element: Element, shape: Vec<usize>) -> Array {
        let signed = |size: usize| ffi::Py_ssize_t::try_from(size).unwrap_or(ffi::Py_ssize_t::MAX);
        let mut layout: Vec<_> = shape.iter().map(|&size| signed(size)).collect();
        let strides =
            (0..shape.len()).map(|d| signed(shape[d + 1..].iter().product::<usize>() * element.size()));
        layout.extend(strides);
        Array { storage, element, shape, layout }
    }

    /// The elements.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: the storage has these bytes and lives as long as `self`. This is called before Python has the array, so that
        // nothing else writes to it.
        unsafe { std::slice::from_raw_parts(self.storage.data(), self.bytes()) }
    }

    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.element.size()
    }

    /// The format of the buffer protocol, or the error for bf16, which has none.
    fn format(&self) -> PyResult<&'static CStr> {
        self.element.format().ok_or_else(|| {
            PyBufferError::new_err(
                "the buffer protocol has no bf16; use torch.from_dlpack(rows), rows.numpy() with ml_dtypes installed, or \
                 rows.view('u16')",
            )
        })
    }
}

#[pymethods]
impl Array {
    /// Sizes of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Element type: "bf16", "f16", "f32", "i32" or "u16".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.element.name()
    }

    /// Bytes of all elements.
    #[getter]
    fn nbytes(&self) -> usize {
        self.bytes()
    }

    /// The same memory as elements of another type of the same size: "u16" for "bf16" and back.
    fn view(&self, dtype: &str) -> PyResult<Array> {
        let element = match (self.element, dtype) {
            (Element::Bf16 | Element::F16 | Element::Bits16, "u16") => Element::Bits16,
            (Element::Bf16 | Element::Bits16, "bf16") => Element::Bf16,
            (element, same) if element.name() == same => element,
            (element, other) => {
                return Err(PyValueError::new_err(format!(
                    "cannot view {} as {other}; 16-bit floats can be viewed as u16, and u16 as bf16",
                    element.name()
                )));
            }
        };
        Ok(Array::over(Arc::clone(&self.storage), element, self.shape.clone()))
    }

    /// The same memory as a numpy array.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        py.import(intern!(py, "expertd._arrays"))?.call_method1(intern!(py, "to_numpy"), (slf,))
    }

    /// The method that numpy calls for types that the buffer protocol does not have.
    #[pyo3(signature = (dtype = None, copy = None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        py.import(intern!(py, "expertd._arrays"))?.call_method1(intern!(py, "as_array"), (slf, dtype, copy))
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // Host memory has no streams.
        let _ = stream;
        if dl_device.is_some_and(|device| device != (1, 0)) || copy == Some(true) {
            return Err(PyBufferError::new_err(
                "answers are in host memory and are shared without a copy; copy or move the tensor afterwards",
            ));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        let memory = dlpack::Memory {
            data: self.storage.data().cast(),
            device: (dlpack::CPU, 0),
            element: self.element,
            shape: &self.shape,
        };
        dlpack::export(py, Arc::<Storage>::clone(&self.storage), &memory, versioned)
    }

    /// `(kDLCPU, 0)`.
    #[allow(clippy::unused_self, reason = "a method of DLPack's protocol")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }

    fn __len__(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    pub(crate) fn __repr__(&self) -> String {
        format!("Array(shape={:?}, dtype=\"{}\")", self.shape, self.element.name())
    }

    /// # Safety
    /// Python passes a `view` that may be written.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let array = slf.get();
        let format = array.format()?;
        let ndim = array.shape.len();
        let wants = |flag: c_int| flags & flag == flag;
        let layout = array.layout.as_ptr().cast_mut();
        // SAFETY: `view` may be written, as Python guarantees. Everything it points to belongs to `slf`, which is frozen
        // and which the reference in `obj` keeps alive until the buffer is released.
        unsafe {
            (*view).buf = array.storage.data().cast::<c_void>();
            (*view).len = ffi::Py_ssize_t::try_from(array.bytes()).unwrap_or(ffi::Py_ssize_t::MAX);
            (*view).readonly = 0;
            (*view).itemsize = array.element.size() as ffi::Py_ssize_t;
            (*view).format =
                if wants(ffi::PyBUF_FORMAT) { format.as_ptr().cast_mut() } else { std::ptr::null_mut() };
            (*view).ndim = if wants(ffi::PyBUF_ND) { ndim as c_int } else { 1 };
            (*view).shape = if wants(ffi::PyBUF_ND) { layout } else { std::ptr::null_mut() };
            (*view).strides = if wants(ffi::PyBUF_STRIDES) { layout.add(ndim) } else { std::ptr::null_mut() };
            (*view).suboffsets = std::ptr::null_mut();
            (*view).internal = std::ptr::null_mut();
            (*view).obj = slf.into_ptr();
        }
        Ok(())
    }
}
