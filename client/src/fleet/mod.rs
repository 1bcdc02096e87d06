//! Several services used as one: a client that learns which layers, replicas and weights there are, sends each request to
//! a service that holds its layer, and goes elsewhere when that service fails.
//!
//! * Of the services that hold a layer, two are drawn and the one with fewer outstanding rows gets the request.
//! * A service that refuses (UNAVAILABLE, RESOURCE_EXHAUSTED) pauses for the time that it states; one that drains or does not
//!   answer two probes is left out until it serves again. The request goes to another service at once, or waits for one
//!   within its deadline. The computation is pure, so that is safe.
//! * Requests go to services with one content of the weights only. Another content replaces it once services with the other
//!   one cover more layers; a service that stopped serving still counts for [`Limits::content_grace`]. An answer's receipt
//!   is compared, too, because a service can restart with other weights at the same address.
//! * With [`FleetConfig::network`] (feature `network`) rows travel through a network session with each service, which is opened again
//!   after its end; calls that it has no room for, and those to services that refuse it, go over gRPC.
//! * A host name means all its addresses, which are looked up again every few seconds. `a,b,c` means all addresses of all names.

mod attempt;
mod client;
mod config;
#[cfg(feature = "network")]
mod network;
mod shared;
#[cfg(test)]
mod simulation;
mod state;
#[cfg(test)]
mod tests;
mod watch;

pub use client::FleetClient;
pub use config::{FleetConfig, FleetError};
pub use state::{Choice, Content, Ended, Facts, Fleet, Limits, ServiceId, State, Ticket};

use expertd_proto::v1::{GetModelResponse, Receipt};

/// The content of a service's weights.
fn content_of_model(model: &GetModelResponse) -> Content {
    Content(format!("{} {}", model.name, model.weight_fingerprint))
}

/// Whether an answer was computed from this content.
fn receipt_has_content(receipt: &Receipt, content: &Content) -> bool {
    content.0.rsplit_once(' ').is_some_and(|(_, fingerprint)| fingerprint == receipt.weight_fingerprint)
}

/// A sequence of random numbers (SplitMix64), good enough to spread requests.
#[derive(Debug)]
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
