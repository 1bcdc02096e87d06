//! Arrays that callers pass in: anything with the buffer protocol or DLPack.

#![allow(unsafe_code, reason = "the buffer protocol hands out pointers to memory")]

use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use half::{bf16, f16};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::{ffi, intern};

use crate::dlpack::{self, Imported};
use crate::element::Element;

/// Arrays up to this size are copied, which takes less time than releasing them from another thread.
const COPIED_BYTES: usize = 32 << 10;

/// An array that the caller passed.
#[derive(Debug)]
pub(crate) struct Input {
    pub(crate) element: Element,
    pub(crate) shape: Vec<usize>,
    data: Data,
}

/// Memory of an array.
#[derive(Debug)]
enum Data {
    /// Shared through the buffer protocol.
    Buffer(Contiguous),
    /// Shared through DLPack.
    Tensor(Imported),
    /// Converted from another type.
    Owned(Vec<u8>),
}

impl AsRef<[u8]> for Data {
    fn as_ref(&self) -> &[u8] {
        match self {
            Data::Buffer(buffer) => buffer.as_ref(),
            Data::Tensor(tensor) => tensor.as_ref(),
            Data::Owned(bytes) => bytes,
        }
    }
}

/// A row-major buffer. Dropping it, on any thread, releases the buffer.
struct Contiguous(PyUntypedBuffer);

impl std::fmt::Debug for Contiguous {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Contiguous({} bytes)", self.0.len_bytes())
    }
}

impl AsRef<[u8]> for Contiguous {
    fn as_ref(&self) -> &[u8] {
        let bytes = self.0.len_bytes();
        if bytes == 0 {
            return &[];
        }
        // SAFETY: the exporter keeps the memory in place until the buffer is released, which is when this is dropped, and
        // a contiguous buffer has `len_bytes` bytes there. Callers of the package are told not to write to rows while a
        // call is under way.
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast::<u8>(), bytes) }
    }
}

impl Input {
    /// Takes the array of an object; `what` names the argument in errors.
    ///
    /// # Errors
    /// TypeError or BufferError that say what was found and what to pass instead.
    pub(crate) fn take(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Input> {
        let py = object.py();
        // SAFETY: a valid reference to a Python object.
        if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
            if let Some(input) = buffer(object, what, None)? {
                return Ok(input);
            }
            // numpy has no bf16 of its own: the buffer protocol cannot describe that of ml_dtypes.
            let dtype = object.getattr(intern!(py, "dtype")).and_then(|dtype| dtype.str());
            if dtype.is_ok_and(|name| name.to_string_lossy() == "bfloat16") {
                let bits = object.call_method1(intern!(py, "view"), (intern!(py, "uint16"),))?;
                if let Some(input) = buffer(&bits, what, Some(Element::Bf16))? {
                    return Ok(input);
                }
            }
            return Err(PyTypeError::new_err(format!(
                "{what} has elements of another type; expected bf16, f16, f32, f64, int32 or int64 in native byte order"
            )));
        }
        if object.hasattr(intern!(py, "__dlpack__"))? {
            let imported = dlpack::import(object, what)?;
            return Ok(imported.into());
        }
        Err(PyTypeError::new_err(format!(
            "{what} is a {}; expected an array with the buffer protocol (numpy, memoryview) or DLPack (torch, jax)",
            object.get_type().name()?
        )))
    }

    /// The elements, little-endian and row-major.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.data.as_ref()
    }

    /// The elements as a part of a message, copied if they are few.
    pub(crate) fn into_bytes(self) -> Bytes {
        match self.data {
            Data::Owned(bytes) => bytes.into(),
            shared if shared.as_ref().len() <= COPIED_BYTES => Bytes::copy_from_slice(shared.as_ref()),
            shared => Bytes::from_owner(shared),
        }
    }

    /// Token rows `[tokens, hidden]` in bf16, f16 or f32. `dtype` is the type that 16-bit integers stand for.
    pub(crate) fn rows(mut self, dtype: Option<&str>) -> PyResult<Input> {
        match (dtype, self.element) {
            (Some("bf16"), Element::Bits16) => self.element = Element::Bf16,
            (Some("f16"), Element::Bits16) => self.element = Element::F16,
            (Some(name), element) if name != element.name() => {
                return Err(PyTypeError::new_err(format!(
                    "rows have elements of {}, and dtype says {name:?}; leave dtype out, or pass 16-bit integers with \
                     dtype \"bf16\" or \"f16\"",
                    element.name()
                )));
            }
            _ => {}
        }
        if self.element.row_type().is_none() {
            return Err(PyTypeError::new_err(format!(
                "rows have elements of {}; expected bf16, f16 or f32 (for bf16 as uint16, pass dtype=\"bf16\")",
                self.element.name()
            )));
        }
        self.expect_dimensions("rows", "[tokens, hidden]", 2)
    }

    /// Integers as int32, little-endian.
    pub(crate) fn into_i32(self, what: &str, axes: &str, dimensions: usize) -> PyResult<Input> {
        let input = self.expect_dimensions(what, axes, dimensions)?;
        let bytes = match input.element {
            Element::I32 => return Ok(input),
            Element::I64 => {
                let mut narrow = Vec::with_capacity(input.bytes().len() / 2);
                for value in input.bytes().as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)) {
                    let value = i32::try_from(value).map_err(|_| {
                        PyValueError::new_err(format!("{what} has {value}, which is not an int32"))
                    })?;
                    narrow.extend_from_slice(&value.to_le_bytes());
                }
                narrow
            }
            other => {
                return Err(PyTypeError::new_err(format!(
                    "{what} has elements of {}; expected int32 or int64",
                    other.name()
                )));
            }
        };
        Ok(Input { element: Element::I32, shape: input.shape, data: Data::Owned(bytes) })
    }

    /// Floats as f32, little-endian.
    pub(crate) fn into_f32(self, what: &str, axes: &str, dimensions: usize) -> PyResult<Input> {
        let input = self.expect_dimensions(what, axes, dimensions)?;
        let halves = |widen: fn([u8; 2]) -> f32| {
            input.bytes().as_chunks::<2>().0.iter().flat_map(|b| widen(*b).to_le_bytes()).collect::<Vec<u8>>()
        };
        let bytes = match input.element {
            Element::F32 => return Ok(input),
            Element::Bf16 => halves(|b| bf16::from_le_bytes(b).to_f32()),
            Element::F16 => halves(|b| f16::from_le_bytes(b).to_f32()),
            Element::F64 => {
                let values = input.bytes().as_chunks::<8>().0.iter();
                values.flat_map(|b| (f64::from_le_bytes(*b) as f32).to_le_bytes()).collect()
            }
            other => {
                return Err(PyTypeError::new_err(format!(
                    "{what} has elements of {}; expected f32, bf16, f16 or f64",
                    other.name()
                )));
            }
        };
        Ok(Input { element: Element::F32, shape: input.shape, data: Data::Owned(bytes) })
    }

    fn expect_dimensions(self, what: &str, axes: &str, dimensions: usize) -> PyResult<Input> {
        if self.shape.len() == dimensions {
            return Ok(self);
        }
        Err(PyValueError::new_err(format!("{what} has shape {:?}; expected {axes}", self.shape)))
    }
}

/// An array of the caller that receives an answer's rows.
#[derive(Debug)]
pub(crate) struct Output {
    object: Py<PyAny>,
    memory: Input,
    /// Whether the caller has the array back, so that nothing may be copied into it. Held while rows are copied.
    is_given_back: Mutex<bool>,
}

impl Output {
    /// Takes an array of the shape and type of `rows`. `dtype` is the type that 16-bit integers stand for.
    ///
    /// # Errors
    /// TypeError, ValueError or BufferError if it is not such an array, or cannot be written to.
    pub(crate) fn take(object: &Bound<'_, PyAny>, rows: &Input, dtype: Option<&str>) -> PyResult<Output> {
        let mut memory = Input::take(object, "out")?;
        if memory.element == Element::Bits16 && dtype == Some(rows.element.name()) {
            memory.element = rows.element;
        }
        if memory.element != rows.element || memory.shape != rows.shape {
            return Err(PyValueError::new_err(format!(
                "out is {} {:?}; expected {} {:?}, as rows",
                memory.element.name(),
                memory.shape,
                rows.element.name(),
                rows.shape
            )));
        }
        if matches!(&memory.data, Data::Buffer(buffer) if buffer.0.readonly()) {
            return Err(PyBufferError::new_err("out cannot be written to; pass an array that can"));
        }
        Ok(Output { object: object.clone().unbind(), memory, is_given_back: Mutex::new(false) })
    }

    /// Gives the array back to the caller of a cancelled call: waits for a copy that is under way, and prevents later ones.
    pub(crate) fn give_back(&self) {
        *self.is_given_back.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// Copies an answer's rows into the array, unless the caller has it back; `None` if they have another size.
    pub(crate) fn fill(&self, rows: &[u8]) -> Option<()> {
        let is_given_back = self.is_given_back.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_given_back {
            return Some(());
        }
        let to = match &self.memory.data {
            Data::Buffer(buffer) => buffer.0.buf_ptr().cast::<u8>(),
            Data::Tensor(tensor) => tensor.data().cast_mut(),
            Data::Owned(_) => return None,
        };
        if rows.len() != self.memory.bytes().len() {
            return None;
        }
        // SAFETY: the exporter keeps these bytes in place until `memory` is dropped, and they can be written to (checked for
        // buffers; DLPack's consumers may write). Callers are told not to use `out` before the call has returned or was
        // cancelled, and `give_back` waits for this copy. The answer's
        // memory belongs to this process or to a session's region, never to the caller.
        unsafe { std::ptr::copy_nonoverlapping(rows.as_ptr(), to, rows.len()) };
        Some(())
    }

    /// The caller's array.
    pub(crate) fn object(&self, py: Python<'_>) -> Py<PyAny> {
        self.object.clone_ref(py)
    }
}

impl From<Imported> for Input {
    fn from(imported: Imported) -> Input {
        Input { element: imported.element, shape: imported.shape.clone(), data: Data::Tensor(imported) }
    }
}

/// The array behind the buffer protocol; `None` if its elements have no type of this package.
fn buffer(object: &Bound<'_, PyAny>, what: &str, element: Option<Element>) -> PyResult<Option<Input>> {
    let Ok(buffer) = PyUntypedBuffer::get(object) else { return Ok(None) };
    let Some(found) = Element::from_format(buffer.format()) else { return Ok(None) };
    let element = element.unwrap_or(found);
    if !buffer.is_c_contiguous() {
        return Err(PyBufferError::new_err(format!(
            "{what} is not contiguous; expected row-major memory: pass numpy.ascontiguousarray({what})"
        )));
    }
    let shape = buffer.shape().to_vec();
    Ok(Some(Input { element, shape, data: Data::Buffer(Contiguous(buffer)) }))
}
