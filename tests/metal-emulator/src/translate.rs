//! Turns a preprocessed .metal file into C++ for the stand-in. Types are never parsed: the translator finds kernels, the order of
//! their parameters' attributes, explicit instantiations, threadgroup variables and function constants; the rest stays as it is.
use crate::lexer::{is_attribute, lex, line_of, skip, Kind, Token};
use std::fmt::Write;

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

/// A `constant T name [[function_constant(n)]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionConstant {
    pub name: String,
    pub ty: String,
    pub index: usize,
}

pub struct Translation {
    /// The whole file as C++ for the stand-in, without the table of kernels.
    pub source: String,
    pub kernels: Vec<KernelEntry>,
    pub constants: Vec<FunctionConstant>,
}

pub struct KernelEntry {
    pub name: String,
    params: String,
    nparams: usize,
    function: String,
    max_threads: String,
}

impl Translation {
    /// The file with the entry of one kernel: only what it needs gets compiled.
    pub fn with_kernel(&self, index: usize) -> String {
        let k = &self.kernels[index];
        let (function, n) = (&k.function, k.nparams);
        format!(
            "{}static const emu_param emu_params[] = {{{}{{0, 0}}}};\n\
             namespace msl {{ namespace {{ using namespace metal; void (*const emu_function)(const emu_param *) = &emu_entry<&{function}>;\n\
             static_assert(emu_call<decltype(&{function})>::arity == {n}, \"parameters of {}\"); }} }}\n\
             extern \"C\" {{ __attribute__((visibility(\"default\"))) extern const emu_kernel emu_kernel_entry;\n\
             const emu_kernel emu_kernel_entry = {{\"{}\", msl::emu_function, emu_params, {n}, {}}}; }}\n",
            self.source, k.params, k.name, k.name, k.max_threads
        )
    }
}

fn builtin(name: &str) -> Option<&'static str> {
    Some(match name {
        "thread_position_in_grid" => "TPIG",
        "thread_position_in_threadgroup" => "TPITG",
        "threadgroup_position_in_grid" => "TGPIG",
        "threads_per_threadgroup" => "TPTG",
        "dispatch_threads_per_threadgroup" => "DTPTG",
        "threadgroups_per_grid" => "TGPG",
        "threads_per_grid" | "grid_size" => "TPG",
        "thread_index_in_threadgroup" => "TIITG",
        "thread_index_in_simdgroup" => "TIISG",
        "simdgroup_index_in_threadgroup" => "SGIITG",
        "threads_per_simdgroup" | "thread_execution_width" => "TPSG",
        "simdgroups_per_threadgroup" => "SGPTG",
        "thread_index_in_quadgroup" => "TIIQG",
        "quadgroup_index_in_threadgroup" => "QGIITG",
        _ => return None,
    })
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

    fn kernel(&mut self, d: &Declaration, body: usize, paren: usize) -> Result<(), String> {
        let t = self.t;
        let name = t[paren - 1].text.to_string();
        let params = self.params(paren + 1, skip(t, paren) - 1, &name)?;
        let (mut max_threads, mut host) = (String::from("0"), name.clone());
        // Attributes have done their work; [[threadgroup(0)]] would clash with the keyword macro.
        let (mut a, end) = (d.start, skip(t, paren));
        while a < end {
            if is_attribute(t, a) {
                let e = skip(t, a);
                if let Some(m) = (a..e).find(|&m| {
                    t[m].text == "max_total_threads_per_threadgroup" && t[m + 1].text == "("
                }) {
                    max_threads = self.text(m + 2, skip(t, m + 1) - 1).to_string();
                }
                if let Some(h) = (a..e).find(|&h| t[h].text == "host_name") {
                    host = t[h + 2..e]
                        .iter()
                        .take_while(|x| x.kind == Kind::Text)
                        .map(|x| x.text.trim_matches('"'))
                        .collect();
                }
                // inline: compiled only where a table names it
                let by = if t[a..e].iter().any(|x| x.text == "kernel") {
                    "inline"
                } else {
                    ""
                };
                self.replace(a, e, by.into());
                a = e;
            } else {
                a += 1;
            }
        }
        if d.template {
            max_threads = if max_threads.chars().all(|c| c.is_ascii_digit()) {
                max_threads
            } else {
                "0".into()
            };
        }
        self.kernels.push(Kernel {
            namespace: self.namespace(),
            host,
            name: name.clone(),
            template: d.template,
            params,
            max_threads,
        });
        let mut k = body + 1;
        while k < d.end {
            let begins = matches!(
                t[k - 1].text,
                ";" | "{" | "}" | ")" | "static" | "volatile" | "const"
            );
            k = if t[k].text == "threadgroup" && begins {
                self.threadgroup_variable(k, &name)?
            } else {
                k + 1
            };
        }
        Ok(())
    }

    /// `threadgroup T a[N], b;` in a kernel becomes EMU_TG(site, a, [N], T) …; pointers stay. Returns where to go on.
    fn threadgroup_variable(&mut self, k: usize, kernel: &str) -> Result<usize, String> {
        let t = self.t;
        let end = {
            let mut e = k;
            while t[e].text != ";" {
                if t[e].text == "=" || matches!(t[e].text, "*" | "&") {
                    return match t[e].text {
                        "=" => self.error(
                            k,
                            format!("{kernel}: threadgroup variables take no initialiser"),
                        ),
                        _ => Ok(e), // a pointer into threadgroup memory
                    };
                }
                e = if matches!(t[e].text, "(" | "[" | "{" | "<") {
                    skip(t, e)
                } else {
                    e + 1
                };
            }
            e
        };
        // declarators: the first one's name is the last word before its dimensions
        let (mut ty, mut from, mut out) = (None, k + 1, String::new());
        while from < end {
            let mut e = from;
            while e < end && t[e].text != "," {
                e = if matches!(t[e].text, "(" | "[" | "{" | "<")
                    && (ty.is_none() || t[e].text != "<")
                {
                    skip(t, e)
                } else {
                    e + 1
                };
            }
            let mut dims = e;
            let mut x = from;
            while x < e {
                if t[x].text == "[" {
                    dims = x;
                    break;
                }
                x = if t[x].text == "<" { skip(t, x) } else { x + 1 };
            }
            let name = dims - 1;
            let ty = *ty.get_or_insert(self.text(k + 1, name));
            let dims = if dims < e { self.text(dims, e) } else { "" };
            write!(
                out,
                "EMU_TG({}, {}, {dims}, {ty}); ",
                self.sites, t[name].text
            )
            .unwrap();
            self.sites += 1;
            from = e + 1;
        }
        let out = out.trim_end_matches("; ").to_string();
        self.replace(k, end, out);
        Ok(end)
    }

    fn params(&self, from: usize, to: usize, kernel: &str) -> Result<Vec<Param>, String> {
        let t = self.t;
        let (mut out, mut i, mut next) = (Vec::new(), from, 0);
        while i < to {
            let (mut current, start) = (None, i);
            while i < to && t[i].text != "," {
                if !is_attribute(t, i) {
                    i = skip(t, i);
                    continue;
                }
                let end = skip(t, i);
                let mut j = i + 2;
                while j < end - 2 {
                    let a = t[j].text;
                    let number = || {
                        t.get(j + 2)
                            .and_then(|x| x.text.parse::<usize>().ok())
                            .filter(|&n| n < 32)
                    };
                    let index = || {
                        number().map_or_else(
                            || {
                                self.error(
                                    j,
                                    format!("{kernel}: [[{a}(n)]] needs a number below 32"),
                                )
                            },
                            Ok,
                        )
                    };
                    if a == "buffer" {
                        current = Some(Param {
                            kind: "BUFFER",
                            index: index()?,
                        });
                    } else if a == "threadgroup" {
                        current = Some(Param {
                            kind: "TGMEM",
                            index: index()?,
                        });
                    } else if let Some(kind) = builtin(a) {
                        current = Some(Param { kind, index: 0 });
                    } else if t[j].kind == Kind::Word
                        && !matches!(a, "id" | "maybe_unused" | "function_constant")
                    {
                        return self
                            .error(j, format!("{kernel}: attribute [[{a}]] is not supported"));
                    }
                    while j < end - 2 && t[j].text != "," {
                        j = if t[j].text == "(" { skip(t, j) } else { j + 1 };
                    }
                    j += 1;
                }
                i = end;
            }
            if i > start {
                let p: Param = current.unwrap_or(Param {
                    kind: "BUFFER",
                    index: next,
                }); // Metal numbers bare pointers itself
                if p.kind == "BUFFER" {
                    next = p.index + 1;
                }
                out.push(p);
            }
            i += 1;
        }
        Ok(out)
    }

    /// Function constants, and program-scope constants computed from them.
    fn constant(&mut self, d: &Declaration) -> Result<(), String> {
        let t = self.t;
        let Some(c) = (d.head..d.end).find(|&x| t[x].text == "constant") else {
            return Ok(());
        };
        if let Some(f) = (d.head..d.end).find(|&x| t[x].text == "function_constant") {
            let open = (c..f).rev().find(|&x| is_attribute(t, x)).unwrap_or(f);
            let Some(index) = t
                .get(f + 2)
                .and_then(|x| x.text.parse::<usize>().ok())
                .filter(|&n| n < 64)
            else {
                return self.error(
                    f,
                    "[[function_constant(n)]] needs a number below 64 (the emulator's limit)",
                );
            };
            let (name, ty) = (
                t[open - 1].text.to_string(),
                self.text(c + 1, open - 1).to_string(),
            );
            self.replace(
                d.head,
                d.end,
                format!("static const metal::emu_fc<{ty}, {index}> {name};"),
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
