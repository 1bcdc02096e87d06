//! Drops on threads of their own.
//!
//! Closing a descriptor takes as long as its peer likes: a Unix-domain socket closes what was passed over it and not received, and a
//! passed descriptor may be a socket that lingers or a file of a stopped file system. Freeing a GiB takes a large part of a second.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};

/// Drops `held` on a thread of its own; on this one if there can be no thread.
pub fn drop_apart(held: impl Send + 'static) {
    drop_apart_then(held, || ());
}

/// As [`drop_apart`]; the thread then calls `then`.
pub fn drop_apart_then(held: impl Send + 'static, then: impl FnOnce() + Send + 'static) -> Dropping {
    let (counted, thread) = (Arc::new(()), std::thread::Builder::new().name("closer".to_owned()));
    let dropping = Dropping(Arc::downgrade(&counted));
    // A thread that cannot be started drops its function, and with it what it holds.
    let _ = thread.spawn(move || {
        drop(held);
        drop(counted);
        then();
    });
    dropping
}

/// A value that is being dropped on a thread of its own.
#[derive(Debug)]
pub struct Dropping(Weak<()>);

impl Dropping {
    /// Whether it has been dropped.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let has_ended = self.0.strong_count() == 0;
        // Orders what the other thread did before what follows here.
        fence(Ordering::Acquire);
        has_ended
    }
}
