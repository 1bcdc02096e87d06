//! Tests of services that hold some of a model's layers.

use crate::service::load::{Rows, check};
use crate::service::{Service, fixture, golden, serve_to_the_end};
use expertd_client::Client;
use expertd_proto::v1::LayerRange;
use tonic::Code;
use tonic_types::StatusExt as _;

const FAMILY: &str = "qwen3_moe";

#[tokio::test(flavor = "multi_thread")]
async fn held_layers_are_served_and_others_are_not_found() {
    let mut fingerprints = Vec::new();
    let mut bytes = Vec::new();
    for (layers, held) in [("all", vec![0, 1]), ("0-0", vec![0]), ("1", vec![1])] {
        let service = Service::start(FAMILY, 2, &["--layers", layers]);
        let client = Client::connect(&service.address).await.unwrap();
        let model = client.model("").await.unwrap();
        let listed: Vec<u32> = model.moe_layers.iter().map(|layer| layer.layer).collect();
        assert_eq!(listed, held);
        assert_eq!(model.held_layers, Some(LayerRange { first: held[0], last: held[held.len() - 1] }));
        assert_eq!(model.num_layers, 2);
        let mut rows = Rows::new(&golden(FAMILY), 7, 9);
        for layer in 0..2 {
            let (request, wanted) = rows.draw_of(layer, 4);
            match client.forward(request.clone(), None).await {
                Ok(response) => {
                    assert!(held.contains(&layer));
                    check(&response, &wanted, &request);
                }
                Err(status) => {
                    assert!(!held.contains(&layer), "{status:?}");
                    assert_eq!(status.code(), Code::NotFound);
                    let reason = status.get_error_details().error_info().unwrap().reason.clone();
                    assert_eq!(reason, "LAYER_NOT_HELD");
                    assert!(status.message().contains(&format!("layer {layer} is not served here")));
                }
            }
        }
        let status = expertd_client::transport::connect(&service.admin).await.unwrap();
        let status = expertd_proto::v1::admin_client::AdminClient::new(status)
            .get_status(expertd_proto::v1::GetStatusRequest {})
            .await
            .unwrap()
            .into_inner();
        bytes.push(status.ranks.iter().map(|rank| rank.weight_bytes_total).sum::<u64>());
        fingerprints.push(model.weight_fingerprint);
    }
    assert!(fingerprints.iter().all(|one| *one == fingerprints[0]), "{fingerprints:?}");
    assert_eq!(bytes[0], bytes[1] + bytes[2], "a service loads its own layers only");
}

#[test]
fn layers_that_cannot_be_served_are_refused_up_front() {
    for (layers, word) in [("0-2", "0-1"), ("x", "FIRST-LAST"), ("ordinal/0", "ordinal/4")] {
        let (code, message) = serve_to_the_end(&fixture(FAMILY), &["--layers", layers]);
        assert_eq!(code, Some(64), "{message}");
        assert!(message.contains(word), "{message}");
    }
}
