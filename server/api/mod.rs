//! The public gRPC services: decoding and validation, status mapping, health, reflection.
