//! Lists of cores, and their assignment to ranks.

use std::fs;

/// Cores that this process may run on, ascending.
#[must_use]
pub(crate) fn available_cores() -> Vec<usize> {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect(),
        Err(_) => (0..std::thread::available_parallelism().map_or(1, usize::from)).collect(),
    }
}

/// Parses a list of cores such as `0-3,8`.
///
/// # Errors
/// If the text is not such a list, or contains a core twice.
pub(crate) fn parse(text: &str) -> Result<Vec<usize>, String> {
    let number =
        |s: &str| s.trim().parse::<usize>().map_err(|_| format!("`{s}` in `{text}` is not a core number"));
    let mut cores = Vec::new();
    for part in text.split(',') {
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(part)?, number(part)?),
        };
        if first > last || last >= 4096 {
            return Err(format!("`{part}` is not a range of cores; expected FIRST-LAST, below 4096"));
        }
        cores.extend(first..=last);
    }
    let mut unique = cores.clone();
    unique.sort_unstable();
    unique.dedup();
    if unique.len() != cores.len() {
        return Err(format!("`{text}` contains a core twice"));
    }
    Ok(cores)
}

/// Number of `cores` that this process may keep busy. A container's quota may allow fewer than the cores that it sees.
#[must_use]
pub(crate) fn usable(cores: &[usize]) -> usize {
    std::thread::available_parallelism().map_or(cores.len(), usize::from).min(cores.len())
}

/// The cores of each NUMA node that are among `cores`; one node if the machine does not report nodes.
#[must_use]
pub(crate) fn numa_nodes(cores: &[usize]) -> Vec<Vec<usize>> {
    let nodes = numbered_nodes(cores);
    if nodes.is_empty() { vec![cores.to_vec()] } else { nodes.into_iter().map(|(_, cores)| cores).collect() }
}

/// NUMA nodes, ascending, with their cores among `cores`; empty if the machine does not report nodes.
fn numbered_nodes(cores: &[usize]) -> Vec<(usize, Vec<usize>)> {
    let mut nodes: Vec<(usize, Vec<usize>)> = fs::read_dir("/sys/devices/system/node")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let list = fs::read_to_string(entry.path().join("cpulist")).ok()?;
            let of_node = parse(list.trim()).ok()?;
            Some((number, cores.iter().copied().filter(|c| of_node.contains(c)).collect::<Vec<_>>()))
        })
        .filter(|(_, cores)| !cores.is_empty())
        .collect();
    nodes.sort();
    nodes
}

/// Divides `cores` among `ranks`. A rank's cores are neighbours, and the ranks' numbers of cores differ by at most one. With
/// fewer cores than ranks, several ranks share a core.
#[must_use]
pub(crate) fn share_cores(cores: &[usize], ranks: usize) -> Vec<Vec<usize>> {
    if cores.len() < ranks {
        return (0..ranks).map(|rank| vec![cores[rank % cores.len().max(1)]]).collect();
    }
    let mut rest = cores;
    (0..ranks)
        .map(|rank| {
            let (mine, others) = rest.split_at(rest.len() / (ranks - rank));
            rest = others;
            mine.to_vec()
        })
        .collect()
}

/// Divides `cores` among ranks whose devices are attached to NUMA nodes. Each rank gets cores of its node, disjoint from
/// other ranks' if there are enough. Falls back to [`share_cores`] if a rank's node is unknown or has none of these cores.
#[must_use]
pub(crate) fn share_cores_near(cores: &[usize], nodes_of_ranks: &[Option<usize>]) -> Vec<Vec<usize>> {
    share_near(cores, &numbered_nodes(cores), nodes_of_ranks)
}

fn share_near(
    cores: &[usize],
    nodes: &[(usize, Vec<usize>)],
    nodes_of_ranks: &[Option<usize>],
) -> Vec<Vec<usize>> {
    let mut shares = vec![Vec::new(); nodes_of_ranks.len()];
    for (number, of_node) in nodes {
        let here: Vec<usize> =
            (0..shares.len()).filter(|&rank| nodes_of_ranks[rank] == Some(*number)).collect();
        for (rank, share) in here.iter().zip(share_cores(of_node, here.len())) {
            shares[*rank] = share;
        }
    }
    if shares.iter().any(Vec::is_empty) { share_cores(cores, shares.len()) } else { shares }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn core_lists_are_parsed() {
        assert_eq!(parse("0-2,5").unwrap(), [0, 1, 2, 5]);
        assert!(parse("3-1").is_err());
        assert!(parse("a").is_err());
        assert!(parse("1,1").is_err());
        assert!(parse("0-99999").is_err());
    }

    #[test]
    fn shares_are_even_and_complete() {
        assert_eq!(share_cores(&[0, 1, 2, 3, 4], 2), [vec![0, 1], vec![2, 3, 4]]);
        assert_eq!(share_cores(&[4, 6], 2), [vec![4], vec![6]]);
        assert_eq!(share_cores(&[4, 6], 3), [vec![4], vec![6], vec![4]]);
        for ranks in 1..=8 {
            let cores: Vec<usize> = (0..13).collect();
            let shares = share_cores(&cores, ranks);
            assert_eq!(shares.concat(), cores);
            let sizes: Vec<usize> = shares.iter().map(Vec::len).collect();
            assert!(sizes.iter().max().unwrap_or(&0) - sizes.iter().min().unwrap_or(&0) <= 1);
        }
    }

    #[test]
    fn ranks_get_cores_of_their_devices_nodes() {
        let nodes = [(0, vec![0, 1, 2, 3]), (1, vec![4, 5, 6, 7])];
        let cores: Vec<usize> = (0..8).collect();
        let near = |of_ranks: &[Option<usize>]| share_near(&cores, &nodes, of_ranks);
        assert_eq!(near(&[Some(1), Some(0)]), [vec![4, 5, 6, 7], vec![0, 1, 2, 3]]);
        assert_eq!(near(&[Some(1), Some(1), Some(0)]), [vec![4, 5], vec![6, 7], vec![0, 1, 2, 3]]);
        assert_eq!(near(&[Some(1)]), [vec![4, 5, 6, 7]]);
        // An unknown node, or one without usable cores: even shares of all cores.
        assert_eq!(near(&[None, Some(1)]), share_cores(&cores, 2));
        assert_eq!(near(&[Some(2), Some(1)]), share_cores(&cores, 2));
    }

    #[test]
    fn every_available_core_is_in_one_node() {
        let cores = available_cores();
        assert!(!cores.is_empty());
        let mut of_nodes = numa_nodes(&cores).concat();
        of_nodes.sort_unstable();
        assert_eq!(of_nodes, cores);
    }
}
