//! LEDGER-ADDS-UP: chains, sums, trees, exports; and that the replay machine is the same after its ledger was read back.

use super::*;
use crate::dialect::{Dialect, Outcome};
use crate::key::{Keys, Matched};
use crate::money::Money;
use crate::names::{CallId, Digest, EntryRef, Hex, Nonce};
use crate::price::PriceTable;
use crate::replay::{Began, Effect, Gone, Input, Replay, ReplayMode, Why};
use crate::usage::Usage;
use ks_proto::ids::RunToken;
use proptest::prelude::*;

/// 2026-11-30 00:00:00 UTC.
const DAY: u64 = 1_795_996_800_000;

fn nonce(n: u8) -> Nonce {
    Hex([n; 16])
}
fn keys(k: u8) -> Keys {
    Keys { target: Hex([0; 32]), raw: Hex([k; 32]), canonical: Some(Hex([k; 32])) }
}
fn timeline(n: u8, prior: Option<u8>, position: u64) -> Entry {
    let token = RunToken { generation: 0, epoch: 1, run: u64::from(n) };
    let began = if prior.is_some() { Began::Resume } else { Began::Boot };
    Entry::Timeline { nonce: nonce(n), prior: prior.map(nonce), position, mode: ReplayMode::On, began, token }
}
fn intent(n: u8, counter: u64, k: u8, user: &str) -> Entry {
    Entry::Intent(Box::new(Intent {
        call: CallId { nonce: nonce(n), counter },
        timeline: nonce(n),
        user: user.into(),
        token: RunToken::default(),
        provider: "anthropic".into(),
        dialect: Dialect::Anthropic,
        model: Some("claude-haiku-4-5".into()),
        method: "POST".into(),
        path: "/v1/messages".into(),
        keys: keys(k),
        body_hash: Hex([k; 32]),
        body_bytes: 10,
        stateful: false,
        stream: true,
        input_estimate: 3,
        max_output: Some(100),
        reserved: Some(Money::of_tokens(1, 1)),
        why: Why::New,
    }))
}
fn completed(of: u64, outcome: Outcome, usage: Option<Usage>) -> Entry {
    let t = PriceTable::built_in();
    Entry::Completed(Box::new(Completed {
        of,
        status: 200,
        outcome,
        usage,
        model: Some("claude-haiku-4-5-20251001".into()),
        tier: None,
        cost: usage.and_then(|u| t.cost("anthropic", "claude-haiku-4-5", None, &u)),
        price_table: t.hash(),
        head_hash: Digest::of(b""),
        body_bytes: 100,
        body_hash: Digest::of(b""),
        single_copy: false,
        provider_request_id: Some("req_1".into()),
        response_id: None,
        error: None,
        first_byte_ms: Some(3),
        took_ms: 9,
    }))
}
fn served(n: u8, counter: u64, of: EntryRef) -> Entry {
    let call = CallId { nonce: nonce(n), counter };
    Entry::Served { call, timeline: nonce(n), of, matched: Matched::Raw, body_hash: Hex([1; 32]) }
}
const U: Usage = Usage { input: 1000, cache_read: 0, cache_write_5m: 0, cache_write_1h: 0, output: 200, reasoning: 0 };

fn file(chain: &mut Chain, entries: Vec<Entry>) -> String {
    entries.into_iter().enumerate().map(|(i, e)| chain.append(DAY + i as u64 * 40_000_000, e).1 + "\n").collect()
}
fn sample() -> String {
    let mut chain = Chain::new("s1");
    file(
        &mut chain,
        vec![
            timeline(1, None, 0),
            intent(1, 0, 10, "ann"),
            completed(2, Outcome::Complete, Some(U)),
            intent(1, 1, 11, "bob"),
            completed(4, Outcome::Unknown, None),
            timeline(2, Some(1), 0),
            served(2, 0, EntryRef::own(2)),
            Entry::Diverged { timeline: nonce(2), call: CallId { nonce: nonce(2), counter: 1 } },
            Entry::Resolved { of: 4, by: ByWhom::Hand, resolution: Resolution::NotBilled, note: "asked".into() },
        ],
    )
}

#[test]
fn a_line_of_version_1_reads_as_it_was_written() {
    let first = sample().lines().next().unwrap().to_owned();
    let golden = concat!(
        r#"{"seq":1,"at_ms":1795996800000,"session":"s1","kind":"timeline","nonce":"01010101010101010101010101010101","#,
        r#""position":0,"mode":"on","began":"boot","token":{"generation":0,"epoch":1,"run":1},"#,
    );
    assert!(first.starts_with(golden), "{first}");
    assert_eq!(day_of(DAY), "2026-11-30");
    for (ms, day) in [(0, "1970-01-01"), (951_782_400_000, "2000-02-29"), (1_709_251_199_999, "2024-02-29")] {
        assert_eq!(day_of(ms), day);
    }
}

#[test]
fn every_changed_byte_of_a_ledger_is_refused() {
    let text = sample();
    let ledger = Ledger::read("s1", &text).unwrap();
    assert_eq!((ledger.lines.len(), ledger.whole_bytes), (9, text.len()));
    ledger.check(&[PriceTable::built_in()]).unwrap();
    for at in (0..text.len()).filter(|at| text.as_bytes()[*at] != b'\n') {
        let mut bytes = text.clone().into_bytes();
        bytes[at] ^= 1;
        let Ok(changed) = String::from_utf8(bytes) else { continue };
        assert!(Ledger::read("s1", &changed).is_err(), "byte {at}");
    }
    assert!(Ledger::read("s2", &text).is_err(), "another session's");
    // A line left out, two exchanged.
    let lines: Vec<&str> = text.lines().collect();
    assert!(Ledger::read("s1", &(lines[1..].join("\n") + "\n")).is_err());
    assert!(Ledger::read("s1", &([lines[1], lines[0]].join("\n") + "\n")).is_err());
}

#[test]
fn a_torn_last_line_is_cut_and_the_chain_goes_on() {
    let text = sample();
    let whole = text.trim_end().rfind('\n').unwrap() + 1;
    for cut in whole..text.len() {
        let ledger = Ledger::read("s1", &text[..cut]).unwrap();
        assert_eq!((ledger.whole_bytes, ledger.lines.len()), (whole, 8));
        let mut chain = ledger.chain();
        let more = chain.append(DAY, timeline(3, Some(2), 7)).1;
        assert_eq!(Ledger::read("s1", &format!("{}{more}\n", &text[..whole])).unwrap().lines.len(), 9);
    }
}

#[test]
fn a_ledger_that_contradicts_itself_is_refused() {
    let bad = |entries: Vec<Entry>, why: &str| {
        let text = file(&mut Chain::new("s1"), entries);
        let e = Ledger::read("s1", &text).unwrap().check(&[PriceTable::built_in()]).unwrap_err().to_string();
        assert!(e.contains(why), "{e}");
    };
    let (i, c) = (|| intent(1, 0, 10, "u"), || completed(1, Outcome::Complete, Some(U)));
    bad(vec![i(), i()], "bought a second time");
    bad(vec![i(), c(), c()], "ended already");
    bad(vec![timeline(1, None, 0), c()], "is no purchase");
    bad(vec![served(1, 0, EntryRef::own(9))], "is no purchase");
    let resolved = || Entry::Resolved { of: 1, by: ByWhom::Hand, resolution: Resolution::NotBilled, note: String::new() };
    bad(vec![i(), c(), resolved()], "not unknown");
    bad(vec![i(), completed(1, Outcome::Unknown, None), resolved(), resolved()], "resolved already");
    let mut cheap = c();
    if let Entry::Completed(c) = &mut cheap {
        c.cost = Some(Money::ZERO);
    }
    bad(vec![i(), cheap], "its cost is 0.00, by its usage and price table it is 0.002");
    let mut late = Chain::new("s1");
    let text = file(&mut late, vec![i(), Entry::Origin { from: "p".into(), at_seq: 1, at_hash: None }]);
    assert!(Ledger::read("s1", &text).unwrap_err().to_string().contains("first line"));
}

#[test]
fn sums_per_session_user_day_and_tree() {
    let parent = Ledger::read("s1", &sample()).unwrap();
    let hash = parent.lines[2].1;
    let mut chain = Chain::fork("s2", 3, Some(hash));
    let origin = Entry::Origin { from: "s1".into(), at_seq: 3, at_hash: Some(hash) };
    let of_parent = EntryRef { session: Some("s1".into()), seq: 2 };
    let text =
        file(&mut chain, vec![origin, intent(3, 0, 10, "ann"), completed(5, Outcome::Failed, Some(U)), served(3, 1, of_parent)]);
    let child = Ledger::read("s2", &text).unwrap();
    child.check(&[PriceTable::built_in()]).unwrap();
    assert_eq!(child.lines[0].0.seq, 4);
    verify_tree(&[parent.clone(), child.clone()]).unwrap();
    // A parent that was rewritten does not carry the fork any more.
    let other =
        file(&mut Chain::new("s1"), vec![timeline(1, None, 0), intent(1, 0, 9, "x"), completed(2, Outcome::Complete, Some(U))]);
    assert!(verify_tree(&[Ledger::read("s1", &other).unwrap(), child.clone()]).is_err());

    let all: Vec<Purchase> = parent.purchases().into_iter().chain(child.purchases()).collect();
    let t = Totals::of(&all);
    // 1,000 in at 1 and 200 out at 5 dollars per million: 0.002 each.
    assert_eq!((t.purchases, t.not_whole, t.unknown, t.unpriced, t.served), (3, 1, 0, 0, 1));
    assert_eq!((t.cost.to_string().as_str(), t.saved_cost.to_string().as_str()), ("0.004", "0.002"));
    assert_eq!((t.usage.input, t.usage.output, t.saved.input), (2000, 400, 1000));
    let by = |f: fn(&Purchase) -> String| Totals::by(&all, f).into_iter().map(|(n, t)| (n, t.purchases)).collect::<Vec<_>>();
    assert_eq!(by(|p| p.user.clone()), [("ann".into(), 2), ("bob".into(), 1)]);
    assert_eq!(by(|p| p.session.clone()), [("s1".into(), 2), ("s2".into(), 1)]);
    assert_eq!(by(|p| day_of(p.at_ms)), [("2026-11-30".into(), 2), ("2026-12-01".into(), 1)]);
    assert_eq!(child.served_of_others().into_iter().collect::<Vec<_>>(), [(("s1".into(), 2), 1)]);
    // Every way of adding gives the same.
    for f in [|p: &Purchase| p.user.clone(), |p: &Purchase| p.session.clone(), |p: &Purchase| day_of(p.at_ms)] {
        assert_eq!(Totals::by(&all, f).values().map(|t| t.cost).sum::<Money>(), t.cost);
    }
}

#[test]
fn an_unknown_purchase_is_shown_until_the_export_settles_it() {
    let table = PriceTable::built_in();
    let entries = vec![
        intent(1, 0, 10, "u"),
        completed(1, Outcome::Complete, Some(U)),
        intent(1, 1, 11, "u"),
        completed(3, Outcome::Unknown, None),
    ];
    let text = file(&mut Chain::new("s1"), entries);
    let ledger = Ledger::read("s1", &text).unwrap();
    let purchases = ledger.purchases();
    assert_eq!(Totals::of(&purchases).unknown, 1);
    let anthropic = |input: u64, output: u64| {
        // The first purchase is of this day, the second, with its answer, of the same.
        format!(
            "usage_date_utc,model_version,api_key,usage_input_tokens_no_cache,usage_input_tokens_cache_write_5m,usage_input_tokens_cache_write_1h,usage_input_tokens_cache_read,usage_output_tokens\r\n\
             2026-11-30,claude-haiku-4-5-20251001,\"a, b\",{input},0,0,0,{output}\r\n"
        )
    };
    let compare = |csv: &str| reconcile("anthropic", &purchases, &Export::parse(csv).unwrap(), &table);
    let (rows, proposals) = compare(&anthropic(1000, 200));
    assert_eq!((rows.len(), rows[0].verdict), (1, "agrees"));
    assert_eq!(proposals, [Proposal { session: "s1".into(), of: 3, resolution: Resolution::NotBilled }]);
    let (_, proposals) = compare(&anthropic(1500, 210));
    let Resolution::Billed { usage, cost, .. } = &proposals[0].resolution else { panic!() };
    assert_eq!((usage.input, usage.output, cost.unwrap().to_string().as_str()), (500, 10, "0.00055"));
    assert_eq!(compare(&anthropic(999, 200)).1, []);
    // What the export does not speak of is not taken as not billed: another day, or the model under another name.
    let other_day = anthropic(1000, 200).replace("2026-11-30", "2026-11-29");
    let (rows, none) = compare(&other_day);
    assert_eq!((rows[1].verdict, none), ("the export does not have this day", vec![]));
    let alone = [Purchase { model: "alias".into(), ..purchases[1].clone() }];
    let of_alias = |csv: &str| reconcile("anthropic", &alone, &Export::parse(csv).unwrap(), &table);
    let next_day = anthropic(0, 0) + anthropic(1500, 210).replace("2026-11-30", "2026-12-01").lines().nth(1).unwrap();
    for csv in [anthropic(1500, 210), next_day] {
        let (rows, proposals) = of_alias(&csv);
        let ours = rows.iter().find(|r| !r.unknown.is_empty()).unwrap();
        assert!(proposals.is_empty() && ours.verdict.contains("another name"), "{csv}\n{rows:?}");
    }
    assert_eq!(of_alias(&anthropic(0, 0)).1.len(), 1, "a whole day on which nothing was billed");
    // What is appended resolves it.
    let mut chain = ledger.chain();
    let line = chain
        .append(
            DAY,
            Entry::Resolved { of: 3, by: ByWhom::Reconcile, resolution: proposals[0].resolution.clone(), note: String::new() },
        )
        .1;
    let after = Ledger::read("s1", &format!("{text}{line}\n")).unwrap();
    after.check(&[table]).unwrap();
    let t = Totals::of(&after.purchases());
    assert_eq!((t.unknown, t.cost.to_string().as_str()), (0, "0.00255"));
}

#[test]
fn exports_of_both_providers_are_read_in_both_forms() {
    let day = |e: &Export| (e.rows[0].day.clone(), e.rows[0].model.clone());
    let json = r#"{"object":"page","data":[{"object":"bucket","start_time":1795996800,"end_time":1796083200,"results":[{"object":"organization.usage.completions.result","input_tokens":1000,"output_tokens":50,"input_cached_tokens":800,"num_model_requests":5,"model":"gpt-5.5-2026-04-23"}]}],"has_more":false}"#;
    let e = Export::parse(json).unwrap();
    assert_eq!(day(&e), ("2026-11-30".into(), "gpt-5.5-2026-04-23".into()));
    assert_eq!(e.rows[0].usage, Usage::openai(1000, 800, 0, 50, 0).unwrap());
    let csv = "start_time,end_time,num_model_requests,model,input_tokens,output_tokens,input_cached_tokens\n1795996800,1796083200,5,gpt-5.5-2026-04-23,1000,50,800\n";
    assert_eq!(Export::parse(csv).unwrap(), e);
    let json = r#"{"data":[{"starting_at":"2026-11-30T00:00:00Z","ending_at":"2026-12-01T00:00:00Z","results":[{"uncached_input_tokens":10,"cache_creation":{"ephemeral_1h_input_tokens":3,"ephemeral_5m_input_tokens":2},"cache_read_input_tokens":7,"output_tokens":5,"model":"claude-opus-5-5"}]}],"has_more":false}"#;
    let e = Export::parse(json).unwrap();
    assert_eq!((day(&e).0.as_str(), e.rows[0].usage), ("2026-11-30", Usage::anthropic(10, 7, 2, 3, 5)));
    for (bad, why) in [
        ("", "names no columns"),
        ("{}", "no list `data`"),
        ("a,b\n1,2", "names no columns"),
        (&json.replace("false", "true"), "more pages"),
        (&json.replace(",\"model\":\"claude-opus-5-5\"", ""), "group by model"),
        (&csv.replace("1000", "x"), "row 1 of the export: input_tokens is \"x\""),
        (&csv.replace(",800", ",1800"), "more than the whole"),
    ] {
        let e = Export::parse(bad).unwrap_err().to_string();
        assert!(e.contains(why), "{bad}: {e}");
    }
}

#[test]
fn the_replay_machine_is_the_same_after_its_ledger_was_read_back() {
    let mut chain = Chain::new("s1");
    let mut machine = Replay::default();
    let mut loaded = Replay::default();
    let mut write = |loaded: &mut Replay, entry: Entry| {
        let (line, text) = chain.append(DAY, entry);
        let mut again = Chain::new("s1");
        // By way of its text.
        let body: Line = serde_json::from_str(&text).unwrap();
        assert_eq!((&body, again.next()), (&line, 1));
        assert!(line.seq > 1 || again.follow(&text).is_ok());
        loaded.load(&body);
        line.seq
    };
    let ask = |m: &mut Replay, n: u8, counter: u64, k: u8| {
        let call = CallId { nonce: nonce(n), counter };
        m.step(0, Input::Ask { call, timeline: nonce(n), keys: keys(k), body_hash: Hex([k; 32]), stateful: false })
    };
    let open = |m: &mut Replay, n: u8, prior: Option<u8>, position: u64, began: Began| {
        m.step(0, Input::OpenTimeline { nonce: nonce(n), prior: prior.map(nonce), position, mode: ReplayMode::On, began });
    };
    open(&mut machine, 1, None, 0, Began::Boot);
    write(&mut loaded, timeline(1, None, 0));
    let mut seqs = vec![];
    for (counter, k) in [(0, 10), (1, 11), (2, 12)] {
        assert!(matches!(ask(&mut machine, 1, counter, k)[..], [Effect::Live { .. }]));
        let seq = write(&mut loaded, intent(1, counter, k, "u"));
        machine.step(0, Input::Bought { call: CallId { nonce: nonce(1), counter }, seq });
        if k != 12 {
            machine.step(0, Input::Changed { entry: EntryRef::own(seq), stored: 100, outcome: Some(Outcome::Complete) });
            write(&mut loaded, completed(seq, Outcome::Complete, Some(U)));
        }
        seqs.push(seq);
    }
    assert_eq!(loaded.open_entries(), [seqs[2]]);
    let position = seqs[0];
    open(&mut machine, 2, Some(1), position, Began::Resume);
    write(&mut loaded, timeline(2, Some(1), position));
    assert!(matches!(ask(&mut machine, 2, 0, 11)[..], [Effect::Serve { .. }]));
    let seq = write(&mut loaded, served(2, 0, EntryRef::own(seqs[1])));
    machine.step(0, Input::Noted { call: CallId { nonce: nonce(2), counter: 0 }, seq });
    assert_eq!(machine.last(), loaded.last());
    // Both decide alike from here on: a third life, calls by key and by name.
    for m in [&mut machine, &mut loaded] {
        open(m, 3, Some(2), position, Began::Resume);
        assert!(matches!(&ask(m, 3, 0, 11)[..], [Effect::Serve { entry, .. }] if entry.seq == seqs[1]));
        assert!(matches!(&ask(m, 3, 1, 12)[..], [Effect::Join { entry, .. }] if entry.seq == seqs[2]));
        assert!(matches!(&ask(m, 3, 2, 10)[..], [Effect::Live { why: Why::New, .. }]));
        open(m, 4, Some(2), position, Began::Resume);
        let (call, body_hash) = (CallId { nonce: nonce(1), counter: 2 }, Hex([12; 32]));
        m.step(0, Input::ClientGone { call, how: Gone::Cut });
        let back = m.step(0, Input::Rejoin { call, timeline: nonce(4), offset: 0, head_sent: false, body_hash });
        assert!(matches!(&back[..], [Effect::Join { told: Some(n), .. }] if *n == seqs[2]), "{back:?}");
    }
}

proptest! {
    #[test]
    fn hostile_ledgers_and_exports_never_panic(text in "[{}\\[\\]\":,a-z0-9\n\"-]{0,200}", bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = (Ledger::read("s", &text), Export::parse(&text));
        let lossy = String::from_utf8_lossy(&bytes);
        let _ = (Ledger::read("s", &lossy), Export::parse(&lossy), PriceTable::parse(&lossy));
    }
}
