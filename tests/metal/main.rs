//! Every Metal kernel, through the very launches that the ops hand to the GPU, on the emulator: numbers against the CPU op and
//! f64, rows bitwise as they are alone, in fast mode and in checked mode (races, bounds, uninitialised reads and more).

mod argmax;
mod attention;
mod counts;
mod elementwise;
mod embed;
mod gated_delta;
mod inputs;
mod matmul;
mod matrix;
mod model;
mod moe;
mod record;
mod rope;
mod support;
#[path = "../support_ops/mod.rs"]
mod support_ops;
