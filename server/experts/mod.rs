//! Grouped expert MLPs.
