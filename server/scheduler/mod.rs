//! Admission, deadlines, step forming, fairness.
