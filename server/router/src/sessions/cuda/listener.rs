//! What the socket of a CUDA session carries.

use std::io;
use std::os::unix::net::UnixStream;

use expertd_session::cuda::wire::{MAX_PREPARE_FRAME, PrepareReply, PreparedCall};
use expertd_session::socket;
use expertd_session::wire::frame;

use super::super::connection::unreadable;
use super::super::listener::Shared;
use super::state::CudaSession;

impl Shared {
    /// Answers frames of an open CUDA session until the socket ends; returns why the service ends it.
    pub(in crate::sessions) fn follow_cuda(
        &self,
        socket: &UnixStream,
        session: &CudaSession,
    ) -> io::Result<Option<String>> {
        loop {
            match socket::receive(socket, MAX_PREPARE_FRAME) {
                Ok(Some((frame::GET_MODEL, _))) => self.send_model(socket)?,
                Ok(Some((frame::PREPARE, payload))) => {
                    let reply = match self.prepare(session, &payload) {
                        Ok(reply) => bytemuck::bytes_of(&reply).to_vec(),
                        Err(reason) => {
                            let mut reply = bytemuck::bytes_of(&PrepareReply { first: 0, count: 0 }).to_vec();
                            reply.extend_from_slice(reason.as_bytes());
                            reply
                        }
                    };
                    socket::send(socket, frame::PREPARED, &reply)?;
                }
                Ok(Some((kind, _))) => {
                    return Ok(Some(format!(
                        "a frame of kind {kind} on the socket of an open CUDA session; expected PREPARE or GET_MODEL"
                    )));
                }
                Ok(None) => return Ok(None),
                Err(error) => return Ok(Some(unreadable(&error))),
            }
        }
    }

    fn prepare(&self, session: &CudaSession, payload: &[u8]) -> Result<PrepareReply, String> {
        let (records, rest) = payload.as_chunks::<{ size_of::<PreparedCall>() }>();
        if !rest.is_empty() || records.is_empty() {
            return Err(format!(
                "a frame of {} bytes, expected one or more records of {} bytes",
                payload.len(),
                size_of::<PreparedCall>()
            ));
        }
        let calls: Vec<PreparedCall> =
            records.iter().map(|record| bytemuck::pod_read_unaligned(record)).collect();
        let first = session.prepare(&calls, &*self.steps)?;
        Ok(PrepareReply { first, count: calls.len() as u32 })
    }
}
