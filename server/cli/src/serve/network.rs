//! Network sessions: the calls that open them come from the public API, the agents from the sessions.

use expertd_core::backend::ClientKey;
use expertd_grpc::{NetworkOpener, NetworkSession};
use expertd_network::Card;
use expertd_proto::v1::{NetworkSessionOpened, OpenNetworkSession};
use expertd_sessions::NetworkRequest;
use tokio::sync::oneshot;

/// The sessions that agents serve.
pub(super) struct OverNetwork(pub(super) expertd_sessions::NetworkSessions);

impl NetworkOpener for OverNetwork {
    fn open(&self, client: ClientKey, open: OpenNetworkSession) -> NetworkSession {
        let request = NetworkRequest {
            version: open.version,
            card: Card { metadata: open.metadata.to_vec(), rows_address: open.rows_address },
            rows_bytes: open.rows_bytes,
            calls: open.calls,
        };
        let agent = self.0.open(client, request);
        let (to_opened, opened) = oneshot::channel();
        let ready = agent.ready;
        tokio::spawn(async move {
            // Without an answer the thread of the agent was not started.
            let Ok(ready) = ready.await else { return };
            let _ = to_opened.send(ready.map(|ready| NetworkSessionOpened {
                metadata: ready.card.metadata.into(),
                rows_address: ready.card.rows_address,
                session: ready.session,
                hidden: ready.hidden,
                spin_us: ready.spin_us,
                model: None,
            }));
        });
        NetworkSession { opened, ended: agent.ended, guard: Box::new(agent.guard) }
    }
}
