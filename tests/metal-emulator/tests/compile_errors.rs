//! What Apple's compiler refuses is refused here, with file and line; bfloat's rules of conversion above all.
use metal_emulator::{available, Library, Mode, Options};
use std::path::{Path, PathBuf};

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/errors.metal")
}

fn compile(define: Option<&str>) -> Result<Library, String> {
    let options = Options {
        defines: define.into_iter().map(String::from).collect(),
        ..Options::default()
    };
    Library::compile_with(file(), &[], &options).map_err(|e| e.to_string())
}

#[test]
fn each_error_names_its_line() {
    if !available("compile errors") {
        return;
    }
    let text = std::fs::read_to_string(file()).unwrap();
    let cases: Vec<(usize, &str)> = text
        .lines()
        .enumerate()
        .filter_map(|(i, l)| Some((i + 1, l.rsplit_once("// ")?.1.trim())))
        .filter(|(_, n)| n.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
        .collect();
    assert!(cases.len() >= 13, "{cases:?}");
    for (line, name) in cases {
        let error = match compile(Some(name)) {
            Ok(_) => panic!("{name} compiles"),
            Err(e) => e,
        };
        assert!(
            error.contains(&format!("errors.metal:{line}:")),
            "{name}, line {line}: {error}"
        );
    }
}

#[test]
fn the_legal_conversions_compile() {
    if !available("legal conversions") {
        return;
    }
    let library = compile(None).unwrap();
    library.prepare(Mode::Fast, |_| true).unwrap();
    library.prepare(Mode::Checked, |_| true).unwrap();
}

#[test]
fn a_missing_file_is_an_error() {
    let error = Library::compile("no/such.metal", &[])
        .unwrap_err()
        .to_string();
    assert!(error.contains("no/such.metal"), "{error}");
}
