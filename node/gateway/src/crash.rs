//! Named points at which a test kills the process, so that each step between claim and release is visited.
//!
//! Without the feature `crash-points` (every ordinary build) a point is nothing.

/// The points, in the order in which a call passes them. Between `intent-durable` and `head` the provider works: a test kills the
/// process there by hand, when the provider has the request.
pub const POINTS: [&str; 8] =
    ["accepted", "intent-queued", "intent-durable", "head", "first-byte", "finished", "completed-durable", "released"];

/// Dies here, as by SIGKILL, if this is the point that `KS_GW_CRASH_AT` names.
#[cfg(feature = "crash-points")]
pub fn point(name: &str) {
    debug_assert!(POINTS.contains(&name), "{name} is not a crash point");
    if std::env::var("KS_GW_CRASH_AT").is_ok_and(|at| at == name) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        // SIGKILL is not waited for by the sender.
        loop {
            std::thread::park();
        }
    }
}

/// Nothing.
#[cfg(not(feature = "crash-points"))]
pub fn point(_name: &str) {}
