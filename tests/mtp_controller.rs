//! The depth controller on simulated machines: close to the best fixed depth, never worse than plain decoding, deterministic.

use candle_specprefill::mtp::{Controller, Depth, MAX_DEPTH};
use proptest::prelude::*;

/// Seeded and good enough for noise.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[derive(Clone)]
struct Machine {
    name: &'static str,
    /// Time of a pass of M rows over that of one, M from 1.
    rows: [f64; 9],
    /// A draft, in one-row passes.
    head: f64,
}

fn machines() -> Vec<Machine> {
    let m = |name, rows, head| Machine { name, rows, head };
    vec![
        m(
            "wide kernels",
            [1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.7, 1.9],
            0.04,
        ),
        m(
            "MLX on M5",
            [1.0, 1.05, 1.15, 1.28, 1.6, 1.9, 2.2, 2.4, 2.5],
            0.05,
        ),
        m("M1", [1.0, 1.27, 1.6, 1.9, 2.4, 2.9, 3.2, 3.4, 3.6], 0.06),
        m(
            "one pass per row",
            [1.0, 1.9, 2.8, 3.7, 4.6, 5.5, 6.4, 7.3, 8.2],
            0.08,
        ),
        m(
            "experts",
            [1.0, 1.4, 1.75, 2.0, 2.3, 2.5, 2.7, 2.9, 3.1],
            0.1,
        ),
    ]
}

impl Machine {
    fn cost(&self, depth: usize) -> f64 {
        0.02 * (self.rows[depth] + self.head * depth as f64)
    }
}

/// Right drafts of a cycle, conditional acceptance by depth.
fn accepted(random: &mut Random, acceptance: &dyn Fn(usize) -> f64, depth: usize) -> usize {
    (0..depth)
        .take_while(|j| random.uniform() < acceptance(*j))
        .count()
}

fn noise(random: &mut Random) -> f64 {
    let around = 1.0 + 0.1 * (random.uniform() - 0.5);
    let disturbed = if random.uniform() < 0.02 { 3.0 } else { 1.0 };
    around * disturbed
}

/// Tokens per second of one depth, in expectation.
fn fixed(machine: &Machine, acceptance: &dyn Fn(usize) -> f64, depth: usize) -> f64 {
    let (mut tokens, mut all) = (1.0, 1.0);
    for j in 0..depth {
        all *= acceptance(j);
        tokens += all;
    }
    tokens / machine.cost(depth)
}

/// Runs until `tokens` more are out; returns the undisturbed seconds that the chosen depths cost.
fn run(
    controller: &mut Controller,
    machine: &Machine,
    acceptance: &dyn Fn(usize) -> f64,
    tokens: usize,
    random: &mut Random,
) -> f64 {
    let (mut out, mut seconds) = (0, 0.0);
    while out < tokens {
        let depth = controller.depth();
        let right = accepted(random, acceptance, depth);
        let cost = machine.cost(depth);
        seconds += cost;
        controller.observe(depth, right, cost * noise(random));
        out += right + 1;
    }
    seconds / out as f64
}

type Profile = (&'static str, Box<dyn Fn(usize) -> f64>);

fn profiles() -> Vec<Profile> {
    vec![
        ("copying", Box::new(|_| 0.97)),
        ("code", Box::new(|j| 0.92 - 0.02 * j as f64)),
        ("prose", Box::new(|j| 0.72 - 0.08 * j as f64)),
        ("poor", Box::new(|_| 0.25)),
        ("useless", Box::new(|_| 0.0)),
    ]
}

#[test]
fn close_to_the_best_fixed_depth_and_never_worse_than_plain() {
    let mut missed = vec![];
    for machine in machines() {
        for (profile, acceptance) in profiles() {
            for max in [2, 4, 8] {
                let mut controller = Controller::new(max);
                let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ max as u64);
                run(&mut controller, &machine, &acceptance, 64, &mut random);
                let seconds = run(&mut controller, &machine, &acceptance, 6000, &mut random);
                let best = (0..=max)
                    .map(|d| fixed(&machine, &acceptance, d))
                    .fold(0.0, f64::max);
                let plain = fixed(&machine, &acceptance, 0);
                let speed = 1.0 / seconds;
                let at = format!(
                    "{}, {profile}, max {max}: {:.3} of the best, {:.3} of plain",
                    machine.name,
                    speed / best,
                    speed / plain
                );
                if speed < 0.95 * best || speed < 0.98 * plain {
                    missed.push(at);
                }
            }
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn follows_a_change_of_regime() {
    for machine in machines() {
        let mut controller = Controller::new(6);
        let mut random = Random(7);
        let (good, bad) = (|_: usize| 0.95, |_: usize| 0.02);
        for round in 0..3 {
            for (name, acceptance) in [("good", &good as &dyn Fn(usize) -> f64), ("bad", &bad)] {
                // Time to notice, the longest rest included.
                run(&mut controller, &machine, acceptance, 4500, &mut random);
                let seconds = run(&mut controller, &machine, acceptance, 2000, &mut random);
                let best = (0..=6)
                    .map(|d| fixed(&machine, acceptance, d))
                    .fold(0.0, f64::max);
                let share = 1.0 / seconds / best;
                assert!(
                    share > 0.93,
                    "{}, {name}, round {round}: {share:.3}",
                    machine.name
                );
            }
        }
    }
}

#[test]
fn parks_where_drafts_are_useless_and_comes_back_ever_later() {
    let machine = &machines()[2];
    let mut controller = Controller::new(4);
    let mut random = Random(3);
    let (mut out, mut tries) = (0u64, vec![]);
    while out < 10_000 {
        let was = controller.is_parked();
        let depth = controller.depth();
        controller.observe(depth, 0, machine.cost(depth));
        out += 1;
        if was && !controller.is_parked() {
            tries.push(out);
        }
    }
    let _ = random.uniform();
    assert!(tries.len() >= 5, "{tries:?}");
    let gaps: Vec<u64> = tries.windows(2).map(|w| w[1] - w[0]).collect();
    assert!(gaps.windows(2).all(|w| w[1] > w[0]), "{gaps:?}");
    assert!(controller.parks() as usize >= tries.len());
    assert!(
        gaps[0] >= 128 && gaps[gaps.len() - 1] <= 4096 + 64,
        "{gaps:?}"
    );
}

#[test]
fn a_disturbance_does_not_change_the_choice() {
    let machine = &machines()[1];
    let mut controller = Controller::new(4);
    for _ in 0..40 {
        let depth = controller.depth();
        controller.observe(depth, depth, machine.cost(depth));
    }
    let chosen = controller.depth();
    assert!(chosen > 1);
    controller.observe(chosen, chosen, 100.0 * machine.cost(chosen));
    assert_eq!(controller.depth(), chosen);
}

#[test]
fn what_was_learned_serves_the_next_text() {
    let machine = &machines()[2];
    for (share, plain) in [(0.95, false), (0.05, true)] {
        let acceptance = |_: usize| share;
        let mut random = Random(11);
        let mut controller = Controller::new(4);
        run(&mut controller, machine, &acceptance, 600, &mut random);
        // Short texts: none of them pays for measuring again.
        let mut seconds = 0.0;
        for _ in 0..40 {
            controller = controller.resume();
            seconds += run(&mut controller, machine, &acceptance, 40, &mut random) / 40.0;
        }
        let best = (0..=4)
            .map(|d| fixed(machine, &acceptance, d))
            .fold(0.0, f64::max);
        let speed = 1.0 / seconds / best;
        assert!(
            speed > if plain { 0.93 } else { 0.95 },
            "{share}: {speed:.3}"
        );
    }
    assert_eq!(
        Controller::new(3).resume().depth(),
        Controller::new(3).depth()
    );
}

#[test]
fn depths_are_checked() {
    assert!(Depth::Adaptive { max: MAX_DEPTH }.validate().is_ok());
    assert!(Depth::Fixed(MAX_DEPTH + 1).validate().is_err());
    assert_eq!(Depth::Off.max(), 0);
    assert_eq!(Controller::new(100).max(), MAX_DEPTH);
}

proptest! {
    /// Whatever it is told, it stays in range, and equal histories give equal choices.
    #[test]
    fn any_history(max in 0usize..9, cycles in prop::collection::vec((0usize..9, 0usize..9, any::<f64>()), 0..400)) {
        let (mut a, mut b) = (Controller::new(max), Controller::new(max));
        for (drafted, accepted, seconds) in cycles {
            prop_assert!(a.depth() <= max);
            prop_assert_eq!(a.depth(), b.depth());
            a.observe(drafted, accepted.min(drafted), seconds);
            b.observe(drafted, accepted.min(drafted), seconds);
        }
    }
}
