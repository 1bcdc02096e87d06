//! Construction of HTTP/2 frames that no well-behaved client would send.

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;
pub const ACK: u8 = 1;
pub const END_HEADERS: u8 = 4;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A frame with its header.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let [_, a, b, c] = (payload.len() as u32).to_be_bytes();
    let mut bytes = vec![a, b, c, kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// The preface and a SETTINGS frame with the given settings.
pub fn hello(settings: &[(u16, u32)]) -> Vec<u8> {
    let mut payload = Vec::new();
    for (name, value) in settings {
        payload.extend(name.to_be_bytes());
        payload.extend(value.to_be_bytes());
    }
    [PREFACE, &frame(SETTINGS, 0, 0, &payload)].concat()
}

/// A header as a literal without indexing.
fn literal(block: &mut Vec<u8>, name: &str, value: &str) {
    block.push(0);
    for text in [name, value] {
        // Lengths from 127 on continue in the next bytes.
        if text.len() < 127 {
            block.push(text.len() as u8);
        } else {
            block.push(127);
            let mut rest = text.len() - 127;
            while rest >= 128 {
                block.push((rest % 128) as u8 | 128);
                rest /= 128;
            }
            block.push(rest as u8);
        }
        block.extend(text.as_bytes());
    }
}

/// The header block of a call.
pub fn call_headers(path: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    .iter()
    .chain(more)
    {
        literal(&mut block, name, value);
    }
    block
}

/// HEADERS that begin a call.
pub fn call(stream: u32, path: &str, more: &[(&str, &str)]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, &call_headers(path, more))
}

/// Writes bytes. Returns whether the peer still accepts them.
pub async fn send(socket: &mut TcpStream, bytes: &[u8]) -> bool {
    socket.write_all(bytes).await.is_ok()
}
