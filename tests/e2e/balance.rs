//! Rows per expert are counted on the ranks.

use std::time::Duration;

use bytes::Bytes;
use expertd_cli::admin::AdminAddress;
use expertd_cli::status::expert_rows;
use expertd_proto::Client;
use expertd_proto::v1::ForwardRequest;
use rustix::process::Signal;

use crate::service::load::Rows;
use crate::service::{Service, eventually, golden, send};

const FAMILY: &str = "qwen3_moe";
const ROWS: usize = 12;

/// The counts of a layer, `[ranks][experts]`.
async fn counts(service: &Service, layer: u32) -> Vec<Vec<u64>> {
    let admin = AdminAddress { address: Some(service.admin.clone()), ..AdminAddress::default() };
    let rows = expert_rows(&admin).await.unwrap();
    let layer = rows.layers.into_iter().find(|found| found.layer == layer).unwrap();
    layer.ranks.into_iter().map(|rank| rank.rows).collect()
}

/// A request whose row `i` goes to the experts `of(i)`, with equal weights.
fn routed(request: ForwardRequest, of: impl Fn(usize) -> [i32; 2]) -> ForwardRequest {
    let ids: Vec<u8> = (0..ROWS).flat_map(&of).flat_map(i32::to_le_bytes).collect();
    let weights: Vec<u8> = [0.5_f32; 2 * ROWS].into_iter().flat_map(f32::to_le_bytes).collect();
    request.with_routing(Bytes::from(ids), Bytes::from(weights), 2)
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_counted_for_each_expert_over_generations() {
    let service = Service::start(FAMILY, 2, &["--max-tokens-per-step", "8"]);
    let client = Client::connect(&service.address).await.unwrap();
    let mut rows = Rows::new(&golden(FAMILY), 1, ROWS);
    let layer = rows.layers()[0];
    let (request, _) = rows.draw_of(layer, ROWS);
    let experts = counts(&service, layer).await[0].len();
    assert_eq!(counts(&service, layer).await, vec![vec![0; experts]; 2]);

    // Every row goes to expert 0; the second expert counts up over the others.
    let hot = routed(request, |row| [0, 1 + (row % (experts - 1)) as i32]);
    let mut expected = vec![0; experts];
    expected[0] = ROWS as u64;
    (0..ROWS).for_each(|row| expected[1 + row % (experts - 1)] += 1);
    client.forward(hot.clone(), None).await.unwrap();
    // The first half of the experts belongs to rank 0.
    let by_rank = |expected: &[u64]| {
        let (first, second) = expected.split_at(experts / 2);
        let zeros = vec![0; experts / 2];
        vec![[first, zeros.as_slice()].concat(), [zeros.as_slice(), second].concat()]
    };
    assert_eq!(counts(&service, layer).await, by_rank(&expected));

    // The counts outlive a generation.
    let ranks = service.ranks();
    send(ranks[0], Signal::KILL);
    eventually(Duration::from_secs(60), "new ranks", || {
        let now = service.ranks();
        now.len() == 2 && now.iter().all(|rank| !ranks.contains(rank))
    });
    assert_eq!(counts(&service, layer).await, by_rank(&expected));
    client.forward(hot, None).await.unwrap();
    expected.iter_mut().for_each(|rows| *rows *= 2);
    assert_eq!(counts(&service, layer).await, by_rank(&expected));
}
