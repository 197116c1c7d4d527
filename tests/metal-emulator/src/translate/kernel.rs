//! Kernels: the order of their parameters' attributes, and their threadgroup variables.
use super::{Declaration, Kernel, Param, Translator};
use crate::lexer::{is_attribute, skip, Kind};
use std::fmt::Write;

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

impl Translator<'_> {
    pub(super) fn kernel(
        &mut self,
        d: &Declaration,
        body: usize,
        paren: usize,
    ) -> Result<(), String> {
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
}
