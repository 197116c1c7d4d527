//! Address spaces. `device`, `threadgroup`, `constant` and `thread` mean nothing to a CPU, so mixing them up would go unnoticed: the file
//! is parsed once more with a stand-in in which they are different types. Other errors of that pass are ignored.
use crate::clang::Clang;
use std::path::Path;
use std::process::Command;

pub fn check(clang: &Clang, standin: &Path, source: &Path) -> Result<(), String> {
    let mut cmd = Command::new(&clang.path);
    cmd.args([
        "-x",
        "c++",
        "-std=c++17",
        "-nostdinc++",
        "-fsyntax-only",
        "-Wno-everything",
        "-ferror-limit=0",
    ]);
    cmd.args([
        "-fno-caret-diagnostics",
        "-fno-color-diagnostics",
        "-Xclang",
        "-cl-single-precision-constant",
    ]);
    let out = cmd
        .arg("-I")
        .arg(standin.join("spaces"))
        .arg(source)
        .output()
        .map_err(|e| format!("checking address spaces: {e}"))?;
    let errors = filter(&String::from_utf8_lossy(&out.stderr));
    if errors.is_empty() {
        return Ok(());
    }
    Err(format!("address spaces do not match:\n{errors}"))
}

/// The errors, with their notes, that are about address spaces of pointers and references.
fn filter(text: &str) -> String {
    let mut groups: Vec<Vec<&str>> = Vec::new();
    for line in text.lines() {
        if line.contains(": error: ") || line.contains(": fatal error: ") {
            groups.push(vec![line]);
        } else if let Some(g) = groups.last_mut() {
            g.push(line);
        }
    }
    groups.retain(|g| counts(g));
    groups.iter().map(|g| g.join("\n") + "\n").collect()
}

fn counts(group: &[&str]) -> bool {
    // Copying a struct from device or constant memory and calling its functions is legal in MSL; here they are plain C++.
    const OF_STRUCTS: [&str; 4] = [
        "no matching constructor",
        "no viable overloaded",
        "no viable conversion",
        "'this' argument",
    ];
    // clang prints the keyword macros too
    const QUALIFIED: [&str; 5] = [
        "'device ",
        "'threadgroup ",
        "'constant ",
        "'EMU_",
        "address_space(",
    ];
    let pointer = |l: &str| l.contains('*') || l.contains('&');
    let names_space = |l: &&str| {
        l.contains("address space") || (pointer(l) && QUALIFIED.iter().any(|q| l.contains(q)))
    };
    let Some(names) = group.iter().find(|l| names_space(l)) else {
        return false;
    };
    !OF_STRUCTS.iter().any(|s| group[0].contains(s)) && !names.contains("'this' object")
}
