//! The router's side of the EP group: children, supervision, generations, liveness.
