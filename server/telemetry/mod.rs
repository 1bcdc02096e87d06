//! Metric names, metrics and tracing.
