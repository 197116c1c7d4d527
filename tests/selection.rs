//! Selections, policies, admission, memo and page: everything of SpecPrefill that runs without a model.

use std::ops::Range;

use candle_specprefill::specprefill::{
    admit, kept_rows, select, select_chunks, union, Keep as KeepRows, Kept, Policy, Reason, Report,
    Required, Role, Rule, ScoreMemo, Scores, Settings, Span,
};
use proptest::prelude::*;

fn selected(importance: &[f32], keep: f64, tail: usize) -> Vec<u32> {
    let settings = Settings {
        keep: keep.into(),
        tail,
        ..Default::default()
    };
    kept_rows(&select_chunks(importance, &[], &settings), &[])
}

/// Importance with a peak, elsewhere falling.
fn falling(n: usize) -> Vec<f32> {
    (0..n).map(|i| 1.0 / (1.0 + i as f32)).collect()
}

#[test]
fn published_test_vectors() {
    assert_eq!(selected(&falling(4096), 0.25, 512).len(), 1024);
    assert_eq!(selected(&falling(8192), 0.2, 512).len(), 1664);
    assert_eq!(selected(&falling(4100), 0.5, 512).len(), 2052);
    let kept = selected(&falling(1056), 0.1, 512);
    assert_eq!(kept, (544..1056).collect::<Vec<u32>>());
    let kept = selected(&falling(8193), 0.2, 512);
    assert!((7712..8193).all(|i| kept.contains(&i)));
    assert_eq!(selected(&falling(16), 0.5, 512).len(), 16);
    let kept = selected(&falling(4096), 0.25, 0);
    assert_eq!((kept.len(), kept.contains(&4095)), (1024, false));
}

#[test]
fn ties_go_to_the_earlier_chunk() {
    assert_eq!(selected(&[1.0; 320], 0.3, 0), (0..96).collect::<Vec<u32>>());
    let mut odd = vec![0.0; 320];
    odd[200] = f32::NAN;
    assert_eq!(selected(&odd, 0.1, 0), (0..32).collect::<Vec<u32>>());
}

fn keeps() -> impl Strategy<Value = KeepRows> {
    prop_oneof![
        (0.01f64..1.0).prop_map(KeepRows::Fraction),
        (1usize..3000).prop_map(KeepRows::Tokens),
        (0.01f64..1.0).prop_map(KeepRows::Mass),
        Just(KeepRows::Fraction(1.0)),
    ]
}

proptest! {
    #[test]
    fn selections_are_sorted_complete_and_within_budget(
        n in 1usize..3000, keep in keeps(), chunk in 1usize..70, tail in 0usize..600, neighbours in 0usize..3,
        marks in proptest::collection::vec((0usize..3000, 0usize..200), 0..4), seed in 0u32..1000,
    ) {
        let importance: Vec<f32> = (0..n as u32).map(|i| ((i ^ seed).wrapping_mul(2_654_435_769) >> 16) as f32).collect();
        let settings = Settings { keep, chunk, tail, neighbours, ..Default::default() };
        let required: Vec<Range<usize>> = marks.iter().map(|(at, len)| *at..at + len).collect();
        let chunks = select_chunks(&importance, &required, &settings);
        let kept = kept_rows(&chunks, &required);
        prop_assert!(kept.windows(2).all(|w| w[0] < w[1]));
        prop_assert!(kept.iter().all(|k| (*k as usize) < n));
        let has = |i: usize| kept.binary_search(&(i as u32)).is_ok();
        prop_assert!(required.iter().flat_map(|r| r.clone()).filter(|i| *i < n).all(has));
        prop_assert!((n.saturating_sub(tail)..n).all(has));
        if keep.is_all(n) {
            prop_assert_eq!(kept.len(), n);
        }
        // Without the chunks that were chosen, only what must be kept is left.
        let chosen = |c: &&candle_specprefill::specprefill::Chunk| matches!(c.kept, Some(Kept::Score | Kept::Neighbour));
        let free: usize = chunks.iter().filter(chosen).map(|c| (c.end - c.start - c.required) as usize).sum();
        let must = kept.len() - free;
        let budget = match keep {
            KeepRows::Fraction(k) => {
                let before = chunks.iter().filter(|c| c.kept != Some(Kept::Tail));
                let free = before.map(|c| c.required as f64 / (c.end - c.start) as f64).sum::<f64>();
                (((chunks.len() as f64 - free) * k).ceil() + free) * chunk as f64
            }
            KeepRows::Tokens(t) => t as f64,
            _ => return Ok(()),
        };
        let most = (budget as usize).max(must);
        prop_assert!(kept.len() <= most + chunk, "{} rows, budget {budget}, must {must}", kept.len());
        // And the budget is used, to within a chunk (and the last chunk's missing tokens).
        let open = chunks.iter().any(|c| c.kept.is_none());
        prop_assert!(!open || kept.len() + 2 * chunk > budget as usize, "{} rows of {budget}", kept.len());
    }

    #[test]
    fn a_share_of_importance_is_held_by_the_fewest_chunks(n in 40usize..2000, share in 0.05f64..0.99, seed in 0u32..1000) {
        let importance: Vec<f32> = (0..n as u32).map(|i| ((i ^ seed).wrapping_mul(2_654_435_769) >> 20) as f32).collect();
        let settings = Settings { keep: KeepRows::Mass(share), chunk: 8, tail: 0, ..Default::default() };
        let chunks = select_chunks(&importance, &[], &settings);
        let mass = |c: &candle_specprefill::specprefill::Chunk| c.score as f64 * (c.end - c.start) as f64;
        let all: f64 = chunks.iter().map(mass).sum();
        let mut ranked = chunks.clone();
        ranked.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.start.cmp(&b.start)));
        let count = chunks.iter().filter(|c| c.kept.is_some()).count();
        prop_assert!(ranked[..count].iter().all(|c| c.kept.is_some()));
        let held = |n: usize| ranked[..n].iter().map(mass).sum::<f64>();
        prop_assert!(held(count) >= share * all * (1.0 - 1e-5));
        prop_assert!(held(count - 1) < share * all);
    }
}

#[test]
fn what_must_be_kept_is_kept_and_reported() {
    let spans = [
        (Role::Template, 0..3),
        (Role::System, 3..40),
        (Role::Template, 40..44),
        (Role::LastUser, 44..900),
        (Role::Template, 900..905),
        (Role::Marked, 500..510),
    ];
    let spans = spans.map(|(role, tokens)| Span { role, tokens });
    let policy = Policy {
        last_user: Rule::Ends {
            first: 10,
            last: 20,
        },
        first: 8,
        ..Default::default()
    };
    let required = policy.required(&spans, 905, 4);
    let found = union(required.iter().map(|r| r.tokens.clone()), 905);
    assert_eq!(found, [0..54, 500..510, 880..905]);
    assert!(required.contains(&Required {
        role: Role::Tail,
        tokens: 901..905
    }));
    let scores = Scores {
        importance: vec![0.0; 905],
        ..Default::default()
    };
    let settings = |keep: f64| Settings {
        keep: keep.into(),
        tail: 4,
        ..Default::default()
    };
    // A share of what competes: 905 tokens are 29 chunks, of which 85 tokens before the tail are required anyway.
    let tight = select(&scores, &required, &settings(0.05));
    assert_eq!((tight.required_tokens(), tight.over_budget()), (89, false));
    assert!(tight.kept.len() > 89 && tight.kept.len() < 89 + 2 * 32 + 9);
    let few = Settings {
        keep: KeepRows::Tokens(64),
        ..settings(1.0)
    };
    let tight = select(&scores, &required, &few);
    assert_eq!((tight.required_tokens(), tight.budget), (89, Some(64)));
    // The tail's chunk is kept whole, other required tokens alone.
    assert!(tight.over_budget() && tight.kept.len() <= 89 + 9);
    assert!((0..54).chain(500..510).all(|i| tight.kept.contains(&i)));
    assert!(!tight.kept.contains(&499));
    assert!(!select(&scores, &required, &settings(0.5)).over_budget());
    let all = Policy::score_everything().required(&spans, 905, 0);
    assert_eq!(
        union(all.into_iter().map(|r| r.tokens), 905),
        [500..510, 904..905]
    );
}

#[test]
fn keep_is_written_in_several_ways() {
    for (text, want) in [
        ("0.2", KeepRows::Fraction(0.2)),
        ("4000t", KeepRows::Tokens(4000)),
        ("mass:0.9", KeepRows::Mass(0.9)),
        ("1.5s", KeepRows::Budget { ttft_s: 1.5 }),
    ] {
        assert_eq!(text.parse::<KeepRows>().unwrap(), want);
    }
    for bad in ["", "2", "0", "0t", "mass:", "-1s", "NaN", "x"] {
        assert!(bad.parse::<KeepRows>().is_err(), "{bad}");
    }
}

#[test]
fn refusals_say_why() {
    let s = Settings::default();
    let off = Settings {
        enabled: false,
        ..s.clone()
    };
    let all = Settings {
        keep: 1.0.into(),
        ..s.clone()
    };
    assert_eq!(admit(&off, Some(16384), 9000, &[]), Reason::Disabled);
    assert_eq!(admit(&s, None, 9000, &[]), Reason::NoDraft);
    assert_eq!(admit(&s, Some(16384), 8192, &[]), Reason::TooShort);
    assert_eq!(admit(&s, Some(16384), 8193, &[]), Reason::Admitted);
    assert_eq!(admit(&all, Some(16384), 9000, &[]), Reason::KeepsAll);
    assert_eq!(admit(&s, Some(9007), 9000, &[]), Reason::DraftContext);
    let marked = |ranges: [Range<usize>; 2]| {
        ranges.map(|tokens| Required {
            role: Role::Marked,
            tokens,
        })
    };
    let most = marked([0..4000, 4000..9000]);
    assert_eq!(admit(&s, Some(16384), 9000, &most), Reason::AllMandatory);
    let overlapping = marked([0..5000, 0..5000]);
    assert_eq!(admit(&s, Some(16384), 9000, &overlapping), Reason::Admitted);
    for bad in [
        Settings {
            keep: 0.0.into(),
            ..s.clone()
        },
        Settings {
            chunk: 0,
            ..s.clone()
        },
    ] {
        assert!(bad.validate().is_err(), "{bad:?}");
    }
    assert!(serde_json::from_str::<Settings>(r#"{"kep": 0.1}"#).is_err());
}

#[test]
fn the_memo_forgets_what_was_not_used_for_longest() {
    let memo = ScoreMemo::new(2);
    let scores = |v: f32| {
        std::sync::Arc::new(Scores {
            importance: vec![v],
            ..Default::default()
        })
    };
    memo.insert("a", &[1], scores(1.0));
    memo.insert("a", &[2], scores(2.0));
    assert_eq!(memo.get("a", &[1]).unwrap().importance, [1.0]);
    memo.insert("b", &[1], scores(3.0));
    assert!(memo.get("a", &[2]).is_none() && memo.len() == 2);
    assert_eq!(memo.get("b", &[1]).unwrap().importance, [3.0]);
    assert_eq!(memo.get("a", &[1]).unwrap().importance, [1.0]);
}

#[test]
fn seams_keep_the_tokens_before_every_run() {
    let mut importance = vec![0.0; 320];
    importance[100] = 1.0;
    let scores = Scores {
        importance,
        ..Default::default()
    };
    let settings = |seam| Settings {
        keep: KeepRows::Tokens(33),
        tail: 0,
        seam,
        ..Default::default()
    };
    let plain = select(&scores, &[], &settings(0)).kept;
    assert_eq!(plain, (96..128).chain(319..320).collect::<Vec<u32>>());
    let seamed = select(&scores, &[], &settings(3)).kept;
    assert_eq!(seamed, (93..128).chain(316..320).collect::<Vec<u32>>());
}

/// What a browser would show of the article, without what a rule drops.
fn shown(page: &str, only_kept: bool) -> String {
    let article = page.split("<article>").nth(1).unwrap();
    let article = article.split("</article>").next().unwrap();
    let mut out = String::new();
    for span in article.split("<span class=\"").skip(1) {
        let (head, rest) = span.split_once('>').unwrap();
        if !only_kept || head.starts_with('k') {
            out.push_str(rest.split("</span>").next().unwrap());
        }
    }
    let entities = [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&amp;", "&"),
    ];
    entities
        .iter()
        .fold(out, |text, (from, to)| text.replace(from, to))
}

#[test]
fn the_page_shows_the_whole_prompt_and_what_was_kept() {
    let words: Vec<String> = (0..200).map(|i| format!("w{i}<&\">é ")).collect();
    let text = words.concat();
    let mut end = 0;
    let offsets: Vec<(usize, usize)> = words
        .iter()
        .map(|w| {
            end += w.len();
            (end - w.len(), end)
        })
        .collect();
    let spans = [Span {
        role: Role::System,
        tokens: 40..50,
    }];
    let scores = Scores {
        importance: (0..200).map(|i| i as f32).collect(),
        ..Default::default()
    };
    let settings = Settings {
        keep: 0.3.into(),
        tail: 0,
        ..Default::default()
    };
    let required = settings.policy.required(&spans, 200, 0);
    let selection = select(&scores, &required, &settings);
    let report = Report {
        title: "a <b> title",
        selection: &selection,
        spans: &spans,
        text: &text,
        offsets: &offsets,
        facts: &[],
    };
    let page = report.html();
    assert_eq!(shown(&page, false), text);
    let kept: String = selection
        .kept
        .iter()
        .map(|i| words[*i as usize].as_str())
        .collect();
    assert_eq!(shown(&page, true), kept);
    assert!(selection.kept.len() < 130 && (40..50).all(|i| selection.kept.contains(&i)));
    assert!(page.contains("a &lt;b&gt; title") && page.contains(">system</i>"));
    assert!(!page.contains("<script") && !page.contains("http"));
    let json = serde_json::to_string(&selection).unwrap();
    assert_eq!(
        serde_json::from_str::<candle_specprefill::specprefill::Selection>(&json).unwrap(),
        selection
    );
}
