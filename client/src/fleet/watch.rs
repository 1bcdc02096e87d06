//! What a client of several services does in the background: look addresses up, keep connections, ask services what they
//! hold, and probe them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

#[cfg(feature = "network")]
use super::network::NetworkRoute;
use super::shared::{Link, Shared};
use super::{Facts, FleetConfig, ServiceId, State, content_of_model};
#[cfg(feature = "network")]
use crate::network::NetworkOptions;
use crate::transport::{self, Channel, Credentials};
use expertd_proto::transport::CONTROL_MESSAGE_BYTES;
use expertd_proto::v1::moe_client::MoeClient;
use expertd_proto::v1::{GetModelRequest, GetModelResponse};

/// The health service's name for "requests are admitted".
const MOE: &str = "expertd.v1.Moe";
/// First pause before a service that cannot be reached is tried again; it doubles up to [`MAX_RECONNECT`].
const RECONNECT: Duration = Duration::from_millis(50);
const MAX_RECONNECT: Duration = Duration::from_secs(1);

/// Looks the addresses up until the client is gone, and keeps a task for each service that they name.
pub(super) async fn follow_addresses(shared: Weak<Shared>, given: Vec<String>) {
    let mut tasks = JoinSet::new();
    let mut known: BTreeMap<String, (ServiceId, tokio::task::AbortHandle)> = BTreeMap::new();
    let mut earlier: BTreeMap<String, Vec<String>> = BTreeMap::new();
    loop {
        let Some(owner) = shared.upgrade() else { return };
        for address in &given {
            match expand(address).await {
                Ok(found) => drop(earlier.insert(address.clone(), found)),
                // Services that were found before are kept: their health shows whether they are still there.
                Err(reason) => owner.note(address, &reason),
            }
        }
        let now: Vec<&String> = earlier.values().flatten().collect();
        known.retain(|address, (id, task)| {
            let listed = now.contains(&address);
            if !listed {
                task.abort();
                owner.remove(*id);
            }
            listed
        });
        for (given, found) in &earlier {
            for address in found {
                if !known.contains_key(address) {
                    let id = owner.add();
                    let credentials = named(&owner.config.credentials, given);
                    let service = Watched {
                        shared: shared.clone(),
                        id,
                        address: address.clone(),
                        #[cfg(feature = "network")]
                        network: owner.config.network.clone().map(|network| {
                            let network = NetworkOptions { credentials: credentials.clone(), ..network };
                            Arc::new(NetworkRoute::new(address, network))
                        }),
                        credentials,
                    };
                    known.insert(address.clone(), (id, tasks.spawn(service.run())));
                }
            }
        }
        let pause = owner.config.lookup_interval;
        drop(owner);
        tokio::time::sleep(pause).await;
        while tasks.try_join_next().is_some() {}
    }
}

/// The addresses behind a name. Socket addresses and Unix-domain sockets stand for themselves.
async fn expand(address: &str) -> Result<Vec<String>, String> {
    let (scheme, host) = match address.split_once("://") {
        Some((scheme, host)) => (format!("{scheme}://"), host),
        None => (String::new(), address),
    };
    if address.starts_with("unix:") || host.parse::<SocketAddr>().is_ok() {
        return Ok(vec![address.to_owned()]);
    }
    let found = tokio::net::lookup_host(host).await;
    let found = found.map_err(|error| format!("cannot look {host} up: {error}"))?;
    let mut found: Vec<String> = found.map(|address| format!("{scheme}{address}")).collect();
    found.sort();
    found.dedup();
    if found.is_empty() { Err(format!("{host} has no address")) } else { Ok(found) }
}

/// Credentials for an address that was looked up: certificates name the host, not its address.
fn named(credentials: &Credentials, given: &str) -> Credentials {
    let host = given.split_once("://").map_or(given, |(_, host)| host);
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    let mut credentials = credentials.clone();
    let is_name = !given.starts_with("unix:") && host.parse::<SocketAddr>().is_err();
    if credentials.ca.is_some() && is_name {
        credentials.server_name.get_or_insert_with(|| name.to_owned());
    }
    credentials
}

/// One service that is being watched.
struct Watched {
    shared: Weak<Shared>,
    id: ServiceId,
    address: String,
    credentials: Credentials,
    #[cfg(feature = "network")]
    network: Option<Arc<NetworkRoute>>,
}

impl Watched {
    /// Connects again and again until the task is aborted or the client is gone.
    async fn run(self) {
        let mut pause = RECONNECT;
        loop {
            let connected = self.connect().await;
            let Some(shared) = self.shared.upgrade() else { return };
            match connected {
                Ok(channel) => {
                    let woken = Arc::new(Notify::new());
                    let (lost, link_lost) = watch::channel(false);
                    let config = shared.config.clone();
                    shared.connected(
                        self.id,
                        self.link(channel.clone(), link_lost, &woken, CONTROL_MESSAGE_BYTES),
                    );
                    drop(shared);
                    let probe = Probe { watched: &self, channel, woken, config };
                    let (served, reason) = probe.run(lost.subscribe()).await;
                    if served {
                        pause = RECONNECT;
                    }
                    lost.send_replace(true);
                    #[cfg(feature = "network")]
                    self.network.iter().for_each(|network| network.forget());
                    let Some(shared) = self.shared.upgrade() else { return };
                    shared.note(&self.address, &reason);
                    shared.observed(self.id, State::Lost);
                }
                Err(error) => {
                    shared.note(&self.address, &error);
                    shared.observed(self.id, State::Lost);
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_RECONNECT);
        }
    }

    /// Connects within the time that two probes have, so that a service whose network was cut is found soon after its return.
    async fn connect(&self) -> Result<Channel, String> {
        let Some(limit) = self.shared.upgrade().map(|shared| shared.config.probe_timeout * 2) else {
            return Err("the client is gone".to_owned());
        };
        let connecting = transport::connect_with(&self.address, &self.credentials);
        match tokio::time::timeout(limit, connecting).await {
            Ok(connected) => connected.map_err(|error| error.to_string()),
            Err(_) => Err(format!("no connection within {limit:?}")),
        }
    }

    fn link(&self, channel: Channel, lost: watch::Receiver<bool>, woken: &Arc<Notify>, bytes: usize) -> Link {
        let moe = MoeClient::new(channel).max_decoding_message_size(bytes).max_encoding_message_size(bytes);
        Link {
            moe,
            lost,
            woken: Arc::clone(woken),
            address: self.address.clone(),
            model: None,
            #[cfg(feature = "network")]
            network: self.network.clone(),
        }
    }
}

/// Probes over one connection.
struct Probe<'a> {
    watched: &'a Watched,
    channel: Channel,
    /// Notified when a call on this service ends in a way that calls for a probe at once.
    woken: Arc<Notify>,
    config: FleetConfig,
}

impl Probe<'_> {
    /// Probes until the service is lost. Returns whether it has served, and why it counts as lost.
    async fn run(&self, lost: watch::Receiver<bool>) -> (bool, String) {
        let mut health = HealthClient::new(self.channel.clone());
        let (mut missed, mut served, mut learned) = (0, false, false);
        loop {
            let state = match self.in_time(health.check(Self::question())).await {
                Ok(answer) => {
                    missed = 0;
                    if answer.status() == ServingStatus::Serving { State::Serving } else { State::NotServing }
                }
                Err(status) if status.code() == Code::DeadlineExceeded && missed == 0 => {
                    missed = 1;
                    State::Suspect
                }
                Err(status) => return (served, status.message().to_owned()),
            };
            let Some(shared) = self.watched.shared.upgrade() else { return (served, String::new()) };
            let (id, was) = (self.watched.id, shared.state(self.watched.id));
            // The service is asked again what it holds after a time without service, because its weights may have changed, and
            // while it has other weights than those in use, because it then gets no calls whose receipts would show a reload.
            let kept_serving = learned && matches!(was, Some(State::Serving | State::Suspect));
            if state == State::Serving && !(kept_serving && shared.has_content(id)) {
                learned = match self.learn(&shared, &lost).await {
                    Ok(()) => true,
                    Err(status) => return (served, format!("GetModel: {}", status.message())),
                };
            }
            served |= state == State::Serving;
            shared.observed(id, state);
            drop(shared);
            if missed == 0 {
                let _ = tokio::time::timeout(self.config.probe_interval, self.woken.notified()).await;
            }
        }
    }

    fn question() -> Request<HealthCheckRequest> {
        Request::new(HealthCheckRequest { service: MOE.to_owned() })
    }

    /// Asks the service what it holds.
    async fn learn(&self, shared: &Shared, lost: &watch::Receiver<bool>) -> Result<(), Status> {
        let mut moe = MoeClient::new(self.channel.clone()).max_decoding_message_size(CONTROL_MESSAGE_BYTES);
        let request = GetModelRequest { name: self.config.model.clone() };
        let model: GetModelResponse = self.in_time(moe.get_model(request)).await?;
        let limit = model.limits.as_ref().map_or(0, |limits| limits.max_message_bytes);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX).max(CONTROL_MESSAGE_BYTES);
        let facts = Facts {
            content: content_of_model(&model),
            layers: model.moe_layers.iter().map(|layer| layer.layer).collect(),
        };
        let link = self.watched.link(self.channel.clone(), lost.clone(), &self.woken, limit);
        shared.learned(self.watched.id, facts, Link { model: Some(Arc::new(model)), ..link });
        Ok(())
    }

    async fn in_time<T>(
        &self,
        call: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, Status> {
        match tokio::time::timeout(self.config.probe_timeout, call).await {
            Ok(answer) => answer.map(tonic::Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded(format!(
                "two probes had no answer within {:?}",
                self.config.probe_timeout
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[tokio::test]
    async fn names_become_addresses_and_addresses_stay() {
        for address in ["127.0.0.1:5", "http://127.0.0.1:5", "[::1]:5", "unix:/run/expertd.sock"] {
            assert_eq!(expand(address).await.unwrap(), [address]);
        }
        let found = expand("http://localhost:5").await.unwrap();
        assert!(
            found.iter().all(|address| address.starts_with("http://") && address.ends_with(":5")),
            "{found:?}"
        );
        assert!(expand("no-port").await.unwrap_err().contains("no-port"));
    }

    #[test]
    fn certificates_are_checked_for_the_name_that_was_given() {
        let tls = Credentials { ca: Some("ca.pem".into()), ..Credentials::default() };
        assert_eq!(named(&tls, "https://pods.example:50051").server_name.as_deref(), Some("pods.example"));
        assert_eq!(named(&tls, "[::1]:5").server_name, None);
        let given = Credentials { server_name: Some("other".to_owned()), ..tls };
        assert_eq!(named(&given, "pods.example:5").server_name.as_deref(), Some("other"));
        assert_eq!(named(&Credentials::default(), "pods.example:5").server_name, None);
    }
}
