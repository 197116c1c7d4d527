//! Prompts whose answers are known: facts hidden in long text, of the form that the embedded models were trained on.

use std::path::Path;

use anyhow::{Context, Result};
use candle_specprefill::pipeline::{Message, TextTokenizer};
use serde::Serialize;

use crate::common;

/// A kind of task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// One fact in the text, at a given depth.
    Needle,
    /// The third of three questions of one conversation: the text stands in an earlier turn.
    Multi,
    /// The fact stands in a tool's result between long turns.
    ToolResult,
    /// The fact stands in the system message.
    SystemSecret,
    /// A paragraph is to be quoted word by word.
    Quote,
}

/// A prompt and its answer.
#[derive(Clone, Debug)]
pub struct Task {
    pub kind: Kind,
    /// Tokens that were aimed at.
    pub length: usize,
    /// Where in the text the answer stands, 0 to 1.
    pub depth: f64,
    pub messages: Vec<Message>,
    pub answer: String,
}

/// Paragraphs to hide facts in, and a counter that makes facts.
pub struct Maker<'a> {
    tokenizer: &'a TextTokenizer,
    paragraphs: Vec<(String, usize)>,
    random: u64,
}

const KINDS: [&str; 6] = ["old", "northern", "silver", "quiet", "garden", "third"];
const PLACES: [&str; 8] = [
    "office",
    "library",
    "mill",
    "bakery",
    "clinic",
    "farm",
    "depot",
    "lighthouse",
];
const NUMBERS: [&str; 4] = [
    "access code",
    "badge number",
    "permit number",
    "postal code",
];

struct Fact {
    what: String,
    value: String,
}

impl Fact {
    fn sentence(&self) -> String {
        format!("Remember that the {} is {}.", self.what, self.value)
    }

    fn question(&self) -> String {
        format!("What is the {}?", self.what)
    }
}

impl<'a> Maker<'a> {
    /// Takes the embedded prompts' text, without their facts.
    pub fn new(tokenizer: &'a TextTokenizer, seed: u64) -> Result<Self> {
        let mut paragraphs = vec![];
        for i in ["16k_00", "16k_01", "16k_02", "8k_00", "8k_01"] {
            let file = common::tiny().join(format!("prompts/needle_{i}.json"));
            for message in common::read_messages(&file)? {
                paragraphs.extend(plain_paragraphs(&message.content));
            }
        }
        paragraphs.dedup();
        let count = |text: String| -> Result<_> {
            let tokens = tokenizer.encode(&text)?.len() + 1;
            Ok((text, tokens))
        };
        Ok(Self {
            tokenizer,
            paragraphs: paragraphs.into_iter().map(count).collect::<Result<_>>()?,
            random: seed,
        })
    }

    /// The text of a file in place of the embedded one.
    pub fn with_text(mut self, file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
        let paragraphs = plain_paragraphs(&text).into_iter();
        let counted = paragraphs.map(|p| Ok((p.clone(), self.tokenizer.encode(&p)?.len() + 1)));
        self.paragraphs = counted.collect::<Result<_>>()?;
        anyhow::ensure!(
            !self.paragraphs.is_empty(),
            "{}: no paragraphs",
            file.display()
        );
        Ok(self)
    }

    fn next(&mut self, n: usize) -> usize {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % n
    }

    fn pick(&mut self, list: &[&str]) -> String {
        list[self.next(list.len())].to_string()
    }

    fn fact(&mut self) -> Fact {
        let (kind, place) = (self.pick(&KINDS), self.pick(&PLACES));
        let what = format!("{} of the {kind} {place}", self.pick(&NUMBERS));
        let value = (10_000 + self.next(90_000)).to_string();
        Fact { what, value }
    }

    /// Facts about different things.
    fn facts(&mut self, n: usize) -> Vec<Fact> {
        let mut facts: Vec<Fact> = vec![];
        while facts.len() < n {
            let fact = self.fact();
            if facts.iter().all(|f| f.what != fact.what) {
                facts.push(fact);
            }
        }
        facts
    }

    /// Paragraphs of about `tokens` tokens.
    fn filler(&mut self, tokens: usize) -> Vec<String> {
        let start = self.next(self.paragraphs.len());
        let around = self.paragraphs.iter().cycle().skip(start);
        let mut left = tokens as i64;
        let taken = around.take_while(|(_, n)| {
            left -= *n as i64;
            left > 0
        });
        taken.map(|(text, _)| text.clone()).collect()
    }

    /// Text with sentences at depths.
    fn text(&mut self, tokens: usize, sentences: &[(f64, String)]) -> String {
        let mut paragraphs = self.filler(tokens);
        let mut sentences = sentences.to_vec();
        sentences.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (depth, sentence) in sentences {
            let at = (paragraphs.len() as f64 * depth) as usize;
            paragraphs.insert(at.min(paragraphs.len()), sentence);
        }
        paragraphs.join("\n\n")
    }

    /// A task of about `length` tokens whose answer stands at `depth`, beside seven facts that nobody asks for.
    pub fn make(&mut self, kind: Kind, length: usize, depth: f64) -> Task {
        let mut facts = self.facts(10);
        let fact = facts.remove(0);
        let others: Vec<(f64, String)> = facts[2..]
            .iter()
            .enumerate()
            .map(|(i, f)| ((i as f64 + 0.5) / 7.0, f.sentence()))
            .collect();
        let with = |more: Vec<(f64, String)>| [others.clone(), more].concat();
        let room = length.saturating_sub(320).max(100);
        let opening = "Read the following text carefully and answer the question at the end.\n\n";
        let ask =
            |text: String, question: &str| Message::user(format!("{opening}{text}\n\n{question}"));
        let mut answer = format!("{}.", fact.value);
        let messages = match kind {
            Kind::Needle => {
                let text = self.text(room, &with(vec![(depth, fact.sentence())]));
                vec![ask(text, &fact.question())]
            }
            Kind::Multi => {
                let (a, b) = (&facts[0], &facts[1]);
                let hidden = vec![
                    (depth, fact.sentence()),
                    (0.3, a.sentence()),
                    (0.6, b.sentence()),
                ];
                let text = self.text(room, &with(hidden));
                vec![
                    ask(text, &a.question()),
                    Message::new("assistant", format!("{}.", a.value)),
                    Message::user(b.question()),
                    Message::new("assistant", format!("{}.", b.value)),
                    Message::user(fact.question()),
                ]
            }
            Kind::ToolResult => {
                let text = self.text(room, &others);
                vec![
                    ask(text, &facts[0].question()),
                    Message::new("assistant", "I will look it up."),
                    Message::new("tool", fact.sentence()),
                    Message::user(fact.question()),
                ]
            }
            Kind::SystemSecret => {
                let text = self.text(room, &others);
                vec![
                    Message::system(fact.sentence()),
                    ask(text, &fact.question()),
                ]
            }
            Kind::Quote => {
                let mut paragraphs = self.filler(room);
                let at = (paragraphs.len() as f64 * depth) as usize;
                let long = |p: &String| (80..260).contains(&p.len());
                let found = paragraphs.iter().skip(at).find(|p| long(p));
                answer = found
                    .or_else(|| paragraphs.iter().rev().find(|p| long(p)))
                    .cloned()
                    .unwrap_or_default();
                // The beginning must not name another paragraph.
                let words: Vec<&str> = answer.split_whitespace().take(6).collect();
                let begins = words.join(" ");
                let mut seen = false;
                paragraphs
                    .retain(|p| !p.starts_with(&begins) || !std::mem::replace(&mut seen, true));
                let question = format!("Quote the paragraph that begins with \"{begins}\".");
                vec![ask(paragraphs.join("\n\n"), &question)]
            }
        };
        Task {
            kind,
            length,
            depth,
            messages,
            answer,
        }
    }

    /// Plain text of about `tokens` tokens.
    pub fn plain(&mut self, tokens: usize) -> Result<Vec<u32>> {
        let text = self.filler(tokens).join("\n\n");
        Ok(self.tokenizer.encode(&text)?)
    }
}

/// Paragraphs that hold no fact, no question and no instruction.
fn plain_paragraphs(text: &str) -> Vec<String> {
    let digits = |p: &str| p.chars().filter(char::is_ascii_digit).count();
    let plain = |p: &&str| {
        p.len() > 40 && digits(p) < 3 && !p.starts_with("Read the") && !p.contains(" of the text")
    };
    text.split("\n\n")
        .map(str::trim)
        .filter(plain)
        .map(String::from)
        .collect()
}

/// How much of the answer is right: all or nothing for values, the share of the words that match in order for quotes.
pub fn score(task: &Task, text: &str) -> f64 {
    match task.kind {
        Kind::Quote => {
            let want: Vec<&str> = task.answer.split_whitespace().collect();
            let got = text.split_whitespace();
            let right = want.iter().zip(got).take_while(|(w, g)| **w == *g).count();
            right as f64 / want.len().max(1) as f64
        }
        _ => (text.trim() == task.answer) as u8 as f64,
    }
}
