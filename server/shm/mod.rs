//! Shared memory between the processes of one service: regions, rings, staging, waiting.
