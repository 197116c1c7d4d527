//! Compiles .metal files for both modes and lists their kernels and function constants: `cargo run -p metal-emulator --example kernels -- a.metal -DX`.
use metal_emulator::{Library, Mode, Options};

fn main() {
    let (mut options, mut failed) = (Options::default(), false);
    let (defines, files): (Vec<_>, Vec<_>) =
        std::env::args().skip(1).partition(|a| a.starts_with("-D"));
    options.defines = defines.iter().map(|d| d[2..].to_string()).collect();
    for file in files {
        let start = std::time::Instant::now();
        let all = |l: Library| {
            l.prepare(Mode::Fast, |_| true)?;
            l.prepare(Mode::Checked, |_| true)?;
            Ok(l)
        };
        match Library::compile_with(&file, &[], &options).and_then(all) {
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
