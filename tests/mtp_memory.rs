//! Long decoding holds what its caches hold, and nothing that grows besides.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::DType;
use candle_specprefill::mtp::{prefill, Depth, PrefillOptions, Session, SessionOptions};
use candle_specprefill::ops::Context;
use support::load;

/// Counts the bytes that are held.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size(), Ordering::Relaxed);
        System.alloc(layout)
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        System.dealloc(at, layout)
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn two_thousand_tokens_grow_the_caches_alone() {
    let model = load("dense", DType::F32);
    let cx = Context::default();
    for depth in [Depth::Off, Depth::Fixed(3), Depth::Adaptive { max: 6 }] {
        let mut cache = model.new_cache().unwrap();
        let o = PrefillOptions::default();
        let last = prefill(&model, &cx, &mut cache, &[1, 2, 3], None, &o, &mut |_| {}).unwrap();
        let options = SessionOptions {
            depth,
            max_tokens: 2_200,
            ..Default::default()
        };
        let mut session = Session::new(&model, &cx, cache, &last, options).unwrap();
        let mut run = |tokens: usize| {
            let mut out = 0;
            while out < tokens {
                out += session.step(&model, &cx).unwrap().len();
            }
            let held = HELD.load(Ordering::Relaxed) as i64;
            held - session.cache().size_bytes() as i64
        };
        let early = run(200);
        let late = run(2_000 - 200);
        // The history of 1,800 tokens, and rows that the head has yet to see.
        let grown = late - early;
        assert!(grown < 128 << 10, "{depth:?}: {grown} bytes");
    }
}
