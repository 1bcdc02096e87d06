//! expertd
