//! Pointers and references without an address space, which MSL does not have and C++ does not mind.
use super::{Declaration, Translator};
use crate::lexer::{is_attribute, skip, Kind};

const SPACES: [&str; 4] = ["device", "constant", "threadgroup", "thread"];
const QUALIFIERS: [&str; 6] = [
    "const",
    "volatile",
    "static",
    "constexpr",
    "inline",
    "typename",
];
/// Words that begin a statement and are no type.
const STATEMENTS: [&str; 12] = [
    "return", "else", "case", "goto", "delete", "new", "throw", "sizeof", "using", "typedef",
    "template", "auto",
];

impl Translator<'_> {
    pub(super) fn lint_pointers(
        &self,
        d: &Declaration,
        body: usize,
        paren: usize,
    ) -> Result<(), String> {
        if paren > body {
            return Ok(());
        }
        self.lint_parameters(paren + 1, skip(self.t, paren) - 1)?;
        for i in body + 1..d.end {
            let before = self.t[i - 1].text;
            let begins = matches!(before, ";" | "{" | "}")
                || (before == "(" && i > 1 && self.t[i - 2].text == "for");
            if begins {
                self.lint_statement(i, d.end)?;
            }
        }
        Ok(())
    }

    fn lint_parameters(&self, from: usize, to: usize) -> Result<(), String> {
        let t = self.t;
        let (mut i, mut pointer, mut space, mut value) = (from, None, false, false);
        while i <= to {
            if i == to || t[i].text == "," {
                if let (Some(p), false) = (pointer, space) {
                    return self.error(p, "a pointer or reference parameter without an address space (device, constant, threadgroup or thread)");
                }
                (pointer, space, value) = (None, false, false);
                i += 1;
                continue;
            }
            if is_attribute(t, i) || matches!(t[i].text, "(" | "[" | "{" | "<") {
                i = skip(t, i);
                continue;
            }
            value |= t[i].text == "=";
            space |= SPACES.contains(&t[i].text);
            if matches!(t[i].text, "*" | "&") && !value {
                pointer.get_or_insert(i);
            }
            i += 1;
        }
        Ok(())
    }

    /// `[const] Type<…> * name` followed by `=`, `;` or `[`.
    fn lint_statement(&self, start: usize, end: usize) -> Result<(), String> {
        let t = self.t;
        let mut i = start;
        while i < end && QUALIFIERS.contains(&t[i].text) {
            i += 1;
        }
        if i >= end
            || t[i].kind != Kind::Word
            || STATEMENTS.contains(&t[i].text)
            || SPACES.contains(&t[i].text)
        {
            return Ok(());
        }
        while i < end
            && (t[i].kind == Kind::Word || t[i].text == ":")
            && !SPACES.contains(&t[i].text)
        {
            i += 1;
        }
        if i < end && t[i].text == "<" {
            i = skip(t, i);
        }
        while i < end && t[i].text == "const" {
            i += 1;
        }
        let star = i;
        while i < end && matches!(t[i].text, "*" | "&" | "const") {
            i += 1;
        }
        let declares = i > star
            && i + 1 < end
            && t[i].kind == Kind::Word
            && matches!(t[i + 1].text, "=" | ";" | "[");
        let compares = i + 2 < end && t[i + 1].text == "=" && t[i + 2].text == "=";
        if declares && !compares {
            return self.error(star, format!("{}: a pointer or reference without an address space (device, constant, threadgroup or thread)", t[i].text));
        }
        Ok(())
    }
}
