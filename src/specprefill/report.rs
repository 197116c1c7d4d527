//! A selection as a page to look at: the prompt with kept and dropped text, coloured by importance.

use std::fmt::Write;

use serde::Serialize;

use super::{Kept, Role, Selection, Span};

/// What a page shows beside the selection.
#[derive(Clone, Debug, Serialize)]
pub struct Report<'a> {
    /// The heading.
    pub title: &'a str,
    /// The selection.
    pub selection: &'a Selection,
    /// What the tokens are.
    pub spans: &'a [Span],
    /// The prompt's text.
    pub text: &'a str,
    /// The bytes of the text that each token stands for: from, to.
    pub offsets: &'a [(usize, usize)],
    /// More numbers for the head of the page: name and value.
    pub facts: &'a [(String, String)],
}

/// Steps of colour.
const LEVELS: usize = 10;

impl Report<'_> {
    /// One self-contained HTML page, for light and dark.
    pub fn html(&self) -> String {
        let mut out = String::with_capacity(self.text.len() * 3 + 8192);
        let title = escape(self.title);
        let _ = write!(
            out,
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <title>{title}</title><style>{STYLE}</style></head><body><main>\
             <h1>{title}</h1>"
        );
        self.facts(&mut out);
        let levels = self.levels();
        self.strip(&levels, &mut out);
        out.push_str(LEGEND);
        out.push_str("<article>");
        self.body(&levels, &mut out);
        out.push_str("</article></main></body></html>\n");
        out
    }

    fn facts(&self, out: &mut String) {
        let s = self.selection;
        let kept = s.chunks.iter().filter(|c| c.kept.is_some()).count();
        let mut facts = vec![
            ("prompt tokens".to_string(), s.total.to_string()),
            (
                "kept".to_string(),
                format!("{} ({:.1} %)", s.kept.len(), 100.0 * s.share()),
            ),
            ("required".to_string(), s.required_tokens().to_string()),
            (
                "chunks kept".to_string(),
                format!("{kept} of {}", s.chunks.len()),
            ),
        ];
        if let Some(budget) = s.budget {
            let over = if s.over_budget() {
                ", exceeded by what is required"
            } else {
                ""
            };
            facts.push(("budget".into(), format!("{budget}{over}")));
        }
        facts.extend_from_slice(self.facts);
        out.push_str("<dl>");
        for (name, value) in &facts {
            let _ = write!(
                out,
                "<div><dt>{}</dt><dd>{}</dd></div>",
                escape(name),
                escape(value)
            );
        }
        out.push_str("</dl>");
    }

    /// Every chunk's step of colour: by rank, because scores span orders of magnitude.
    fn levels(&self) -> Vec<usize> {
        let chunks = &self.selection.chunks;
        let mut order: Vec<usize> = (0..chunks.len()).collect();
        order.sort_by(|a, b| chunks[*a].score.total_cmp(&chunks[*b].score));
        let mut levels = vec![0; chunks.len()];
        for (rank, i) in order.into_iter().enumerate() {
            levels[i] = rank * LEVELS / chunks.len();
        }
        levels
    }

    /// One bar per chunk.
    fn strip(&self, levels: &[usize], out: &mut String) {
        let count = self.selection.chunks.len().max(1);
        let _ = write!(
            out,
            "<svg class=\"strip\" viewBox=\"0 0 {count} 10\" preserveAspectRatio=\"none\" role=\"img\" \
             aria-label=\"importance and selection along the prompt\">"
        );
        for (i, (chunk, level)) in self.selection.chunks.iter().zip(levels).enumerate() {
            let class = if chunk.kept.is_some() { "k" } else { "d" };
            let height = level + 1;
            let _ = write!(
                out,
                "<rect class=\"{class}\" x=\"{i}\" y=\"{}\" width=\"1\" height=\"{height}\"/>",
                LEVELS - height
            );
        }
        out.push_str("</svg>");
    }

    fn body(&self, levels: &[usize], out: &mut String) {
        let s = self.selection;
        let mut kept = vec![false; s.total];
        for row in &s.kept {
            if let Some(kept) = kept.get_mut(*row as usize) {
                *kept = true;
            }
        }
        let mut roles = vec![Role::Text; s.total];
        for span in self.spans.iter().filter(|s| s.role != Role::Marked) {
            let end = span.tokens.end.min(s.total);
            roles[span.tokens.start.min(end)..end].fill(span.role);
        }
        let size = s
            .chunks
            .first()
            .map_or(1, |c| (c.end - c.start).max(1) as usize);
        let key = |i: usize| (i / size, kept[i], roles[i]);
        let (mut i, mut byte, mut role) = (0, 0, None);
        while i < s.total.min(self.offsets.len()) {
            let end = (i..s.total).find(|j| key(*j) != key(i)).unwrap_or(s.total);
            let end = end.min(self.offsets.len());
            let upto = self.offsets[end - 1].1.max(byte);
            let text = self.text.get(byte..upto).unwrap_or_default();
            byte = upto;
            if role != Some(roles[i]) {
                role = Some(roles[i]);
                if roles[i] != Role::Template {
                    let _ = write!(out, "<i class=\"role\">{}</i>", name(roles[i]));
                }
            }
            if let (Some(chunk), Some(level)) = (s.chunks.get(i / size), levels.get(i / size)) {
                let why = match (chunk.kept, kept[i]) {
                    (Some(Kept::Required), _) => "kept: required",
                    (Some(Kept::Tail), _) => "kept: tail",
                    (Some(Kept::Score), _) => "kept: score",
                    (Some(Kept::Neighbour), _) => "kept: neighbour",
                    (None, true) => "kept: required",
                    (None, false) => "dropped",
                };
                let class = match (kept[i], chunk.kept) {
                    (true, Some(Kept::Score | Kept::Neighbour)) => "k",
                    (true, _) => "k r",
                    (false, _) => "d",
                };
                let _ = write!(
                    out,
                    "<span class=\"{class} i{level}\" title=\"tokens {i}–{end}, {why}, score {:.3e}\">{}</span>",
                    chunk.score,
                    escape(text)
                );
            }
            i = end;
        }
    }
}

fn name(role: Role) -> &'static str {
    match role {
        Role::Template => "template",
        Role::System => "system",
        Role::ToolResult => "tool result",
        Role::Assistant => "assistant",
        Role::User => "user",
        Role::LastUser => "last user turn",
        Role::Text => "text",
        Role::First => "first",
        Role::Tail => "tail",
        Role::Marked => "marked",
    }
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

const LEGEND: &str = "<input type=\"checkbox\" id=\"only\"><label for=\"only\">show only what was kept</label>\
<p class=\"legend\"><span class=\"k i9\">kept, high score</span> <span class=\"k i3\">kept, low score</span> \
<span class=\"k r i3\">kept whatever it scores</span> <span class=\"d i1\">dropped</span> \
<small>Hover over text for its score. Colour is the rank among chunks.</small></p>";

const STYLE: &str = ":root{color-scheme:light dark;--bg:#fcfcfa;--fg:#1d1f21;--dim:#7d7d77;--line:#dedcd5;--hot:#e8590c;--box:#fff;--req:#1c7ed6}\
@media(prefers-color-scheme:dark){:root{--bg:#16181b;--fg:#e8e6e1;--dim:#8d9096;--line:#33363a;--hot:#ff922b;--box:#1e2125;--req:#74c0fc}}\
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.6 system-ui,sans-serif}\
main{max-width:62rem;margin:0 auto;padding:2rem 1.25rem 4rem}h1{font-size:1.4rem;margin:0 0 1rem}\
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(11rem,1fr));gap:.6rem;margin:0 0 1.25rem}\
dl div{background:var(--box);border:1px solid var(--line);border-radius:.5rem;padding:.5rem .75rem}\
dt{font-size:.75rem;color:var(--dim)}dd{margin:0;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}\
.strip{display:block;width:100%;height:4.5rem;background:var(--box);border:1px solid var(--line);border-radius:.5rem;margin-bottom:1rem}\
.strip .k{fill:var(--hot)}.strip .d{fill:var(--dim);opacity:.45}\
label{cursor:pointer;font-size:.9rem;margin-left:.35rem}.legend{font-size:.85rem;margin:.5rem 0 1rem}.legend small{color:var(--dim);margin-left:.5rem}\
article{background:var(--box);border:1px solid var(--line);border-radius:.5rem;padding:1rem 1.25rem;white-space:pre-wrap;overflow-wrap:anywhere;\
font:13px/1.65 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}\
.k{background:color-mix(in srgb,var(--hot) calc(var(--l,0)*4.5%),transparent);border-radius:2px}.d{color:var(--dim)}\
.r{box-shadow:inset 0 -2px var(--req)}#only:checked~article .d{display:none}\
.role{display:inline-block;font:600 11px/1.4 system-ui,sans-serif;letter-spacing:.03em;background:var(--req);color:var(--bg);\
padding:.05rem .45rem;border-radius:1rem;margin:0 .35rem 0 0;vertical-align:1px}\
.i0{--l:1}.i1{--l:2}.i2{--l:3}.i3{--l:4}.i4{--l:5}.i5{--l:6}.i6{--l:7}.i7{--l:8}.i8{--l:9}.i9{--l:11}";
