//! Budgets: what a call may cost is reserved before it is sent, and settled when it ended.
//!
//! ```text
//! Reserve ──fits both accounts──► held ──Settle (real cost)──► spent      an overshoot is booked; the next call is refused
//!    └──────does not──► refused     └────Release (never sent)──► free
//! ```
//!
//! An account without a limit admits everything and still counts. A user's account may be one *slice* of a budget that
//! the whole fleet shares: the node may spend only what it was granted, and asks for more when little is left.

use crate::money::Money;
use crate::names::CallId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Whose account.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Account {
    /// One session, by id.
    Session(String),
    /// One user.
    User(String),
}

/// What an account may spend, and has spent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Balance {
    /// The most that it may spend here; none is no limit.
    pub limit: Option<Money>,
    /// Booked.
    pub spent: Money,
    /// Reserved by calls under way.
    pub held: Money,
}

impl Balance {
    /// What is left to reserve; none is no limit. Nothing is left after an overshoot.
    pub fn left(&self) -> Option<Money> {
        self.limit.map(|l| l.saturating_sub(self.spent + self.held))
    }
}

/// One call's reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hold {
    user: String,
    amount: Money,
}

/// Why a call may not be bought.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The account has not enough left.
    #[error(
        "the budget of {} has {left} dollars left and this call reserves {asked}; raise it, or declare a smaller output",
        who(account)
    )]
    Budget {
        /// Which.
        account: Account,
        /// What is left.
        left: Money,
        /// What the call reserves.
        asked: Money,
    },
    /// There is a budget, and nobody knows what the call costs.
    #[error(
        "the budget of {} cannot hold a call of unknown price; add the model to the price overlay, or remove the budget",
        who(account)
    )]
    Unpriced {
        /// Which.
        account: Account,
    },
    /// The call holds a reservation already.
    #[error("call {} of this timeline is under way already", call.counter)]
    Twice {
        /// Which.
        call: CallId,
    },
}

fn who(account: &Account) -> String {
    match account {
        Account::Session(s) => format!("session {s}"),
        Account::User(u) => format!("user {u}"),
    }
}

/// The accounts of a node.
#[derive(Debug, Clone, Default)]
pub struct Budgets {
    accounts: BTreeMap<Account, Balance>,
    holds: BTreeMap<(String, CallId), Hold>,
}

impl Budgets {
    /// Sets or removes an account's limit. For a user in a fleet: the sum of the slices granted to this node so far.
    pub fn set_limit(&mut self, account: Account, limit: Option<Money>) {
        self.accounts.entry(account).or_default().limit = limit;
    }
    /// Books what an earlier process spent (from the ledger, at start).
    pub fn book(&mut self, account: Account, spent: Money) {
        let a = self.accounts.entry(account).or_default();
        a.spent = a.spent + spent;
    }
    /// A session's journal came from elsewhere: this is what it spent, by user. What was booked of it here before is not counted twice,
    /// as long as one user paid it all.
    pub fn rebook(&mut self, session: &str, by_user: &BTreeMap<String, Money>) {
        let total = by_user.values().fold(Money::ZERO, |sum, m| sum + *m);
        let a = self.accounts.entry(Account::Session(session.to_owned())).or_default();
        let before = std::mem::replace(&mut a.spent, total);
        for (user, spent) in by_user {
            let a = self.accounts.entry(Account::User(user.clone())).or_default();
            let known = if by_user.len() == 1 { before } else { Money::ZERO };
            a.spent = a.spent.saturating_sub(known) + *spent;
        }
    }
    /// An account as it stands.
    pub fn balance(&self, account: &Account) -> Balance {
        self.accounts.get(account).copied().unwrap_or_default()
    }
    /// Every account.
    pub fn balances(&self) -> impl Iterator<Item = (&Account, &Balance)> {
        self.accounts.iter()
    }
    /// Reserves `amount` (none: the price is unknown) from session and user at once, or from neither.
    pub fn reserve(&mut self, session: &str, user: &str, call: CallId, amount: Option<Money>) -> Result<(), Refused> {
        let id = (session.to_owned(), call);
        if self.holds.contains_key(&id) {
            return Err(Refused::Twice { call });
        }
        let accounts = [Account::Session(session.to_owned()), Account::User(user.to_owned())];
        for account in &accounts {
            let Some(left) = self.balance(account).left() else { continue };
            let Some(asked) = amount else { return Err(Refused::Unpriced { account: account.clone() }) };
            // A call that reserves nothing still needs a balance that is not overdrawn.
            if asked > left || left == Money::ZERO {
                return Err(Refused::Budget { account: account.clone(), left, asked });
            }
        }
        let amount = amount.unwrap_or(Money::ZERO);
        for account in accounts {
            let a = self.accounts.entry(account).or_default();
            a.held = a.held + amount;
        }
        self.holds.insert(id, Hold { user: user.to_owned(), amount });
        Ok(())
    }
    /// Ends a reservation and books the real cost, whatever it is. An unknown cost of a call with a known reservation books
    /// the reservation: nothing that may have been billed is counted as free. False if nothing was reserved.
    pub fn settle(&mut self, session: &str, call: CallId, cost: Option<Money>) -> bool {
        self.end(session, call, |held| cost.unwrap_or(held))
    }
    /// Ends the reservation of a call that was never sent.
    pub fn release(&mut self, session: &str, call: CallId) -> bool {
        self.end(session, call, |_| Money::ZERO)
    }
    fn end(&mut self, session: &str, call: CallId, cost: impl Fn(Money) -> Money) -> bool {
        let Some(hold) = self.holds.remove(&(session.to_owned(), call)) else { return false };
        for account in [Account::Session(session.to_owned()), Account::User(hold.user.clone())] {
            let a = self.accounts.entry(account).or_default();
            a.held = a.held.saturating_sub(hold.amount);
            a.spent = a.spent + cost(hold.amount);
        }
        true
    }
    /// Users whose slice has less than `low` left: more should be asked of the fleet.
    pub fn want_slices(&self, low: Money) -> Vec<String> {
        self.accounts
            .iter()
            .filter_map(|(account, b)| match account {
                Account::User(u) => b.left().is_some_and(|l| l < low).then(|| u.clone()),
                Account::Session(_) => None,
            })
            .collect()
    }
    /// Gives back at most `amount` of a user's slice that is neither spent nor held; returns what was given back.
    pub fn return_slice(&mut self, user: &str, amount: Money) -> Money {
        let Some(a) = self.accounts.get_mut(&Account::User(user.to_owned())) else { return Money::ZERO };
        let given = a.left().unwrap_or(Money::ZERO).min(amount);
        a.limit = a.limit.map(|l| l.saturating_sub(given));
        given
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Hex;
    use proptest::prelude::*;

    fn call(counter: u64) -> CallId {
        CallId { nonce: Hex([1; 16]), counter }
    }
    fn usd(text: &str) -> Money {
        Money::parse(text).unwrap()
    }

    #[test]
    fn concurrent_calls_at_the_edge_of_a_budget() {
        // G10: fifty at once, money for ten.
        let mut b = Budgets::default();
        b.set_limit(Account::Session("s".into()), Some(usd("1.00")));
        let ok = (0..50).filter(|i| b.reserve("s", "u", call(*i), Some(usd("0.10"))).is_ok()).count();
        assert_eq!(ok, 10);
        assert_eq!(b.balance(&Account::User("u".into())).held, usd("1.00"));
        // They cost half of what was reserved: five more fit... as ten halves.
        for i in 0..10 {
            assert!(b.settle("s", call(i), Some(usd("0.05"))));
        }
        let ok = (50..99).filter(|i| b.reserve("s", "u", call(*i), Some(usd("0.10"))).is_ok()).count();
        assert_eq!(ok, 5);
    }

    #[test]
    fn an_overshoot_is_booked_and_the_next_call_refused() {
        let mut b = Budgets::default();
        b.set_limit(Account::User("u".into()), Some(usd("1.00")));
        b.reserve("s", "u", call(1), Some(usd("0.90"))).unwrap();
        assert!(b.settle("s", call(1), Some(usd("1.50"))));
        assert_eq!(b.balance(&Account::User("u".into())).spent, usd("1.50"));
        let refused = b.reserve("s", "u", call(2), Some(Money::ZERO)).unwrap_err();
        assert!(matches!(&refused, Refused::Budget { account: Account::User(_), .. }));
        assert!(refused.to_string().starts_with("the budget of user u has 0.00 dollars left"), "{refused}");
        b.set_limit(Account::User("u".into()), Some(usd("3.00")));
        assert_eq!(b.reserve("s", "u", call(2), Some(usd("1.50"))), Ok(()));
    }

    #[test]
    fn both_accounts_or_neither_and_unpriced_only_without_a_budget() {
        let mut b = Budgets::default();
        assert_eq!(b.reserve("s", "u", call(1), None), Ok(()));
        assert_eq!(b.reserve("s", "u", call(1), None), Err(Refused::Twice { call: call(1) }));
        b.set_limit(Account::User("u".into()), Some(usd("0.10")));
        assert_eq!(b.reserve("s", "u", call(2), None), Err(Refused::Unpriced { account: Account::User("u".into()) }));
        assert!(b.reserve("s", "u", call(2), Some(usd("0.11"))).is_err());
        assert_eq!(b.balance(&Account::Session("s".into())).held, Money::ZERO);
        // Its end unknown: what was reserved is taken as spent.
        b.reserve("s", "u", call(3), Some(usd("0.10"))).unwrap();
        assert!(b.settle("s", call(3), None) && !b.settle("s", call(3), None));
        assert_eq!(b.balance(&Account::Session("s".into())).spent, usd("0.10"));
    }

    #[test]
    fn a_journal_that_comes_back_is_booked_once() {
        let (mut b, s, u) = (Budgets::default(), Account::Session("s".into()), Account::User("u".into()));
        b.book(s.clone(), usd("1.00"));
        b.book(u.clone(), usd("5.00"));
        b.set_limit(s.clone(), Some(usd("3.00")));
        // Elsewhere it bought for another dollar and a half.
        b.rebook("s", &BTreeMap::from([("u".to_owned(), usd("2.50"))]));
        assert_eq!(
            (b.balance(&s).spent, b.balance(&u).spent, b.balance(&s).left()),
            (usd("2.50"), usd("6.50"), Some(usd("0.50")))
        );
        b.rebook("s", &BTreeMap::from([("u".to_owned(), usd("2.50"))]));
        assert_eq!((b.balance(&s).spent, b.balance(&u).spent), (usd("2.50"), usd("6.50")));
        b.rebook("t", &BTreeMap::from([("u".to_owned(), usd("1.00")), ("v".to_owned(), usd("1.00"))]));
        assert_eq!(b.balance(&Account::Session("t".into())).spent, usd("2.00"));
    }

    #[test]
    fn slices_are_asked_for_and_given_back() {
        let mut b = Budgets::default();
        b.set_limit(Account::User("u".into()), Some(usd("1.00")));
        assert!(b.want_slices(usd("0.50")).is_empty());
        b.reserve("s", "u", call(1), Some(usd("0.60"))).unwrap();
        assert_eq!(b.want_slices(usd("0.50")), ["u"]);
        assert_eq!(b.return_slice("u", usd("9")), usd("0.40"));
        assert!(b.reserve("s", "u", call(2), Some(usd("0.01"))).is_err());
        assert_eq!(b.return_slice("v", usd("1")), Money::ZERO);
    }

    proptest! {
        /// What is held is the sum of the reservations under way, and nothing is admitted beyond the limit.
        #[test]
        fn holds_add_up(ops in proptest::collection::vec((0u64..8, 0u8..3, 0u64..50), 1..80)) {
            let mut b = Budgets::default();
            let account = Account::Session("s".into());
            b.set_limit(account.clone(), Some(Money::of_tokens(100, 1)));
            let mut open = BTreeMap::new();
            let mut spent = Money::ZERO;
            for (c, op, n) in ops {
                let amount = Money::of_tokens(n, 1);
                match op {
                    0 => if b.reserve("s", "u", call(c), Some(amount)).is_ok() {
                        prop_assert!(open.insert(c, amount).is_none());
                        prop_assert!(b.balance(&account).spent + b.balance(&account).held <= Money::of_tokens(100, 1));
                    },
                    1 => if b.settle("s", call(c), Some(amount)) {
                        prop_assert!(open.remove(&c).is_some());
                        spent = spent + amount;
                    },
                    _ => prop_assert_eq!(b.release("s", call(c)), open.remove(&c).is_some()),
                }
                prop_assert_eq!(b.balance(&account).held, open.values().copied().sum());
                prop_assert_eq!(b.balance(&account).spent, spent);
            }
        }
    }
}
