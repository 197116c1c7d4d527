//! Turns a preprocessed .metal file into C++ for the stand-in. Types are never parsed: the translator finds kernels, the order of
//! their parameters' attributes, explicit instantiations, threadgroup variables and function constants; the rest stays as it is.
use crate::lexer::{is_attribute, lex, line_of, skip, Kind, Token};
use entry::KernelEntry;

mod entry;
mod kernel;
mod lint;

pub use entry::{FunctionConstant, Translation};

struct Param {
    kind: &'static str,
    index: usize,
}

struct Kernel {
    namespace: String,
    name: String,
    host: String,
    template: bool,
    params: Vec<Param>,
    max_threads: String,
}

struct Instance {
    host: String,
    expression: String,
    base: String,
    namespace: String,
}

pub fn translate(source: &str) -> Result<Translation, String> {
    let tokens = lex(source);
    let mut t = Translator {
        source,
        t: &tokens,
        kernels: vec![],
        instances: vec![],
        edits: vec![],
        constants: vec![],
        derived: vec![],
        namespaces: vec![],
        sites: 0,
    };
    t.file()?;
    t.leftover_attributes();
    t.output()
}

/// As many as a launch holds: runtime/abi.h.
const MAX_CONSTANTS: usize = 64;

struct Translator<'a> {
    source: &'a str,
    t: &'a [Token<'a>],
    kernels: Vec<Kernel>,
    instances: Vec<Instance>,
    edits: Vec<(usize, usize, String)>,
    constants: Vec<FunctionConstant>,
    derived: Vec<String>,
    namespaces: Vec<(String, usize)>,
    sites: usize,
}

/// One declaration at namespace level.
struct Declaration {
    start: usize,
    /// past `template <…>`
    head: usize,
    end: usize,
    paren: Option<usize>,
    body: Option<usize>,
    kernel: bool,
    template: bool,
}

impl<'a> Translator<'a> {
    fn error<T>(&self, i: usize, message: impl AsRef<str>) -> Result<T, String> {
        let (file, line) = line_of(self.source, self.t[i.min(self.t.len() - 1)].at);
        Err(format!("{file}:{line}: {}", message.as_ref()))
    }

    fn text(&self, a: usize, b: usize) -> &'a str {
        self.source[self.t[a].at..self.t[b].at].trim()
    }

    /// Replaces tokens a .. b; the text keeps its number of lines.
    fn replace(&mut self, a: usize, b: usize, by: String) {
        let (from, to) = (self.t[a].at, self.t[b - 1].end());
        let by = by.replace('\n', " ");
        let lines = self.source[from..to].matches('\n').count();
        self.edits.push((from, to, by + &"\n".repeat(lines)));
    }

    fn file(&mut self) -> Result<(), String> {
        let mut i = 0;
        while i < self.t.len() {
            if self.namespaces.last().is_some_and(|n| i >= n.1) {
                self.namespaces.pop();
                i += 1;
                continue;
            }
            if self.t[i].text == ";" {
                i += 1;
                continue;
            }
            if self.t[i].text == "namespace" {
                let open = (i..self.t.len())
                    .find(|&j| matches!(self.t[j].text, "{" | ";" | "="))
                    .unwrap_or(i);
                if self.t[open].text == "{" {
                    let name = self.t[i + 1..open].iter().map(|x| x.text).collect();
                    self.namespaces.push((name, skip(self.t, open) - 1));
                    i = open + 1;
                    continue;
                }
            }
            let d = self.declaration(i);
            let explicit = self.t[i].text == "template" && !d.template;
            if let (Some(body), Some(paren)) = (d.body, d.paren) {
                self.lint_pointers(&d, body, paren)?;
            }
            if explicit {
                self.instantiation(&d)?;
            } else if let (Some(body), true, Some(paren)) = (d.body, d.kernel, d.paren) {
                self.kernel(&d, body, paren)?;
            } else if d.body.is_none() {
                self.constant(&d)?;
            }
            i = d.end;
        }
        Ok(())
    }

    /// Tokens up to a semicolon or through a body.
    fn declaration(&self, start: usize) -> Declaration {
        let t = self.t;
        let template =
            t[start].text == "template" && t.get(start + 1).is_some_and(|x| x.text == "<");
        let mut j = start;
        while template && t[j].text == "template" {
            j = skip(t, j + 1);
        }
        let head = j;
        let (mut paren, mut kernel, mut assigned, mut body) = (None, false, false, None);
        while j < t.len() {
            if is_attribute(t, j) {
                let e = skip(t, j);
                kernel |= t[j..e].iter().any(|x| x.text == "kernel");
                j = e;
                continue;
            }
            match t[j].text {
                ";" => break,
                "{" if assigned => j = skip(t, j),
                "{" => {
                    body = Some(j);
                    break;
                }
                "(" => {
                    if paren.is_none() && !assigned {
                        paren = Some(j);
                    }
                    j = skip(t, j);
                }
                "[" => j = skip(t, j),
                word => {
                    assigned |= word == "=";
                    kernel |= word == "kernel";
                    j += 1;
                }
            }
        }
        let end = body.map_or((j + 1).min(t.len()), |b| skip(t, b));
        Declaration {
            start,
            head,
            end,
            paren,
            body,
            kernel,
            template,
        }
    }

    fn namespace(&self) -> String {
        self.namespaces
            .iter()
            .map(|n| format!("{}::", n.0))
            .collect()
    }

    /// `template [[host_name("x")]] [[kernel]] decltype(f<int>) f<int>;` and its other spellings.
    fn instantiation(&mut self, d: &Declaration) -> Result<(), String> {
        let t = self.t;
        let Some(h) = (d.start..d.end).find(|&x| t[x].text == "host_name") else {
            return Ok(());
        };
        let host: String = t[(h + 2).min(t.len())..d.end]
            .iter()
            .take_while(|x| x.kind == Kind::Text)
            .map(|x| x.text.trim_matches('"'))
            .collect();
        let (a, b) = if let Some(p) = (d.start..d.end).find(|&p| t[p].text == "decltype") {
            (p + 2, skip(t, p + 1) - 1)
        } else if let Some(p) = d.paren {
            let mut a = p - 1;
            if t[a].text == ">" {
                let mut depth = 0;
                while a > d.start {
                    depth += match t[a].text {
                        ">" => 1,
                        "<" => -1,
                        _ => 0,
                    };
                    a -= 1;
                    if depth == 0 {
                        break;
                    }
                }
            }
            (a, p)
        } else {
            // `template [[host_name("x")]] kernel some_t name<args>;` with an alias of the function type
            let last = |&x: &usize| {
                t[x].kind == Kind::Word
                    && t.get(x + 1).is_some_and(|y| y.text == "<")
                    && t.get(skip(t, x + 1)).is_some_and(|y| y.text == ";")
            };
            match (d.start..d.end).rev().find(last) {
                Some(a) => (a, d.end - 1),
                None => return self.error(d.start, "explicit instantiation of an unknown form"),
            }
        };
        let Some(base) = t[a..b].iter().take_while(|x| x.text != "<").last() else {
            return self.error(d.start, "explicit instantiation without a name");
        };
        self.instances.push(Instance {
            host,
            expression: self.text(a, b).to_string(),
            base: base.text.to_string(),
            namespace: self.namespace(),
        });
        self.replace(d.start, d.end, String::new());
        Ok(())
    }

    /// Function constants, and program-scope constants computed from them.
    fn constant(&mut self, d: &Declaration) -> Result<(), String> {
        let t = self.t;
        let Some(c) = (d.head..d.end).find(|&x| t[x].text == "constant") else {
            return Ok(());
        };
        if let Some(f) = (d.head..d.end).find(|&x| t[x].text == "function_constant") {
            let open = (c..f).rev().find(|&x| is_attribute(t, x)).unwrap_or(f);
            let Some(index) = t.get(f + 2).and_then(|x| x.text.parse::<usize>().ok()) else {
                return self.error(f, "[[function_constant(n)]] needs a number");
            };
            // the runtime numbers them in order of appearance
            let slot = self.constants.len();
            if slot == MAX_CONSTANTS {
                return self.error(
                    f,
                    format!("more than {MAX_CONSTANTS} function constants (the emulator's limit)"),
                );
            }
            let (name, ty) = (
                t[open - 1].text.to_string(),
                self.text(c + 1, open - 1).to_string(),
            );
            self.replace(
                d.head,
                d.end,
                format!("static const metal::emu_fc<{ty}, {slot}> {name};"),
            );
            self.derived.push(name.clone());
            self.constants.push(FunctionConstant { name, ty, index });
        } else if let Some(q) = (d.head..d.end).find(|&x| t[x].text == "=") {
            if t[q..d.end]
                .iter()
                .any(|x| x.kind == Kind::Word && self.derived.iter().any(|f| f == x.text))
            {
                let (name, ty, value) = (
                    t[q - 1].text,
                    self.text(c + 1, q - 1),
                    self.text(q + 1, d.end - 1),
                );
                self.replace(d.head, d.end, format!("static const struct emu_derived_{name} {{ EMU_NOSAN operator {ty}() const {{ return {value}; }} }} {name} = {{}};"));
                self.derived.push(name.to_string());
            }
        }
        Ok(())
    }

    /// Attributes elsewhere (forward declarations) that name a keyword macro must go too.
    fn leftover_attributes(&mut self) {
        for a in 0..self.t.len() {
            if is_attribute(self.t, a) {
                let e = skip(self.t, a);
                let at = self.t[a].at;
                if self.t[a..e]
                    .iter()
                    .any(|x| matches!(x.text, "threadgroup" | "kernel"))
                    && !self.edits.iter().any(|d| d.0 <= at && at < d.1)
                {
                    self.replace(a, e, String::new());
                }
            }
        }
    }

    fn output(mut self) -> Result<Translation, String> {
        let mut text = self.source.to_string();
        self.edits.sort_by_key(|e| e.0);
        for (a, b, by) in self.edits.iter().rev() {
            text.replace_range(*a..*b, by);
        }
        let source = format!(
            "#include \"msl.h\"\nnamespace msl {{\n{text}\n}}\n#line 1 \"emulator table\"\n"
        );
        let mut kernels = Vec::<KernelEntry>::new();
        for k in &self.kernels {
            let plain = Instance {
                host: k.host.clone(),
                expression: k.name.clone(),
                base: k.name.clone(),
                namespace: k.namespace.clone(),
            };
            let plain = (!k.template).then_some(&plain);
            for x in plain.into_iter().chain(
                self.instances
                    .iter()
                    .filter(|x| x.base == k.name && k.template),
            ) {
                if kernels.iter().any(|o| o.name == x.host) {
                    return Err(format!("two kernels are called {}", x.host));
                }
                kernels.push(KernelEntry {
                    name: x.host.clone(),
                    params: k
                        .params
                        .iter()
                        .map(|p| format!("{{EMU_P_{}, {}}}, ", p.kind, p.index))
                        .collect(),
                    nparams: k.params.len(),
                    function: format!("{}{}", x.namespace, x.expression),
                    max_threads: k.max_threads.clone(),
                });
            }
        }
        if let Some(x) = self
            .instances
            .iter()
            .find(|x| !self.kernels.iter().any(|k| k.name == x.base))
        {
            return Err(format!(
                "host_name {}: there is no kernel template {}",
                x.host, x.base
            ));
        }
        if kernels.is_empty() {
            return Err("the file has no kernel".into());
        }
        Ok(Translation {
            source,
            kernels,
            constants: self.constants,
        })
    }
}
