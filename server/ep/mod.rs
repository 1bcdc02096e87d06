//! EP groups: symmetric windows, prepare, dispatch and combine.
