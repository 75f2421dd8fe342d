//! Notices a VM's process that is there and does not answer: stopped, or hung. First it is shown, then it counts as lost.
//!
//! The process answers this question from a thread of its own, whatever its VM does. Silence is counted in questions, not
//! in time that passed here: a node that slept or was stopped itself asks again before it judges.

use super::vm::LiveVm;
use ks_proto::control::VmmRequest;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between two questions that were answered.
const EVERY: Duration = Duration::from_secs(5);
/// An answer is due within this; then it is asked again.
const ANSWER: Duration = Duration::from_secs(5);
/// Questions in a row without an answer after which the VM counts as lost: a minute.
const SILENT_MAX: u32 = 12;

/// How long a process has been silent.
#[derive(Debug, Default)]
pub struct Pulse {
    since: Mutex<Option<Instant>>,
}

impl Pulse {
    /// Seconds without an answer, if the last question has none.
    pub fn silent_s(&self) -> Option<u64> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner).map(|t| t.elapsed().as_secs())
    }
    /// The same in the words that people see.
    pub fn words(&self) -> Option<String> {
        self.silent_s().map(|s| format!("its VM process does not answer since {s} s"))
    }
    fn note(&self, asked: Option<Instant>) {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        *since = asked.map(|a| since.unwrap_or(a));
    }
}

/// Asks until the VM ends or is silent for too long; returns the cause in the second case.
pub async fn watch(vm: &LiveVm) -> Option<String> {
    let mut ended = vm.ended.clone();
    let mut silent = 0;
    loop {
        let asked = Instant::now();
        let question = vm.control.ask(VmmRequest::Stats {}, &[], ANSWER);
        let answered = tokio::select! {
            answer = question => answer.is_ok(),
            _ = ended.wait_for(Option::is_some) => return None,
        };
        silent = if answered { 0 } else { silent + 1 };
        vm.pulse.note((!answered).then_some(asked));
        if silent >= SILENT_MAX {
            return Some(format!("its VM process {} did not answer for {} s", vm.pid, vm.pulse.silent_s().unwrap_or_default()));
        }
        // After silence it is asked again at once; a refusal must not become a busy loop either.
        let pause = if answered { EVERY } else { ANSWER.saturating_sub(asked.elapsed()) };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = ended.wait_for(Option::is_some) => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_counted_from_its_first_question_and_ends_with_an_answer() {
        let p = Pulse::default();
        assert_eq!(p.words(), None);
        let first = Instant::now() - Duration::from_secs(70);
        p.note(Some(first));
        p.note(Some(Instant::now()));
        assert_eq!(p.words().as_deref(), Some("its VM process does not answer since 70 s"));
        p.note(None);
        assert_eq!(p.silent_s(), None);
    }
}
