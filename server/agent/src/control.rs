//! The socket between the router and an agent, its standard input: the router says whom the agent serves, the agent how it can be
//! reached, and the end of the socket ends the agent.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Instant;

use bytemuck::{Pod, Zeroable};
use expertd_session::socket;
use expertd_shm::descriptors::send_fds;

use expertd_network::{Card, Transports};

const SETUP: u32 = 1;
const READY: u32 = 2;
const ENDED: u32 = 3;
/// Largest frame, in bytes.
const MAX_FRAME: usize = 1 << 20;

/// The router's description of the session that an agent serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    /// The client's card.
    pub client: Card,
    /// Bytes of the row area.
    pub rows_bytes: u64,
    /// Largest number of calls in flight.
    pub calls: u32,
    /// How UCX is set up.
    pub transports: Transports,
    /// Where NIXL is.
    pub library: Option<PathBuf>,
}

/// An agent's message once it can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Its card.
    pub card: Card,
    /// Number of the session.
    pub session: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// How long threads should spin.
    pub spin_us: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SetupHead {
    rows_address: u64,
    rows_bytes: u64,
    calls: u32,
    has_ports: u32,
    ports: [u32; 2],
    /// Lengths of metadata, transports, device and library.
    lengths: [u32; 4],
    ipv6: u32,
    reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ReadyHead {
    rows_address: u64,
    session: u64,
    hidden: u32,
    spin_us: u32,
}

/// Tells an agent whom it serves, and passes it the socket of its session.
///
/// # Errors
/// If the agent is gone.
pub fn send_setup(control: &UnixStream, setup: &Setup, session: &UnixStream) -> io::Result<()> {
    let Setup { client, transports, .. } = setup;
    let library = setup.library.as_ref().map_or_else(String::new, |path| path.to_string_lossy().into_owned());
    let parts = [
        client.metadata.as_slice(),
        transports.transports.as_deref().unwrap_or_default().as_bytes(),
        transports.device.as_deref().unwrap_or_default().as_bytes(),
        library.as_bytes(),
    ];
    let (first, last) = transports.ports.unwrap_or_default();
    let head = SetupHead {
        rows_address: client.rows_address,
        rows_bytes: setup.rows_bytes,
        calls: setup.calls,
        has_ports: transports.ports.is_some().into(),
        ports: [first.into(), last.into()],
        lengths: parts.map(|part| part.len() as u32),
        ipv6: transports.ipv6.into(),
        reserved: 0,
    };
    let mut payload = bytemuck::bytes_of(&head).to_vec();
    parts.iter().for_each(|part| payload.extend_from_slice(part));
    socket::send(control, SETUP, &payload)?;
    send_fds(control, &[session.as_fd()])
}

/// Receives what [`send_setup`] sent.
///
/// # Errors
/// If the router is gone or sent anything else.
pub fn receive_setup(control: &UnixStream) -> io::Result<(Setup, UnixStream)> {
    let payload = expect(socket::receive(control, MAX_FRAME)?, SETUP)?.map_err(io::Error::other)?;
    let (head, mut rest) = split::<SetupHead>(&payload)?;
    let mut part = |bytes: u32| {
        let (own, others) = rest.split_at_checked(bytes as usize).ok_or_else(short)?;
        rest = others;
        Ok::<_, io::Error>(own.to_vec())
    };
    let metadata = part(head.lengths[0])?;
    let mut text = |bytes| Ok::<_, io::Error>(String::from_utf8_lossy(&part(bytes)?).into_owned());
    let [transports, device, library] =
        [text(head.lengths[1])?, text(head.lengths[2])?, text(head.lengths[3])?];
    let given = |text: String| (!text.is_empty()).then_some(text);
    let ports = head.ports.map(|port| u16::try_from(port).unwrap_or(0));
    let setup = Setup {
        client: Card { metadata, rows_address: head.rows_address },
        rows_bytes: head.rows_bytes,
        calls: head.calls,
        transports: Transports {
            transports: given(transports),
            device: given(device),
            ports: (head.has_ports != 0).then_some((ports[0], ports[1])),
            ipv6: head.ipv6 != 0,
        },
        library: given(library).map(PathBuf::from),
    };
    let session: OwnedFd = socket::receive_one(control, "the router", "the session's socket")?;
    Ok((setup, session.into()))
}

/// Tells the router how the agent can be reached.
///
/// # Errors
/// If the router is gone.
pub fn send_ready(control: &UnixStream, ready: &Ready) -> io::Result<()> {
    let head = ReadyHead {
        rows_address: ready.card.rows_address,
        session: ready.session,
        hidden: ready.hidden,
        spin_us: ready.spin_us,
    };
    let mut payload = bytemuck::bytes_of(&head).to_vec();
    payload.extend_from_slice(&ready.card.metadata);
    socket::send(control, READY, &payload)
}

/// Receives what [`send_ready`] sent, until `deadline`.
///
/// # Errors
/// The agent's sentence if it has ended, or why it cannot be understood.
pub fn receive_ready(control: &UnixStream, deadline: Instant) -> io::Result<Ready> {
    let received = socket::receive_until(control, MAX_FRAME, deadline);
    control.set_read_timeout(None)?;
    let payload = expect(received?, READY)?.map_err(io::Error::other)?;
    let (head, metadata) = split::<ReadyHead>(&payload)?;
    Ok(Ready {
        card: Card { metadata: metadata.to_vec(), rows_address: head.rows_address },
        session: head.session,
        hidden: head.hidden,
        spin_us: head.spin_us,
    })
}

/// Tells the router why the session has ended.
pub fn send_ended(control: &UnixStream, reason: &str) {
    // A router that is gone needs no reason.
    let _ = socket::send(control, ENDED, reason.as_bytes());
}

/// Waits for the end of an agent; its sentence, if it sent one.
#[must_use]
pub fn receive_ended(control: &UnixStream) -> Option<String> {
    match socket::receive(control, MAX_FRAME) {
        Ok(Some((ENDED, text))) => Some(String::from_utf8_lossy(&text).into_owned()),
        _ => None,
    }
}

/// The payload of a frame of this kind, or the sentence of an agent that has ended.
fn expect(frame: Option<(u32, Vec<u8>)>, kind: u32) -> io::Result<Result<Vec<u8>, String>> {
    match frame {
        Some((found, payload)) if found == kind => Ok(Ok(payload)),
        Some((ENDED, text)) => Ok(Err(String::from_utf8_lossy(&text).into_owned())),
        Some((found, _)) => Ok(Err(format!("a frame of kind {found}, expected {kind}"))),
        None => {
            Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the other end of the control socket is gone"))
        }
    }
}

fn split<T: Pod>(payload: &[u8]) -> io::Result<(T, &[u8])> {
    let (head, rest) = payload.split_at_checked(size_of::<T>()).ok_or_else(short)?;
    Ok((bytemuck::pod_read_unaligned(head), rest))
}

fn short() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a frame of the control socket is too short")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::*;

    #[test]
    fn setup_and_answer_arrive_as_they_were_sent() {
        let (router, agent) = UnixStream::pair().unwrap();
        let (session, _service) = UnixStream::pair().unwrap();
        let card = Card { metadata: b"metadata".to_vec(), rows_address: 1 << 40 };
        for (ports, library) in [(Some((1, u16::MAX)), Some(PathBuf::from("/lib"))), (None, None)] {
            let transports = Transports {
                transports: Some("^sm".into()),
                device: library.as_ref().map(|_| "lo".into()),
                ports,
                ipv6: ports.is_some(),
            };
            let setup = Setup { client: card.clone(), rows_bytes: 4096, calls: 4, transports, library };
            send_setup(&router, &setup, &session).unwrap();
            assert_eq!(receive_setup(&agent).unwrap().0, setup);
        }
        let ready = Ready { card, session: 7, hidden: 64, spin_us: 3 };
        send_ready(&agent, &ready).unwrap();
        let soon = Instant::now() + Duration::from_secs(10);
        assert_eq!(receive_ready(&router, soon).unwrap(), ready);
        send_ended(&agent, "no transport");
        assert!(receive_ready(&router, soon).unwrap_err().to_string().contains("no transport"));
        send_ended(&agent, "over");
        assert_eq!(receive_ended(&router).as_deref(), Some("over"));
        drop(agent);
        assert!(receive_ready(&router, soon).is_err());
        assert_eq!(receive_ended(&router), None);
    }
}
