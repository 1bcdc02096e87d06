//! A file of tokens, one client per line.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use ring::digest::{SHA256, digest};
use subtle::ConstantTimeEq as _;

use super::AccessError;
use super::files::read;

/// Shortest token, in bytes.
const MIN_TOKEN_BYTES: usize = 16;
/// Longest name of a client, in bytes.
const MAX_NAME_BYTES: usize = 64;

/// Clients by digest of their token. Tokens themselves are not kept in memory, and digests all have the same length.
#[derive(Debug)]
pub(crate) struct Tokens {
    clients: Vec<(Arc<str>, [u8; 32])>,
}

impl Tokens {
    pub(super) fn load(path: &Path) -> Result<Tokens, AccessError> {
        let unusable = |reason: String| AccessError::Contents { path: path.to_owned(), reason };
        let text =
            String::from_utf8(read(path)?).map_err(|_| unusable("expected text in UTF-8".to_owned()))?;
        parse(&text).map_err(unusable)
    }

    /// The client of a token. Takes the same time for every token of the same length.
    pub(super) fn name(&self, token: &[u8]) -> Option<Arc<str>> {
        self.name_of(&hash(token))
    }

    /// The client of the token with this digest.
    pub(super) fn name_of(&self, given: &[u8; 32]) -> Option<Arc<str>> {
        let mut found = None;
        for (name, known) in &self.clients {
            if bool::from(known.ct_eq(given)) {
                found = Some(name);
            }
        }
        found.cloned()
    }
}

/// The SHA-256 digest of a token.
pub(super) fn hash(token: &[u8]) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest(&SHA256, token).as_ref());
    bytes
}

/// Parses lines of `NAME TOKEN`. Empty lines and lines that start with `#` are ignored. A client may have several tokens, so
/// that one can be replaced without a gap.
pub(crate) fn parse(text: &str) -> Result<Tokens, String> {
    let mut clients = Vec::new();
    let mut seen = HashSet::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let mut words = line.split_whitespace();
        let (Some(name), Some(token), None) = (words.next(), words.next(), words.next()) else {
            return Err(format!("line {number}: expected `NAME TOKEN`"));
        };
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if name.len() > MAX_NAME_BYTES || !name.bytes().all(plain) {
            return Err(format!(
                "line {number}: a name has at most {MAX_NAME_BYTES} letters, digits, dots, dashes and underscores"
            ));
        }
        if token.len() < MIN_TOKEN_BYTES {
            return Err(format!("line {number}: a token has at least {MIN_TOKEN_BYTES} characters"));
        }
        let hash = hash(token.as_bytes());
        if !seen.insert(hash) {
            return Err(format!("line {number}: an earlier line has the same token"));
        }
        clients.push((Arc::from(name), hash));
    }
    if clients.is_empty() {
        return Err("found no token; expected lines of `NAME TOKEN`".to_owned());
    }
    Ok(Tokens { clients })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn tokens_name_their_clients() {
        let tokens = parse("# clients\nengine-a 0123456789abcdef\n\n engine-b\tfedcba9876543210 \nengine-b 00000000000000000\n").unwrap();
        let name = |token: &str| tokens.name(token.as_bytes()).map(|name| name.to_string());
        assert_eq!(name("0123456789abcdef").as_deref(), Some("engine-a"));
        assert_eq!(name("fedcba9876543210").as_deref(), Some("engine-b"));
        assert_eq!(name("00000000000000000").as_deref(), Some("engine-b"));
        for wrong in ["", "0123456789abcde", "0123456789abcdeF", "engine-a"] {
            assert_eq!(name(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn a_bad_line_is_named_and_the_token_is_not_shown() {
        for (text, word) in [
            ("", "no token"),
            ("a", "line 1: expected `NAME TOKEN`"),
            ("a short", "at least 16"),
            ("a b c", "expected `NAME TOKEN`"),
            ("ä 0123456789abcdef", "line 1: a name"),
            ("a 0123456789abcdef\nb 0123456789abcdef", "line 2: an earlier line"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(word) && !error.contains("0123456789"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_tokens_or_a_reason(text in "\\PC{0,200}(\n[a-z #]{0,40}){0,4}") {
            let _ = parse(&text);
        }
    }
}
