//! The id −1 in callers' routing means "not mine". Its weight is ignored, it may repeat, and a row whose ids are all −1 gets
//! zeros from the routed experts.
//!
//! Ranks accept only ids that are in range and distinct within a row, because ids become addresses. Therefore −1 is replaced
//! by another expert with weight zero, at the cost of that expert's product. If the row has an expert of its own, the
//! replacement is a neighbouring id, which is usually on the same rank, so that the row is sent to no further rank. A row of
//! −1 alone, for example padding of a CUDA graph, takes the experts of another row: in steps of few rows the number of experts
//! that a step reads decides its duration.

use bytes::{Bytes, BytesMut};

/// The id of an expert that this service does not compute.
pub(super) const UNOWNED: i32 = -1;

/// Routing without −1: ids and weights for the ranks.
pub(super) struct Replaced {
    pub(super) ids: Bytes,
    pub(super) weights: Bytes,
}

/// Replaces every −1 of `ids`, `[tokens, k]`, and the weights beside it; `None` if there is no −1. The other ids are in range
/// and distinct within their row, and `k <= num_experts`.
pub(super) fn replace(ids: &[u8], weights: &[u8], k: usize, num_experts: usize) -> Option<Replaced> {
    let unowned = UNOWNED.to_le_bytes();
    if !words(ids).any(|id| id == unowned) {
        return None;
    }
    let (mut ids, mut weights) = (BytesMut::from(ids), BytesMut::from(weights));
    let mut taken = vec![false; num_experts];
    let (mut owning, mut empty) = (Vec::new(), Vec::new());
    let rows = ids.chunks_exact_mut(k * 4).zip(weights.chunks_exact_mut(k * 4));
    for (token, (ids, weights)) in rows.enumerate() {
        let own: Vec<usize> =
            words(ids).filter_map(|id| usize::try_from(i32::from_le_bytes(id)).ok()).collect();
        if own.is_empty() {
            empty.push(token)
        } else {
            owning.push(token)
        }
        for &id in &own {
            taken[id] = true;
        }
        // If no row has experts, they are spread over all experts.
        let start = own.first().map_or(token * k % num_experts, |first| first + 1);
        let mut free = (start..start + num_experts).map(|id| id % num_experts).filter(|&id| !taken[id]);
        let pairs = ids.as_chunks_mut::<4>().0.iter_mut().zip(weights.as_chunks_mut::<4>().0);
        for ((id, weight), expert) in pairs.filter(|(id, _)| **id == unowned).zip(&mut free) {
            *id = i32::try_from(expert).unwrap_or(i32::MAX).to_le_bytes();
            *weight = 0f32.to_le_bytes();
        }
        drop(free);
        for id in own {
            taken[id] = false;
        }
    }
    for (token, of) in empty.into_iter().zip(owning.iter().cycle()) {
        ids.copy_within(of * k * 4..(of + 1) * k * 4, token * k * 4);
    }
    Some(Replaced { ids: ids.freeze(), weights: weights.freeze() })
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> + '_ {
    bytes.as_chunks::<4>().0.iter().copied()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn bytes<const N: usize>(values: &[[u8; N]]) -> Vec<u8> {
        values.concat()
    }

    fn ids(values: &[i32]) -> Vec<u8> {
        bytes(&values.iter().map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    fn weights(values: &[f32]) -> Vec<u8> {
        bytes(&values.iter().map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    #[test]
    fn routing_without_it_is_left_as_it_is() {
        assert!(replace(&ids(&[0, 1]), &weights(&[0.5, 0.5]), 2, 4).is_none());
        assert!(replace(&[], &[], 2, 4).is_none());
    }

    #[test]
    fn rows_without_experts_add_none_to_the_step() {
        let given = ids(&[-1, -1, 6, 2, -1, -1, -1, 5, -1, -1]);
        let replaced = replace(&given, &weights(&[0.5; 10]), 2, 9).unwrap();
        let found: Vec<i32> = words(&replaced.ids).map(i32::from_le_bytes).collect();
        assert_eq!(found, [6, 2, 6, 2, 6, 5, 6, 5, 6, 2]);
        assert_eq!(&replaced.weights[..], weights(&[0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0]));
        let none = replace(&ids(&[-1; 4]), &weights(&[0.5; 4]), 2, 9).unwrap();
        assert_eq!(words(&none.ids).map(i32::from_le_bytes).collect::<Vec<_>>(), [0, 1, 2, 3]);
    }

    proptest! {
        #[test]
        fn ids_become_distinct_and_weights_of_others_stay(
            rows in prop::collection::vec(prop::sample::subsequence((0..9).collect::<Vec<i32>>(), 4), 1..6),
            unowned in prop::collection::vec(prop::array::uniform4(any::<bool>()), 6),
        ) {
            let mut given = Vec::new();
            for (row, unowned) in rows.iter().zip(&unowned) {
                given.extend(row.iter().zip(unowned).map(|(id, &not_mine)| if not_mine { UNOWNED } else { *id }));
            }
            // Weights beside −1 may be anything.
            let shares: Vec<f32> = given.iter().map(|&id| if id < 0 { f32::NAN } else { id as f32 + 0.5 }).collect();
            let Some(replaced) = replace(&ids(&given), &weights(&shares), 4, 9) else {
                prop_assert!(!given.contains(&UNOWNED));
                return Ok(());
            };
            let found: Vec<i32> = words(&replaced.ids).map(i32::from_le_bytes).collect();
            let shared: Vec<f32> = words(&replaced.weights).map(f32::from_le_bytes).collect();
            for (at, &id) in given.iter().enumerate() {
                prop_assert!((0..9).contains(&found[at]));
                if id == UNOWNED {
                    prop_assert_eq!(shared[at].to_bits(), 0);
                } else {
                    prop_assert_eq!((found[at], shared[at]), (id, shares[at]));
                }
            }
            for row in found.chunks(4) {
                let mut distinct = row.to_vec();
                distinct.sort_unstable();
                distinct.dedup();
                prop_assert_eq!(distinct.len(), 4);
            }
        }
    }
}
