//! Tokens of preprocessed Metal source, with their place in the text.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Word,
    Number,
    Text,
    Mark,
}

#[derive(Clone, Copy, Debug)]
pub struct Token<'a> {
    pub kind: Kind,
    pub text: &'a str,
    pub at: usize,
}

impl Token<'_> {
    pub fn end(&self) -> usize {
        self.at + self.text.len()
    }
}

/// Splits a text; line markers and pragmas are left out.
pub fn lex(source: &str) -> Vec<Token<'_>> {
    let b = source.as_bytes();
    let (mut i, mut tokens, mut line_start) = (0, Vec::new(), true);
    while i < b.len() {
        let (c, start) = (b[i], i);
        if c == b'\n' {
            line_start = true;
            i += 1;
            continue;
        }
        if c.is_ascii_whitespace() {
            i += 1;
            continue;
        }
        if c == b'#' && line_start {
            while i < b.len() && b[i] != b'\n' {
                i += 1;
            }
            continue;
        }
        line_start = false;
        let kind = if c.is_ascii_alphabetic() || c == b'_' {
            while i < b.len() && (b[i].is_ascii_alphanumeric() || b[i] == b'_') {
                i += 1;
            }
            Kind::Word
        } else if c.is_ascii_digit() || (c == b'.' && b.get(i + 1).is_some_and(u8::is_ascii_digit))
        {
            while i < b.len()
                && (b[i].is_ascii_alphanumeric()
                    || b[i] == b'.'
                    || b[i] == b'_'
                    || (matches!(b[i], b'+' | b'-')
                        && matches!(b[i - 1], b'e' | b'E' | b'p' | b'P')))
            {
                i += 1;
            }
            Kind::Number
        } else if c == b'"' || c == b'\'' {
            i += 1;
            while i < b.len() && b[i] != c {
                i += if b[i] == b'\\' { 2 } else { 1 };
            }
            i = (i + 1).min(b.len());
            Kind::Text
        } else {
            i += 1;
            while !source.is_char_boundary(i) {
                i += 1;
            }
            Kind::Mark
        };
        tokens.push(Token {
            kind,
            text: &source[start..i],
            at: start,
        });
    }
    tokens
}

/// Index just past the token that closes the bracket at `i` (the next index when there is no bracket).
pub fn skip(t: &[Token], i: usize) -> usize {
    let (open, close) = match t[i].text {
        "(" => ("(", ")"),
        "[" => ("[", "]"),
        "{" => ("{", "}"),
        "<" => ("<", ">"),
        _ => return i + 1,
    };
    let (mut depth, mut j) = (0, i);
    while j < t.len() {
        let s = t[j].text;
        if s == open {
            depth += 1;
        } else if s == close {
            depth -= 1;
            if depth == 0 {
                return j + 1;
            }
        } else if open == "<" && matches!(s, "(" | "[" | "{") {
            j = skip(t, j);
            continue;
        }
        j += 1;
    }
    t.len()
}

/// Does `[[` begin here?
pub fn is_attribute(t: &[Token], i: usize) -> bool {
    t[i].text == "["
        && t.get(i + 1)
            .is_some_and(|n| n.text == "[" && n.at == t[i].at + 1)
}

/// The line of a place in preprocessed text, by its line markers.
pub fn line_of(source: &str, at: usize) -> (String, usize) {
    let (mut file, mut line) = (String::new(), 1);
    for l in source[..at].split_inclusive('\n') {
        if !l.ends_with('\n') {
            break;
        }
        match l.strip_prefix("# ").and_then(|r| r.split_once(' ')) {
            Some((number, rest)) if number.parse::<usize>().is_ok() => {
                line = number.parse().unwrap_or(1);
                file = rest.split('"').nth(1).unwrap_or("").to_string();
            }
            _ => line += 1,
        }
    }
    (file, line)
}
