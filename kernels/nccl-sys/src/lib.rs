//! NCCL bindings, opened at run time.
