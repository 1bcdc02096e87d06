//! Common parts of the client commands: connections, the model's description, error messages.

use std::borrow::Cow;
use std::fmt::Display;
use std::path::Path;

use expertd_client::transport::{self, Channel, ConnectError, Credentials};
use expertd_client::with_address_hint;
use expertd_proto::retry_delay;
use expertd_proto::transport::CONTROL_MESSAGE_BYTES;
use expertd_proto::v1::moe_client::MoeClient;
use expertd_proto::v1::{GetModelRequest, GetModelResponse, Receipt};
use tonic::Status;
use tonic_types::StatusExt as _;

use super::exit::CommandError;
use expertd_telemetry::code_name;

/// Default address of the public API.
pub const DEFAULT_ADDRESS: &str = "127.0.0.1:50051";

/// The error of a call that ended with a status.
pub(crate) fn call_failed(call: impl Display, status: &Status) -> CommandError {
    let way_out = if status.code() == tonic::Code::Unauthenticated {
        "; --token-file FILE sends a token, --tls-cert FILE --tls-key FILE a certificate"
    } else {
        ""
    };
    CommandError::failed(format!("{call} failed: {}{way_out}", describe(status)))
}

/// Reads a text file.
pub(crate) fn read(path: &Path) -> Result<String, CommandError> {
    std::fs::read_to_string(path)
        .map_err(|error| CommandError::usage(format!("cannot read {}: {error}", path.display())))
}

/// Connects to `HOST:PORT`, `http://HOST:PORT` or `unix:/PATH`, over TLS if the credentials say so.
///
/// # Errors
/// If the address is malformed, a file cannot be used, or the connection fails.
pub async fn connect(address: &str, credentials: &Credentials) -> Result<MoeClient<Channel>, CommandError> {
    Ok(MoeClient::new(transport::connect_with(address, credentials).await.map_err(not_connected)?))
}

/// A malformed address and a file that cannot be used are errors of usage; a service that does not answer is none.
pub(crate) fn not_connected(error: ConnectError) -> CommandError {
    match error {
        ConnectError::Address { .. } | ConnectError::Credentials { .. } => CommandError::usage(error),
        ConnectError::Unreachable { .. } => CommandError::failed(error),
    }
}

/// Gets the description of a model (of the only one if `name` is empty) and raises the client's limit for answers to what
/// the model's largest request needs. The client does not limit requests: the service's error for a large one is more
/// precise.
pub async fn get_model(
    client: MoeClient<Channel>,
    name: &str,
) -> Result<(MoeClient<Channel>, GetModelResponse), CommandError> {
    let mut client = client;
    let model = client
        .get_model(GetModelRequest { name: name.to_owned() })
        .await
        .map_err(|status| call_failed("GetModel", &explained(status)))?
        .into_inner();
    let limit = model.limits.as_ref().map_or(0, |limits| limits.max_message_bytes);
    let limit = usize::try_from(limit).unwrap_or(usize::MAX).max(CONTROL_MESSAGE_BYTES);
    Ok((client.max_decoding_message_size(limit), model))
}

/// Adds a hint to the status if the address does not serve models at all.
fn explained(status: Status) -> Status {
    if status.code() != tonic::Code::Unimplemented {
        return with_address_hint(status);
    }
    Status::unimplemented(format!(
        "this address does not serve models; use the public address (`serve --listen`, default {DEFAULT_ADDRESS}), not \
         that of Admin or metrics"
    ))
}

/// A service's text for a terminal: control characters are escaped, so that it cannot move the cursor or change the terminal's
/// state.
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    /// Marks that reorder the text after them.
    const REORDERING: [std::ops::RangeInclusive<char>; 2] =
        ['\u{202a}'..='\u{202e}', '\u{2066}'..='\u{2069}'];
    let is_harmful = |c: char| c.is_control() || REORDERING.iter().any(|marks| marks.contains(&c));
    if !text.contains(is_harmful) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if is_harmful(c) { safe.extend(c.escape_default()) } else { safe.push(c) }
    }
    Cow::Owned(safe)
}

/// Formats a status in one line: message, code, invalid fields and retry delay.
#[must_use]
pub fn describe(status: &Status) -> String {
    let mut text = format!("{} ({})", printable(status.message()), code_name(status.code() as u32));
    if let Some(bad) = status.get_details_bad_request() {
        // The service's own messages already contain the descriptions.
        let is_new = |text: &str| !status.message().contains(text);
        for violation in bad.field_violations.iter().filter(|violation| is_new(&violation.description)) {
            let (field, description) = (printable(&violation.field), printable(&violation.description));
            text.push_str(&format!("; {field}: {description}"));
        }
    }
    if let Some(delay) = retry_delay(status) {
        text.push_str(&format!("; retry after {delay:?}"));
    }
    text
}

/// The steps that computed an answer, in words.
#[must_use]
pub fn steps_in_words(receipt: &Receipt) -> String {
    let list = |numbers: Vec<String>| numbers.join(", ");
    let steps = list(receipt.steps.iter().map(u64::to_string).collect());
    let tokens = list(receipt.tokens_per_rank.iter().map(u32::to_string).collect());
    match receipt.steps.len() {
        0 => "in no step".to_owned(),
        1 => format!("in step {steps}, tokens per rank {tokens}"),
        _ => format!("in steps {steps}, tokens per rank {tokens}"),
    }
}

/// Value of a `--routing` flag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum RoutingSource {
    /// The service runs the model's gate
    #[default]
    Gate,
    /// The recorded ids and weights are sent with the rows and applied verbatim
    Recorded,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tonic::Code;
    use tonic_types::ErrorDetails;

    use super::*;
    use crate::exit::USAGE;

    #[test]
    fn control_characters_of_a_service_are_escaped() {
        let hostile = "\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m\u{202e}\r\n";
        let mut details = ErrorDetails::new();
        details.add_bad_request_violation("field\u{1b}", "too large\u{8}");
        let status = Status::with_error_details(Code::Internal, format!("ruhig {hostile}"), details);
        let text = describe(&status);
        assert!(!text.contains(|c: char| c.is_control() || c == '\u{202e}'), "{text:?}");
        assert!(text.starts_with("ruhig \\u{1b}]0;owned\\u{7}"), "{text}");
        assert_eq!(printable("größe 1 µs"), "größe 1 µs");
    }

    #[test]
    fn a_status_is_described_with_its_details() {
        let mut details = ErrorDetails::new();
        details.set_retry_info(Some(Duration::from_millis(250)));
        details.add_bad_request_violation("tokens", "must be at most 64, found 65");
        let status = Status::with_error_details(Code::InvalidArgument, "bad request", details);
        assert_eq!(
            describe(&status),
            "bad request (INVALID_ARGUMENT); tokens: must be at most 64, found 65; retry after 250ms"
        );
    }

    #[test]
    fn the_number_of_a_step_does_not_read_as_a_count() {
        let receipt = |steps: &[u64], tokens: &[u32]| {
            steps_in_words(&Receipt {
                steps: steps.to_vec(),
                tokens_per_rank: tokens.to_vec(),
                ..Receipt::default()
            })
        };
        assert_eq!(receipt(&[1], &[16]), "in step 1, tokens per rank 16");
        assert_eq!(receipt(&[4, 5], &[9, 7]), "in steps 4, 5, tokens per rank 9, 7");
        assert_eq!(receipt(&[], &[]), "in no step");
    }

    #[tokio::test]
    async fn the_error_names_an_address_without_a_listener() {
        let error = connect("127.0.0.1:1", &Credentials::default())
            .await
            .map(|_| ())
            .expect_err("nothing listens on port 1");
        assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
        assert_eq!(error.status(), 1);
        let error = connect("127.0.0.1", &Credentials::default()).await.map(|_| ()).unwrap_err();
        assert_eq!(error.status(), USAGE, "{error}");
        let missing = Credentials { token_file: Some("/nowhere/token".into()), ..Credentials::default() };
        let error = connect("127.0.0.1:1", &missing).await.map(|_| ()).unwrap_err();
        assert_eq!(error.status(), USAGE, "{error}");
    }

    #[test]
    fn a_refused_caller_is_told_which_flags_send_credentials() {
        let error = call_failed("Forward", &Status::unauthenticated("a token is required")).to_string();
        assert!(error.contains("a token is required (UNAUTHENTICATED); --token-file FILE"), "{error}");
    }
}
