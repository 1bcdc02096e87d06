//! CUDA kernels of expertd.
