//! Checkpoints: config.json and safetensors to a `ModelSpec`, placement, loading.
