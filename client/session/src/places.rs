//! The places of a call in the row area.

use expertd_types::DType;

use crate::wire::RequestRecord;

/// A range of a row area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// First byte.
    pub start: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl Place {
    /// Whether the place lies in a row area of `rows_bytes` bytes.
    #[must_use]
    pub const fn is_within(&self, rows_bytes: usize) -> bool {
        match self.start.checked_add(self.bytes) {
            Some(end) => end <= rows_bytes,
            None => false,
        }
    }
}

/// The places of a call.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// Elements of a row.
    pub hidden: usize,
    /// Bytes of the row area.
    pub rows_bytes: usize,
}

impl Places {
    /// The places that the service reads: rows, ids and weights, token ids. `None` if one of them has no bytes or does not lie in the row
    /// area: such a call does not travel. So `k` must be given, which is 0 in calls of host sessions for the layer's own number.
    #[must_use]
    pub fn of_request(&self, record: &RequestRecord) -> Option<Vec<Place>> {
        let has = |flag| record.flags & flag != 0;
        let routing = has(RequestRecord::GIVEN_ROUTING);
        let token_ids = has(RequestRecord::TOKEN_IDS).then(|| self.words(record, record.token_ids, 1));
        self.all(record, record.rows, routing, token_ids)
    }

    /// The places that the service writes: output, ids and weights. `None` as for a request.
    #[must_use]
    pub fn of_answer(&self, record: &RequestRecord) -> Option<Vec<Place>> {
        let routing = record.flags & RequestRecord::RETURN_ROUTING != 0;
        self.all(record, record.output, routing, None)
    }

    fn all(
        &self,
        record: &RequestRecord,
        rows: u64,
        routing: bool,
        token_ids: Option<Option<Place>>,
    ) -> Option<Vec<Place>> {
        let row = DType::from_code(record.dtype).and_then(|dtype| self.hidden.checked_mul(dtype.size()));
        let rows = row.and_then(|row| self.place(rows, (record.tokens as usize).checked_mul(row)?));
        let mut places = vec![rows];
        if routing {
            let k = record.k as usize;
            places.extend([self.words(record, record.ids, k), self.words(record, record.weights, k)]);
        }
        places.extend(token_ids);
        places.into_iter().collect()
    }

    /// `[tokens, width]` words of 32 bits.
    fn words(&self, record: &RequestRecord, start: u64, width: usize) -> Option<Place> {
        self.place(start, (record.tokens as usize).checked_mul(width)?.checked_mul(4)?)
    }

    fn place(&self, start: u64, bytes: usize) -> Option<Place> {
        let place = Place { start: usize::try_from(start).ok()?, bytes };
        (bytes > 0 && place.is_within(self.rows_bytes)).then_some(place)
    }
}
