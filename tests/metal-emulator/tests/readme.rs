//! The README's quick start works as it stands there.
use metal_emulator::{Buffer, Constant, Grid, Launch, Library, Mode};

const README: &str = include_str!("../README.md");

fn block(language: &str) -> &'static str {
    let (_, rest) = README.split_once(&format!("```{language}\n")).unwrap();
    rest.split_once("```").unwrap().0
}

fn adds() -> Result<(), Box<dyn std::error::Error>> {
    let library = Library::compile("metal/add.metal", &[("negate", Constant::Bool(false))])?;
    let a = vec![1.0f32; 100];
    let mut out = vec![0.0f32; 100];
    let mut launch = Launch {
        kernel: "add_f32",
        buffers: vec![
            Buffer::read(0, &a),
            Buffer::write(1, &mut out),
            Buffer::value(2, 100u32),
        ],
        grid: Grid::Threads([100, 1, 1]),
        threadgroup: [64, 1, 1],
        ..Launch::default()
    };
    library.run(&mut launch, Mode::Checked)?;
    assert_eq!(out, [2.0; 100]);
    Ok(())
}

#[test]
fn quick_start() {
    if !metal_emulator::available("the README's quick start") {
        return;
    }
    // The function above is the README's, but for line breaks.
    let plain = |text: &str| {
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        text.replace(",]", "]")
    };
    let shown = block("rust").split_once("#[test]\n").unwrap().1;
    assert!(plain(include_str!("readme.rs")).contains(&plain(shown)));
    let dir = std::env::temp_dir().join(format!("metal-emulator-{}", std::process::id()));
    std::fs::create_dir_all(dir.join("metal")).unwrap();
    std::fs::write(dir.join("metal/add.metal"), block("metal")).unwrap();
    std::env::set_current_dir(&dir).unwrap();
    let result = adds();
    std::fs::remove_dir_all(&dir).unwrap();
    result.unwrap();
}
