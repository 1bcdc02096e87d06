//! Steps captured as CUDA graphs.

use std::collections::HashMap;

use expertd_kernels::device::Graph;

/// How the rows of a step travel between host and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum RowPath {
    /// Kernels read rows and write results in mapped memory.
    Mapped,
    /// Copy engines carry rows to a buffer and results from it; kernels convert them there.
    Converted,
    /// Copy engines carry bf16 rows to where the gate and dispatch read them, and results from where combine writes them.
    Unchanged,
}

impl RowPath {
    const ALL: [RowPath; 3] = [RowPath::Mapped, RowPath::Converted, RowPath::Unchanged];
}

/// The part of a step that is launched at once. A step of a layer that has experts on CPU ranks has two halves: the second one follows when
/// their sums have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Half {
    /// All of the step.
    Whole,
    /// Up to the experts.
    First,
    /// From combine on.
    Second,
}

/// The key of a graph among those of one kind of layer in one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Variant {
    /// The largest number of rows per rank that the launches cover.
    pub(super) rows: u32,
    /// Whether the gate routes any of this rank's rows.
    pub(super) gated: bool,
    /// Whether shared experts process any of this rank's rows.
    pub(super) shared: bool,
    /// How its rows travel.
    pub(super) path: RowPath,
}

impl Variant {
    /// All variants that can occur with at most `max_tokens` rows per rank. Copy engines carry rows of steps with at least
    /// `copied_from` rows per rank, except those that all lie in the memory of GPUs.
    pub(super) fn all(max_tokens: u32, has_shared: bool, copied_from: Option<u32>) -> Vec<Variant> {
        let mut variants = Vec::new();
        let mut rows = 1;
        loop {
            let may_be_copied = copied_from.is_some_and(|from| rows >= from);
            for gated in [false, true] {
                for shared in [false, true].into_iter().filter(|&shared| has_shared || !shared) {
                    for path in
                        RowPath::ALL.into_iter().filter(|&path| may_be_copied || path == RowPath::Mapped)
                    {
                        variants.push(Variant { rows, gated, shared, path });
                    }
                }
            }
            if rows >= max_tokens {
                return variants;
            }
            rows = (rows * 2).min(max_tokens);
        }
    }
}

/// Graphs by class of layer, slot, variant and half of the step.
#[derive(Debug, Default)]
pub(super) struct Graphs(HashMap<(usize, usize, (Variant, Half)), Graph>);

impl Graphs {
    pub(super) fn insert(&mut self, class: usize, slot: usize, of: (Variant, Half), graph: Graph) {
        self.0.insert((class, slot, of), graph);
    }

    pub(super) fn get(&self, class: usize, slot: usize, of: (Variant, Half)) -> Option<&Graph> {
        self.0.get(&(class, slot, of))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_rows_has_a_variant() {
        for most in [1, 2, 3, 100, 128, 2048] {
            let variants = Variant::all(most, true, Some(100));
            for rows in 1..=most {
                let regime = rows.next_power_of_two().min(most);
                for gated in [false, true] {
                    for shared in [false, true] {
                        let wanted = Variant { rows: regime, gated, shared, path: RowPath::Mapped };
                        assert!(variants.contains(&wanted), "{wanted:?} of {most}");
                        for path in [RowPath::Converted, RowPath::Unchanged] {
                            let copied = Variant { path, ..wanted };
                            assert_eq!(variants.contains(&copied), regime >= 100, "{copied:?} of {most}");
                        }
                    }
                }
            }
            let distinct: std::collections::HashSet<_> = variants.iter().collect();
            assert_eq!(distinct.len(), variants.len());
        }
    }
}
