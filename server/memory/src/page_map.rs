//! A map of the pool's taken pages.

/// Pages per word of the map.
const WORD: usize = u64::BITS as usize;

/// A bit map of pages, in which the bit of a taken page is set.
#[derive(Debug)]
pub(super) struct PageMap {
    words: Vec<u64>,
    pages: usize,
    taken: usize,
}

impl PageMap {
    /// A map of no pages.
    pub(super) const fn empty() -> Self {
        PageMap { words: Vec::new(), pages: 0, taken: 0 }
    }

    /// A map of `pages` free pages.
    pub(super) fn new(pages: usize) -> Self {
        let mut words = vec![0; pages.div_ceil(WORD)];
        // The bits of the last word beyond the end are never free.
        if let Some(last) = words.last_mut()
            && !pages.is_multiple_of(WORD)
        {
            *last = u64::MAX << (pages % WORD);
        }
        PageMap { words, pages, taken: 0 }
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

    /// The index after the last taken page; 0 if no page is taken.
    pub(super) fn end(&self) -> usize {
        let beyond = self.words.len() * WORD - self.pages;
        for (index, &word) in self.words.iter().enumerate().rev() {
            let word = if index + 1 == self.words.len() { word & (u64::MAX >> beyond) } else { word };
            if word != 0 {
                return (index + 1) * WORD - word.leading_zeros() as usize;
            }
        }
        0
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
