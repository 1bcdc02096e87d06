//! Which pages of the pool are taken.

/// Pages in a word of the map.
const WORD: usize = u64::BITS as usize;

/// A map of pages, one bit each, set where a page is taken.
#[derive(Debug)]
pub(super) struct Runs {
    words: Vec<u64>,
    pages: usize,
    taken: usize,
}

impl Runs {
    /// No pages.
    pub(super) const fn empty() -> Self {
        Runs { words: Vec::new(), pages: 0, taken: 0 }
    }

    /// `pages` free pages.
    pub(super) fn new(pages: usize) -> Self {
        let mut words = vec![0; pages.div_ceil(WORD)];
        // What the last word has beyond the end is never free.
        if let Some(last) = words.last_mut()
            && !pages.is_multiple_of(WORD)
        {
            *last = u64::MAX << (pages % WORD);
        }
        Runs { words, pages, taken: 0 }
    }

    /// Pages taken.
    pub(super) const fn taken(&self) -> usize {
        self.taken
    }

    /// Takes the lowest `pages >= 1` free pages that follow each other; the first of them.
    pub(super) fn take(&mut self, pages: usize) -> Option<usize> {
        let first = self.find(pages)?;
        self.mark(first, pages, true);
        Some(first)
    }

    /// Takes `pages` from `first` on, if all of them are free.
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

    /// The page behind the last one that is taken; 0 if none is.
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
            // Runs of free pages from the lowest bit on.
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
                debug_assert_eq!(self.words[word] & mask, 0, "free before");
                self.words[word] |= mask;
            } else {
                debug_assert_eq!(self.words[word] & mask, mask, "taken before");
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

/// The words of pages `first..first + pages`, with the bits of these pages.
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
