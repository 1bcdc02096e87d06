//! What `expertd doctor` and the start of a service find of NIXL.

use std::path::Path;

use expertd_session::memory::SessionMemory;

use crate::endpoint::{Endpoint, Transports};
use crate::library::{Library, NetworkError};

/// Says which NIXL is found, and that it has a transport on this machine.
///
/// # Errors
/// Why it cannot be used.
pub fn probe(place: Option<&Path>) -> Result<String, NetworkError> {
    let library = Library::open(place)?;
    let memory = SessionMemory::create(1, 1)?.0;
    let end = Endpoint::new(&library, "expertd-probe", &Transports::default(), memory.rows().clone())?;
    let card = end.card()?;
    Ok(format!("{}, {} bytes of metadata", library.describe(), card.metadata.len()))
}
