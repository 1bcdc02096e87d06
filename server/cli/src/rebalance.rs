//! `expertd rebalance`: a placement of experts from measured rows.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use expertd_core::backend::ExpertRows;
use expertd_model::balance::{balance, balance_mixed, imbalance, loads};
use expertd_types::{ExpertPlacement, LayerId, LayerPlacement};

use super::admin::AdminAddress;
use super::client::read;
use super::exit::CommandError;
use super::status::expert_rows;

/// Print a placement of experts that evens out the load of ranks, from the rows that a service has counted
///
/// Prints the placement as JSON on standard output, for `expertd reload --placement FILE` and `expertd serve --placement FILE`, and on
/// standard error the imbalance of each layer (rows of the fullest rank divided by the mean): as measured, and as the placement would
/// make it for the same rows. Experts with many rows get copies on several ranks if --spare-experts leaves room for them.
///
/// In a group of a GPU rank and CPU ranks, the GPU rank keeps its number of experts of each layer and gets those with the most rows; the
/// CPU ranks share the others evenly. Before and after are then the part of the layer's rows on the CPU rank with the most.
///
/// Exits with status 0 if a placement was printed, 64 for a file that cannot be used, 1 otherwise.
#[derive(Args, Clone, Debug)]
pub struct RebalanceArgs {
    /// Largest number of experts of a layer that a rank may own beside its even share, rounded up
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub spare_experts: usize,
    /// Take the rows of this many seconds from now on, instead of those since the service started
    #[arg(long, value_name = "SECONDS", conflicts_with = "rows", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub seconds: Option<u32>,
    /// JSON file with rows, as `expertd status --expert-rows` prints them [default: ask the service]
    #[arg(long, value_name = "FILE")]
    pub rows: Option<PathBuf>,
    /// Number of ranks of the placement [default: as many as have counted]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub ranks: Option<u32>,
    /// Address of Admin.
    #[command(flatten)]
    pub admin: AdminAddress,
}

/// One layer before and after: its imbalance, or in a mixed group the part of its rows on the CPU rank with the most.
#[derive(Clone, Copy, Debug)]
struct Change {
    layer: LayerId,
    rows: u64,
    before: f64,
    after: f64,
    copies: usize,
    experts: usize,
}

/// Prints a placement.
///
/// # Errors
/// If the rows cannot be had, or there are none.
pub async fn run(args: RebalanceArgs) -> Result<ExitCode, CommandError> {
    let rows = match &args.rows {
        Some(path) => ExpertRows::from_json(&read(path)?).map_err(|error| {
            CommandError::usage(format!(
                "{}: {error}; expected what `expertd status --expert-rows` prints",
                path.display()
            ))
        })?,
        None => measure(&args).await?,
    };
    if let Some(problem) = nothing_to_do(&rows, args.ranks) {
        return Err(CommandError::failed(problem));
    }
    if args.spare_experts > 0 && rows.layers.iter().any(|layer| layer.source_experts.is_some()) {
        let found = args.spare_experts;
        return Err(CommandError::failed(format!(
            "--spare-experts is {found}, but in a mixed group one rank computes all rows of an expert, so copies only take memory; leave it out"
        )));
    }
    let (placement, changes) = rebalance(&rows, args.ranks, args.spare_experts).ok_or_else(|| {
        CommandError::failed(match args.seconds {
            Some(seconds) => format!("no expert has computed a row in {seconds} s; send requests meanwhile"),
            None => "no expert has computed a row yet; send requests first".to_owned(),
        })
    })?;
    eprint!("{}", in_words(&changes));
    let text = serde_json::to_string(&placement);
    println!("{}", text.map_err(|error| CommandError::failed(error.to_string()))?);
    Ok(ExitCode::SUCCESS)
}

/// Why no placement of these rows can change a load.
fn nothing_to_do(rows: &ExpertRows, ranks: Option<u32>) -> Option<String> {
    let counted = rows.layers.iter().map(|layer| layer.ranks.len()).max()?;
    let ranks = ranks.map_or(counted, |ranks| ranks as usize);
    (ranks == 1).then(|| "there is one rank, which owns all experts: nothing to even out".to_owned())
}

/// The rows that a service has counted since its start, or counts during the given time.
async fn measure(args: &RebalanceArgs) -> Result<ExpertRows, CommandError> {
    let before = expert_rows(&args.admin).await?;
    let Some(seconds) = args.seconds else { return Ok(before) };
    tokio::time::sleep(Duration::from_secs(seconds.into())).await;
    Ok(since(expert_rows(&args.admin).await?, &before))
}

/// Rows counted between `before` and `now`.
fn since(mut now: ExpertRows, before: &ExpertRows) -> ExpertRows {
    for (now, before) in now.layers.iter_mut().zip(&before.layers) {
        for (now, before) in now.ranks.iter_mut().flatten().zip(before.ranks.iter().flatten()) {
            *now = now.saturating_sub(*before);
        }
    }
    now
}

/// A placement for these rows and what it changes in each layer; `None` without rows.
fn rebalance(rows: &ExpertRows, ranks: Option<u32>, spare: usize) -> Option<(ExpertPlacement, Vec<Change>)> {
    let counted = rows.layers.iter().map(|layer| layer.ranks.len()).max()?;
    let ranks = ranks.map_or(counted, |ranks| ranks as usize);
    let (mut layers, mut changes) = (Vec::new(), Vec::new());
    for layer in &rows.layers {
        let of_experts = layer.of_experts();
        let (placement, before, after) = match layer.source_experts {
            Some(resident) => {
                let placement = balance_mixed(&of_experts, resident, ranks - 1);
                let measured: Vec<f64> = layer.of_ranks().into_iter().map(|rows| rows as f64).collect();
                let after = fullest_worker(&loads(&of_experts, &placement));
                (placement, fullest_worker(&measured), after)
            }
            None => {
                let placement = balance(&of_experts, ranks, spare);
                let measured = layer.imbalance().filter(|_| layer.ranks.len() == ranks);
                let before = measured.unwrap_or_else(|| {
                    imbalance(&of_experts, &LayerPlacement::contiguous(of_experts.len(), ranks))
                });
                let after = imbalance(&of_experts, &placement);
                (placement, before, after)
            }
        };
        changes.push(Change {
            layer: layer.layer,
            rows: of_experts.iter().sum(),
            before,
            after,
            copies: placement.copies(),
            experts: of_experts.len(),
        });
        layers.push((layer.layer, placement));
    }
    let has_rows = changes.iter().any(|change| change.rows > 0);
    has_rows.then(|| (ExpertPlacement::new(ranks, layers), changes))
}

/// Rows of the rank with the most beside the first one, divided by those of all ranks; 0 without rows.
fn fullest_worker(ranks: &[f64]) -> f64 {
    let (all, most) =
        (ranks.iter().sum::<f64>(), ranks.iter().skip(1).fold(0.0, |most: f64, rows| most.max(*rows)));
    if all > 0.0 { most / all } else { 0.0 }
}

fn in_words(changes: &[Change]) -> String {
    let mut text = format!("{:>7} {:>14} {:>8} {:>8} {:>7}\n", "layer", "rows", "before", "after", "copies");
    for change in changes {
        let Change { layer, rows, before, after, copies, experts } = change;
        text += &format!("{layer:>7} {rows:>14} {before:>8.3} {after:>8.3} {:>7}\n", copies - experts);
    }
    let total: u64 = changes.iter().map(|change| change.rows).sum();
    let mean = |of: fn(&Change) -> f64| {
        changes.iter().map(|change| of(change) * change.rows as f64).sum::<f64>() / total.max(1) as f64
    };
    let copies: usize = changes.iter().map(|change| change.copies - change.experts).sum();
    let (before, after) = (mean(|change| change.before), mean(|change| change.after));
    text + &format!("{:>7} {total:>14} {before:>8.3} {after:>8.3} {copies:>7}\n", "all")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeMap;

    use expertd_core::backend::LayerRows;
    use expertd_types::Rank;

    use super::*;

    fn rows(ranks: &[&[u64]]) -> ExpertRows {
        let ranks = ranks.iter().map(|rank| rank.to_vec()).collect();
        ExpertRows { layers: vec![LayerRows { layer: LayerId(4), ranks, source_experts: None }] }
    }

    fn mixed(resident: usize, ranks: &[&[u64]]) -> ExpertRows {
        let mut rows = rows(ranks);
        rows.layers[0].source_experts = Some(resident);
        rows
    }

    #[test]
    fn rows_of_ranks_become_a_placement() {
        // Experts 0 and 1, both on rank 0, have nearly all rows.
        let hot = rows(&[&[150, 20, 0, 0], &[0, 0, 5, 5]]);
        let (placement, changes) = rebalance(&hot, None, 0).unwrap();
        assert_eq!(placement.check(2, &BTreeMap::from([(LayerId(4), 4)])), Ok(()));
        let owners = placement.layer(LayerId(4)).unwrap();
        let own = |rank, expert| owners.experts_of(Rank(rank)).contains(&expert);
        assert!(own(0, 0) != own(0, 1) && own(1, 0) != own(1, 1), "{placement:?}");
        assert!((changes[0].before - 170.0 / 90.0).abs() < 1e-9, "{changes:?}");
        assert!(changes[0].after < changes[0].before && changes[0].copies == 4, "{changes:?}");
        let text = in_words(&changes);
        assert!(text.lines().last().unwrap().ends_with('0') && text.contains("1.889"), "{text}");
        // Copies of both hot experts make it even.
        let (_, changes) = rebalance(&hot, None, 1).unwrap();
        assert!(changes[0].after < 1.01 && changes[0].copies == 6, "{changes:?}");
        assert!(rebalance(&rows(&[&[0, 0], &[0, 0]]), None, 1).is_none());
        assert_eq!(rebalance(&hot, Some(4), 0).unwrap().0.ranks(), 4);
    }

    #[test]
    fn the_source_of_a_mixed_group_keeps_its_number_of_experts() {
        // Five of six experts lie on the source, of which two have no rows; expert 5 is the busiest.
        let counted = mixed(5, &[&[9, 0, 8, 0, 7, 0], &[0, 0, 0, 0, 0, 76], &[0; 6]]);
        let (placement, changes) = rebalance(&counted, None, 0).unwrap();
        assert_eq!(placement.check(3, &BTreeMap::from([(LayerId(4), 6)])), Ok(()));
        let owners = placement.layer(LayerId(4)).unwrap();
        assert_eq!(owners.experts_of(Rank(0)), [0, 1, 2, 4, 5]);
        assert_eq!((changes[0].before, changes[0].after, changes[0].copies), (0.76, 0.0, 6));
        // The CPU ranks share what the source does not hold.
        let counted = mixed(1, &[&[9, 0, 0, 0, 0, 0], &[0, 20, 20, 0, 0, 0], &[0, 0, 0, 20, 0, 31]]);
        let (placement, changes) = rebalance(&counted, None, 0).unwrap();
        let owners = placement.layer(LayerId(4)).unwrap();
        assert_eq!(owners.experts_of(Rank(0)), [5]);
        assert_eq!((changes[0].before, changes[0].after, changes[0].copies), (0.51, 0.4, 6));
        // A layer that is whole on the source stays so.
        let (placement, _) = rebalance(&mixed(2, &[&[1, 1], &[0, 0]]), None, 0).unwrap();
        assert_eq!(placement.layer(LayerId(4)).unwrap().experts_of(Rank(0)), [0, 1]);
    }

    #[test]
    fn rows_of_a_mixed_group_are_read_as_they_are_written() {
        let rows = mixed(1, &[&[1, 2], &[3, 4]]);
        assert_eq!(ExpertRows::from_json(&serde_json::to_string(&rows).unwrap()), Ok(rows));
    }

    #[tokio::test]
    async fn copies_for_a_mixed_group_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), serde_json::to_string(&mixed(1, &[&[1, 2], &[3, 4]])).unwrap()).unwrap();
        let args = |spare_experts| RebalanceArgs {
            spare_experts,
            seconds: None,
            rows: Some(file.path().to_owned()),
            ranks: None,
            admin: AdminAddress::default(),
        };
        let refused = run(args(1)).await.unwrap_err().to_string();
        assert!(refused.contains("--spare-experts is 1") && refused.contains("leave it out"), "{refused}");
        assert!(run(args(0)).await.is_ok());
    }

    #[test]
    fn one_rank_has_nothing_to_even_out() {
        let one = rows(&[&[1, 2]]);
        assert!(nothing_to_do(&one, None).is_some_and(|text| text.contains("one rank")));
        assert_eq!(nothing_to_do(&one, Some(2)), None);
        assert!(nothing_to_do(&rows(&[&[1], &[2]]), Some(1)).is_some());
        assert_eq!(nothing_to_do(&rows(&[&[1], &[2]]), None), None);
    }

    #[test]
    fn only_rows_of_the_interval_count() {
        let before = rows(&[&[10, 0], &[0, 7]]);
        assert_eq!(since(rows(&[&[12, 0], &[0, 7]]), &before), rows(&[&[2, 0], &[0, 0]]));
    }
}
