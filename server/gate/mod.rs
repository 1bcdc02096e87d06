//! Routing functions, driven by data.
