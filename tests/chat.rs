//! The example `chat` through a pipe, with the embedded pair.
#![cfg(feature = "chat")]

#[path = "../examples/common/mod.rs"]
mod common;

use std::io::Write;

use common::chat::{Interrupt, Terminal};

fn chat(args: &[&str], input: &[u8]) -> (u8, String, String) {
    let (mut out, mut err) = (vec![], vec![]);
    let mut terminal = Terminal {
        input: &mut &input[..],
        out: &mut out,
        err: &mut err,
        interactive: false,
    };
    let args = std::iter::once("chat").chain(args.iter().copied());
    let status = common::chat::run(args, &mut terminal, &Interrupt::default());
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status, text(out), text(err))
}

#[test]
fn a_conversation_goes_on_and_says_what_it_cost() {
    let input =
        "Tell me about tea.\n\nAnd about the sea?\n/history\n/stats\n/quit\nnobody reads this\n";
    let (status, out, err) = chat(&["--max-tokens", "12"], input.as_bytes());
    assert_eq!(status, 0, "{err}");
    let costs: Vec<&str> = err
        .lines()
        .filter(|l| l.contains("tokens per cycle;"))
        .collect();
    assert_eq!(costs.len(), 2, "{err}");
    assert!(
        costs[0].contains("tok/s") && costs[0].contains("cut at /max-tokens"),
        "{err}"
    );
    // The second turn read its own tokens only.
    let new = |line: &str| -> usize {
        let of = line.split("read ").nth(1).unwrap();
        of.split_whitespace().next().unwrap().parse().unwrap()
    };
    assert!(new(costs[1]) < new(costs[0]) + 14, "{err}");
    for part in [
        "user: Tell me about tea.",
        "assistant: ",
        "user: And about the sea?",
        "in the cache",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    assert!(!out.contains("nobody"));
}

#[test]
fn what_was_undone_leaves_no_trace() {
    let plain = chat(&["--max-tokens", "10"], b"Tell me about tea.\n");
    let undone = chat(
        &["--max-tokens", "10"],
        b"Define the word \"harbour\".\n/undo\nTell me about tea.\n/retry\n",
    );
    let answers: Vec<&str> = undone.1.lines().collect();
    let tea = plain.1.trim_end();
    assert!(undone.1.trim_end().ends_with(tea), "{answers:?}");
    assert_eq!(
        undone.1.matches(tea).count(),
        2,
        "again the same: {answers:?}"
    );
}

#[test]
fn settings_are_changed_and_mistakes_cost_nothing() {
    let input = "/temperature 0.8\n/depth 2\n/top-p 7\n/keep nonsense\n/no-such\n/settings\n/undo\n/file /no/such/file\n\
                 /max-tokens 3\nTell me about tea.\n";
    let (status, out, err) = chat(&[], input.as_bytes());
    assert_eq!(status, 0, "{err}");
    assert!(
        out.contains("\"temperature\": 0.8") && out.contains("\"top_p\": 1.0"),
        "{out}"
    );
    let errors: Vec<&str> = err.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 5, "{err}");
    for (error, part) in
        errors
            .iter()
            .zip(["top-p", "keep", "/help", "taken back", "/no/such/file"])
    {
        assert!(error.contains(part), "{error}");
    }
    assert!(err.contains("[3 tokens"), "{err}");
}

#[test]
fn lines_go_on_after_a_backslash_and_need_not_be_text() {
    let (status, out, err) = chat(
        &["--max-tokens", "2"],
        b"one\\\ntwo\n//three\nbad \xff byte\n/history",
    );
    assert_eq!(status, 0, "{err}");
    assert!(out.contains("user: one\ntwo\n"), "{out}");
    assert!(out.contains("user: /three\n"), "{out}");
    assert!(out.contains("user: bad \u{FFFD} byte\n"), "{out}");
}

#[test]
fn a_conversation_is_saved_and_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("talk.json");
    let file = file.to_str().unwrap();
    let options = ["--max-tokens", "8", "--system", "Be brief."];
    let input = format!("Tell me about tea.\n/save {file}\nAnd the sea?\n");
    let whole = chat(&options, input.as_bytes());
    assert!(whole.2.contains("wrote"), "{}", whole.2);
    let again = chat(&["--max-tokens", "8", "--load", file], b"And the sea?\n");
    let last = |out: &str| out.lines().last().map(String::from);
    assert_eq!(last(&whole.1), last(&again.1));
    let (status, _, err) = chat(&["--load", "/no/such/file"], b"");
    assert_eq!((status, err.lines().count()), (1, 1), "{err}");
}

/// Asks for the end as soon as something is shown, as Ctrl-C would.
struct Impatient<'a> {
    shown: Vec<u8>,
    interrupt: &'a Interrupt,
    stops: usize,
}

impl Write for Impatient<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if !bytes.iter().all(u8::is_ascii_whitespace) && self.stops == 0 {
            assert!(self.interrupt.stop(), "an answer is under way");
            self.stops += 1;
        }
        self.shown.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_interrupt_ends_the_answer_and_not_the_program() {
    let interrupt = Interrupt::default();
    assert!(!interrupt.stop(), "no answer is under way");
    let mut out = Impatient {
        shown: vec![],
        interrupt: &interrupt,
        stops: 0,
    };
    let mut err = vec![];
    let mut terminal = Terminal {
        input: &mut &b"Tell me about tea.\n/max-tokens 5\nAnd the sea?\n"[..],
        out: &mut out,
        err: &mut err,
        interactive: false,
    };
    let args = ["chat", "--max-tokens", "2000", "--temperature", "1"];
    let status = common::chat::run(args, &mut terminal, &interrupt);
    let err = String::from_utf8(err).unwrap();
    assert_eq!((status, out.stops), (0, 1), "{err}");
    assert!(err.contains("; stopped]"), "{err}");
    assert!(
        err.contains("[5 tokens"),
        "the next turn is answered: {err}"
    );
    assert!(!interrupt.stop());
}

#[test]
fn a_retry_that_fails_keeps_the_old_answer() {
    let long = "word ".repeat(150);
    let input = format!("Tell me about tea.\n/system {long}\n/retry\n/system\n/history\n");
    let options = ["--max-tokens", "5", "--context", "100"];
    let (status, out, err) = chat(&options, input.as_bytes());
    assert_eq!(status, 0, "{err}");
    assert!(err.contains("error: prompt: "), "{err}");
    let history: Vec<&str> = out.lines().filter(|l| l.contains(": ")).collect();
    assert!(history[0].starts_with("user: Tell me about tea."), "{out}");
    assert!(history[1].starts_with("assistant: "), "{out}");
    let answer = out.lines().next().unwrap();
    assert!(history[1].contains(answer.trim()), "{out}");
}
