//! The memory that packed weights lie in: a buffer of their own, or part of memory that several processes share.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use bytemuck::Pod;

use super::memory::AlignedBuffer;

/// Memory whose contents do not change as long as it lives.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// The elements of a packed matrix.
pub(crate) enum Storage<T> {
    Own(AlignedBuffer<T>),
    Shared { memory: SharedBytes, range: Range<usize> },
}

impl<T: Pod> Storage<T> {
    pub(crate) fn empty() -> Self {
        Storage::Own(AlignedBuffer::zeroed(0))
    }

    /// `None` if the range lies outside the memory, or its elements are not aligned.
    pub(crate) fn shared(memory: &SharedBytes, range: Range<usize>) -> Option<Self> {
        let bytes = (**memory).as_ref().get(range.clone())?;
        bytemuck::try_cast_slice::<u8, T>(bytes).ok()?;
        Some(Storage::Shared { memory: Arc::clone(memory), range })
    }

    /// The elements, to be overwritten.
    ///
    /// # Panics
    /// If the memory is shared.
    pub(crate) fn own_mut(&mut self) -> &mut [T] {
        match self {
            Storage::Own(buffer) => buffer,
            Storage::Shared { .. } => panic!("packed weights in shared memory do not change"),
        }
    }
}

impl<T: Pod> Deref for Storage<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Storage::Own(buffer) => buffer,
            Storage::Shared { memory, range } => {
                bytemuck::cast_slice(&(**memory).as_ref()[range.start..range.end])
            }
        }
    }
}

impl<T: Pod> fmt::Debug for Storage<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if matches!(self, Storage::Own(_)) { "own" } else { "shared" };
        write!(f, "Storage({what}, {} elements)", self.len())
    }
}
