//! A session that was just opened: its memory, rings and socket, before anything uses them.

use std::os::unix::net::UnixStream;

use expertd_shm::region::{RegionError, SharedRegion, SharedSlice};
use expertd_shm::ring::{RingConsumer, RingProducer};
use expertd_shm::wait::Doorbell;

use super::{Opening, SessionError, SessionOptions};
use crate::wire::{CompletionRecord, KIND_HOST, Open, Opened, RegionLayout, RequestRecord, VERSION, frame};

/// The client's ends of a host session. [`Session`](super::Session) is made of them; relays to other transports use them as they are.
#[derive(Debug)]
pub struct SessionParts {
    /// The service's description of the session.
    pub opened: Opened,
    /// An encoded `expertd.v1.GetModelResponse`.
    pub model: Vec<u8>,
    /// The row area.
    pub rows: SharedSlice<u8>,
    /// Requests to the service.
    pub requests: RingProducer<RequestRecord>,
    /// Completions from the service.
    pub completions: RingConsumer<CompletionRecord>,
    /// The doorbell to ring after a request was pushed.
    pub service_bell: Doorbell,
    /// The doorbell that the service rings.
    pub client_bell: Doorbell,
    /// The socket. Its end is the session's end; while it is open, the region keeps its contents.
    pub socket: UnixStream,
}

impl SessionParts {
    /// Opens a session over `socket`, which errors call `name`.
    ///
    /// # Errors
    /// If the service refuses the session, or sends what is no session of this protocol.
    pub fn open(socket: UnixStream, name: &str, options: &SessionOptions) -> Result<Self, SessionError> {
        Self::begin(Opening::over(socket, name, options.timeout), options)
    }

    pub(crate) fn begin(mut opening: Opening<'_>, options: &SessionOptions) -> Result<Self, SessionError> {
        let open = Open {
            version: VERSION,
            kind: KIND_HOST,
            rows_bytes: options.rows_bytes as u64,
            calls: options.calls,
            reserved: 0,
        };
        opening.send(frame::GET_MODEL, &[]);
        opening.send(frame::OPEN, bytemuck::bytes_of(&open));
        let model = opening.expect(frame::MODEL, "MODEL")?;
        let opened: Opened = opening.expect_record(frame::OPENED, "OPENED")?;
        if (opened.version, opened.kind) != (VERSION, KIND_HOST) {
            return Err(SessionError::Protocol(format!(
                "a session of version {} and kind {}, expected version {VERSION} and kind {KIND_HOST}",
                opened.version, opened.kind
            )));
        }
        let rows_bytes = usize::try_from(opened.rows_bytes).unwrap_or(usize::MAX);
        let layout = RegionLayout::new(opened.calls, rows_bytes)?;
        let offsets =
            [layout.bytes, layout.rows, layout.service_bell, layout.client_bell].map(|at| at as u64);
        let told =
            [opened.region_bytes, opened.rows_offset, opened.service_bell_offset, opened.client_bell_offset];
        if offsets != told {
            return Err(SessionError::Protocol(format!(
                "a layout with offsets {told:?}, expected {offsets:?}; client and service must have the same version"
            )));
        }
        let region = SharedRegion::from_fd(opening.receive_region()?, layout.bytes)?;
        let bell = |offset| Ok::<_, RegionError>(Doorbell::new(region.slice(offset, 1)?));
        Ok(SessionParts {
            opened,
            model,
            rows: region.slice(layout.rows, layout.rows_bytes)?,
            requests: RingProducer::new(layout.requests.memory(&region)?)?,
            completions: RingConsumer::new(layout.completions.memory(&region)?)?,
            service_bell: bell(layout.service_bell)?,
            client_bell: bell(layout.client_bell)?,
            socket: opening.finish()?,
        })
    }
}
