//! A map of the pool's pages: which are taken, which may be resident, and which were used recently.

/// Pages per word of the map.
const WORD: usize = u64::BITS as usize;

/// Bit maps of pages.
#[derive(Debug)]
pub(super) struct PageMap {
    /// Taken pages.
    words: Vec<u64>,
    /// Pages that may have been written since they were last returned to the system.
    touched: Vec<u64>,
    /// Pages that were taken at some time in this period.
    used: Vec<u64>,
    pages: usize,
    taken: usize,
}

impl PageMap {
    /// A map of no pages.
    pub(super) const fn empty() -> Self {
        PageMap { words: Vec::new(), touched: Vec::new(), used: Vec::new(), pages: 0, taken: 0 }
    }

    /// A map of `pages` free pages, of which the first `resident` may be resident.
    pub(super) fn new(pages: usize, resident: usize) -> Self {
        let mut words = vec![0; pages.div_ceil(WORD)];
        let mut touched = words.clone();
        parts(0, resident.min(pages)).for_each(|(word, mask)| touched[word] |= mask);
        let used = words.clone();
        // The bits of the last word beyond the end are never free.
        if let Some(last) = words.last_mut()
            && !pages.is_multiple_of(WORD)
        {
            *last = u64::MAX << (pages % WORD);
        }
        PageMap { words, touched, used, pages, taken: 0 }
    }

    /// Number of taken pages.
    pub(super) const fn taken(&self) -> usize {
        self.taken
    }

    /// Takes the lowest `pages >= 1` contiguous free pages and returns the first of them.
    pub(super) fn take(&mut self, pages: usize) -> Option<usize> {
        let first = self.find(pages)?;
        self.mark(first, pages, true);
        Some(first)
    }

    /// Takes `pages` pages from `first` on if all of them are free.
    pub(super) fn take_at(&mut self, first: usize, pages: usize) -> bool {
        let free = first + pages <= self.pages
            && parts(first, pages).all(|(word, mask)| self.words[word] & mask == 0);
        if free {
            self.mark(first, pages, true);
        }
        free
    }

    /// Frees `pages` taken pages from `first` on.
    pub(super) fn free(&mut self, first: usize, pages: usize) {
        self.mark(first, pages, false);
    }

    /// Number of pages that may be resident.
    pub(super) fn touched(&self) -> usize {
        self.touched.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Takes the first run of pages from `from` on that may be resident, are free and were not used in this period, in order to
    /// return them to the system. Returns its first page and its length. The pages then count as not resident.
    pub(super) fn take_idle(&mut self, from: usize) -> Option<(usize, usize)> {
        let idle = |word: usize| self.touched[word] & !self.words[word] & !self.used[word];
        let (first_word, offset) = (from / WORD, from % WORD);
        let first = (first_word..self.words.len()).find_map(|word| {
            let mask = if word == first_word { u64::MAX << offset } else { u64::MAX };
            let bits = idle(word) & mask;
            (bits != 0).then(|| word * WORD + bits.trailing_zeros() as usize)
        })?;
        let mut end = first;
        while end < self.pages {
            let run = (idle(end / WORD) >> (end % WORD)).trailing_ones() as usize;
            end += run;
            if run == 0 || !end.is_multiple_of(WORD) {
                break;
            }
        }
        parts(first, end - first).for_each(|(word, mask)| {
            self.words[word] |= mask;
            self.touched[word] &= !mask;
        });
        self.taken += end - first;
        Some((first, end - first))
    }

    /// Starts a new period, in which only the pages that are taken now count as used.
    pub(super) fn start_period(&mut self) {
        self.used.copy_from_slice(&self.words);
    }

    fn find(&self, pages: usize) -> Option<usize> {
        let (mut first, mut run) = (0, 0);
        for (index, &word) in self.words.iter().enumerate() {
            if word == u64::MAX {
                run = 0;
                continue;
            }
            // Scan alternating ranges of free and taken pages from the lowest bit on.
            let mut bit = 0;
            while bit < WORD {
                let rest = word >> bit;
                let free = (rest.trailing_zeros() as usize).min(WORD - bit);
                if free > 0 {
                    if run == 0 {
                        first = index * WORD + bit;
                    }
                    run += free;
                    if run >= pages {
                        return Some(first);
                    }
                    bit += free;
                }
                if bit < WORD {
                    run = 0;
                    bit += (word >> bit).trailing_ones() as usize;
                }
            }
        }
        None
    }

    fn mark(&mut self, first: usize, pages: usize, taken: bool) {
        for (word, mask) in parts(first, pages) {
            if taken {
                debug_assert_eq!(self.words[word] & mask, 0, "the pages must be free");
                self.words[word] |= mask;
                self.touched[word] |= mask;
                self.used[word] |= mask;
            } else {
                debug_assert_eq!(self.words[word] & mask, mask, "the pages must be taken");
                self.words[word] &= !mask;
            }
        }
        if taken {
            self.taken += pages;
        } else {
            self.taken -= pages;
        }
    }
}

/// The words of the map that cover pages `first..first + pages`, each with a mask of these pages.
fn parts(first: usize, pages: usize) -> impl Iterator<Item = (usize, u64)> {
    let end = first + pages;
    let mut at = first;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (word, bit) = (at / WORD, at % WORD);
        let here = (WORD - bit).min(end - at);
        at += here;
        Some((word, (u64::MAX >> (WORD - here)) << bit))
    })
}
