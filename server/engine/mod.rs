//! One rank's step loop: slots and phases.
