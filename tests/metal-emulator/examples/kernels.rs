//! Compiles .metal files for both modes and lists their kernels: `cargo run -p metal-emulator --example kernels -- a.metal -DX`.
//! With `--check` kernels are not compiled, only types and address spaces looked at. With `--cuda` the file is written to
//! standard output as CUDA C++ (tests/metal-gpu), and its function constants to standard error.
use metal_emulator::{Library, Mode, Options};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let options = Options {
        defines: arguments
            .iter()
            .filter_map(|a| a.strip_prefix("-D"))
            .map(String::from)
            .collect(),
        ..Options::default()
    };
    let compile = !arguments.iter().any(|a| a == "--check");
    let all = |library: Library| {
        if compile {
            library.prepare(Mode::Fast, |_| true)?;
            library.prepare(Mode::Checked, |_| true)?;
        }
        Ok(library)
    };
    let mut failed = false;
    for file in arguments.iter().filter(|a| !a.starts_with('-')) {
        let start = std::time::Instant::now();
        if arguments.iter().any(|a| a == "--cuda") {
            match Library::compile_with(file, &[], &options) {
                Ok(library) => {
                    print!("{}", library.cuda());
                    for (slot, c) in library.function_constants().iter().enumerate() {
                        eprintln!("{} {slot}", c.index);
                    }
                }
                Err(e) => {
                    failed = true;
                    eprintln!("{file}: {e}");
                }
            }
            continue;
        }
        match Library::compile_with(file, &[], &options).and_then(all) {
            Ok(library) => {
                println!(
                    "{file}: {} kernels, {:?}",
                    library.kernels().len(),
                    start.elapsed()
                );
                for k in library.kernels() {
                    println!("  {k}");
                }
            }
            Err(e) => {
                failed = true;
                eprintln!("{file}: {e}");
            }
        }
    }
    std::process::exit(i32::from(failed));
}
