// SPDX-License-Identifier: Apache-2.0
//! Runs a step for many elements with a bounded number of threads, and passes each result to the caller as soon as the
//! step has ended.

use std::{
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

/// The maximum number of steps that run at the same time.
const AT_ONCE: usize = 8;

/// Calls `work` for each element on at most [`AT_ONCE`] threads, and `accept` on this thread for each result, in the
/// order in which the results become available. A thread begins its next element when its result has been received, so
/// at most [`AT_ONCE`] results wait in memory.
///
/// # Errors
///
/// Returns the first error of `accept`. After this error, no thread begins a further element.
pub(super) fn for_each<T: Sync, R: Send, E>(
    elements: &[T],
    work: impl Fn(&T) -> R + Sync,
    mut accept: impl FnMut(usize, &T, R) -> Result<(), E>,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        let (sender, results) = mpsc::sync_channel(0);
        for _ in 0..AT_ONCE.min(elements.len()) {
            let (sender, next, work) = (sender.clone(), &next, &work);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(element) = elements.get(index) else { break };
                    if sender.send((index, element, work(element))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        for (index, element, result) in results {
            accept(index, element, result)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, sync::Mutex};

    use anyhow::bail;

    use super::*;

    #[test]
    fn each_element_is_worked_on_once_and_only_some_at_the_same_time() {
        let elements: Vec<usize> = (0..5 * AT_ONCE).collect();
        let (running, most) = (AtomicUsize::new(0), Mutex::new(0));
        let work = |element: &usize| {
            let now = running.fetch_add(1, Ordering::SeqCst) + 1;
            let mut most = most.lock().unwrap();
            *most = now.max(*most);
            drop(most);
            running.fetch_sub(1, Ordering::SeqCst);
            element * 2
        };
        let mut seen = BTreeSet::new();
        let accept = |index: usize, element: &usize, result: usize| {
            assert_eq!((index, result), (*element, element * 2));
            assert!(seen.insert(index));
            anyhow::Ok(())
        };
        for_each(&elements, work, accept).unwrap();
        assert_eq!(seen.len(), elements.len());
        assert!(*most.lock().unwrap() <= AT_ONCE);
        let none: [usize; 0] = [];
        for_each(&none, |_| (), |_, _, ()| bail!("no element")).unwrap();
    }

    #[test]
    fn after_an_error_no_further_element_begins() {
        let elements = vec![(); 100 * AT_ONCE];
        let begun = AtomicUsize::new(0);
        let work = |(): &()| {
            begun.fetch_add(1, Ordering::SeqCst);
        };
        let error = for_each(&elements, work, |_, (), ()| bail!("full")).unwrap_err();
        assert_eq!(error.to_string(), "full");
        assert!(begun.load(Ordering::SeqCst) <= 2 * AT_ONCE, "{begun:?}");
    }
}
