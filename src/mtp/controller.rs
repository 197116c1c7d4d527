//! How many tokens to draft: the depth with the best expected tokens per second, from measured costs and acceptance.
//!
//! Pure: it sees what the cycles cost and how many drafts were right, and never a clock, so equal inputs give equal choices.
//! Its choices change the time that a text takes, never the text.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The most drafts per cycle.
pub const MAX_DEPTH: usize = 8;
/// Weight of a new observation of acceptance.
const ACCEPTANCE_WEIGHT: f64 = 0.05;
/// Acceptance that is assumed before any was seen.
const ACCEPTANCE_PRIOR: f64 = 0.6;
/// Cycles in which an acceptance that nobody observes loses its weight against that of the draft before.
const FORGET_CYCLES: f64 = 64.0;
/// A rival must promise this much more.
const HYSTERESIS: f64 = 1.02;
/// Cycles between two looks at a rival.
const PROBE_EVERY: u64 = 48;
/// Decisions for plain decoding in a row after which a last try decides about a rest.
const PARK_AFTER: u32 = 16;
/// Cycles of a try: few where it goes well, never more than the second.
const TRY_CYCLES: [u32; 2] = [8, 16];
/// Tokens of the first rest, and of the longest.
const COOL_DOWN: [u64; 2] = [128, 4096];
/// Cycles of speculation after which a rest is the first one again.
const FORGIVE_AFTER: u64 = 64;
/// Costs of a depth that are remembered; the median counts.
const WINDOW: usize = 16;

/// How many tokens to draft per cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Depth {
    /// Plain decoding.
    Off,
    /// Always this many.
    Fixed(usize),
    /// As many as pay, at most `max`; none where plain decoding is faster.
    Adaptive {
        /// The most.
        max: usize,
    },
}

impl Default for Depth {
    fn default() -> Self {
        Self::Adaptive { max: 6 }
    }
}

impl Depth {
    /// The most drafts of a cycle.
    pub fn max(self) -> usize {
        match self {
            Self::Off => 0,
            Self::Fixed(depth) | Self::Adaptive { max: depth } => depth,
        }
    }

    /// Refuses more than [`MAX_DEPTH`].
    pub fn validate(self) -> Result<()> {
        match self.max() {
            0..=MAX_DEPTH => Ok(()),
            depth => Err(Error::Option {
                name: "mtp-depth",
                what: format!("{depth} must be from 0 (off) to {MAX_DEPTH}"),
            }),
        }
    }
}

/// The last costs of a depth.
#[derive(Clone, Debug, Default)]
struct Costs {
    last: Vec<f64>,
    at: usize,
}

impl Costs {
    fn add(&mut self, seconds: f64) {
        match self.last.len() < WINDOW {
            true => self.last.push(seconds),
            false => self.last[self.at % WINDOW] = seconds,
        }
        self.at += 1;
    }

    fn median(&self) -> Option<f64> {
        let mut sorted = self.last.clone();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => None,
            // Of two, the smaller: the other met a disturbance, or was the first of its kind.
            n => Some(sorted[(n - 1) / 2]),
        }
    }
}

/// Share of right drafts among those whose predecessors were right, smoothed.
#[derive(Clone, Copy, Debug, Default)]
struct Acceptance {
    right: f64,
    /// Weight of what was seen at all, at most 1.
    seen: f64,
    /// The cycle that last told about it.
    at: u64,
}

impl Acceptance {
    fn observe(&mut self, right: bool, at: u64) {
        let keep = 1.0 - ACCEPTANCE_WEIGHT;
        self.right = keep * self.right + if right { ACCEPTANCE_WEIGHT } else { 0.0 };
        self.seen = keep * self.seen + ACCEPTANCE_WEIGHT;
        self.at = at;
    }

    fn set(&mut self, share: f64, at: u64) {
        // As sure as after a dozen cycles.
        *self = Self {
            right: 0.5 * share,
            seen: 0.5,
            at,
        };
    }

    /// Drawn towards `before`, the acceptance of the draft before, by how little or how long ago was seen of this one.
    fn estimate(&self, before: f64, now: u64, first: bool) -> f64 {
        let age = match first {
            true => 0.0,
            false => (now - self.at) as f64 / FORGET_CYCLES,
        };
        let weight = (self.seen * (-age).exp()).min(1.0);
        match self.seen > 0.0 {
            true => weight * self.right / self.seen + (1.0 - weight) * before,
            false => before,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Measuring; how far along the plan.
    WarmUp(usize),
    Running,
    /// Plain decoding for so many tokens.
    Parked(u64),
    /// Trying a single draft after a rest: cycles and accepted drafts so far.
    Retry(u32, u32),
}

/// Chooses the depth of each cycle. See the module.
#[derive(Clone, Debug)]
pub struct Controller {
    max: usize,
    /// Of each depth's drafts.
    acceptance: Vec<Acceptance>,
    costs: Vec<Costs>,
    state: State,
    depth: usize,
    /// The depth of a single cycle that looks at a rival.
    probe: Option<usize>,
    cycles: u64,
    last_probe: u64,
    probes: u64,
    for_plain: u32,
    cool_down: u64,
    speculated: u64,
    parks: u64,
}

impl Controller {
    /// Chooses from 0 to `max` (at most [`MAX_DEPTH`]).
    pub fn new(max: usize) -> Self {
        let max = max.min(MAX_DEPTH);
        Self {
            max,
            acceptance: vec![Acceptance::default(); max],
            costs: vec![Costs::default(); max + 1],
            state: State::WarmUp(0),
            depth: max,
            probe: None,
            cycles: 0,
            last_probe: 0,
            probes: 0,
            for_plain: 0,
            cool_down: COOL_DOWN[0],
            speculated: 0,
            parks: 0,
        }
    }

    /// Drafts for the next cycle.
    pub fn depth(&self) -> usize {
        match self.state {
            State::WarmUp(step) => self.plan()[step],
            State::Running => self.probe.unwrap_or(self.depth),
            State::Parked(_) => 0,
            State::Retry(..) => 1.min(self.max),
        }
    }

    /// The most drafts it may choose.
    pub fn max(&self) -> usize {
        self.max
    }

    /// Whether it rests from speculation.
    pub fn is_parked(&self) -> bool {
        matches!(self.state, State::Parked(_))
    }

    /// How often it went to rest.
    pub fn parks(&self) -> u64 {
        self.parks
    }

    /// The depths that are measured first, gently: where drafts are poor, deep ones are dear. The first pass of a kind is slow,
    /// so each has a second.
    fn plan(&self) -> [usize; 4] {
        let few = self.max.min(2);
        [few, 0, few, 0]
    }

    /// For another text on the same model: what was learned of costs stays, what was learned of acceptance counts for less,
    /// a rest is over but not forgotten.
    pub fn resume(&self) -> Self {
        let mut next = self.clone();
        if matches!(self.state, State::WarmUp(_)) {
            return Self::new(self.max);
        }
        for acceptance in &mut next.acceptance {
            acceptance.right *= 0.5;
            acceptance.seen *= 0.5;
        }
        next.state = match self.state {
            State::Running if self.depth > 0 => State::Running,
            _ => State::Retry(0, 0),
        };
        (next.probe, next.for_plain) = (None, 0);
        next
    }

    /// What a cycle showed: `drafted` drafts were judged, the first `accepted` of them right, in `seconds` for all of it.
    pub fn observe(&mut self, drafted: usize, accepted: usize, seconds: f64) {
        if self.max == 0 {
            return;
        }
        let drafted = drafted.min(self.max);
        self.cycles += 1;
        for j in 0..drafted.min(accepted + 1) {
            self.acceptance[j].observe(j < accepted, self.cycles);
        }
        if seconds.is_finite() && seconds > 0.0 {
            self.costs[drafted].add(seconds);
        }
        let tokens = accepted as u64 + 1;
        match self.state {
            State::WarmUp(step) if step + 1 < self.plan().len() => {
                self.state = State::WarmUp(step + 1)
            }
            State::WarmUp(_) => {
                self.state = State::Running;
                self.depth = self.best();
                self.decide();
            }
            State::Running => {
                self.probe = None;
                self.decide();
            }
            State::Parked(left) if left > tokens => self.state = State::Parked(left - tokens),
            State::Parked(_) => {
                self.state = State::Retry(0, 0);
                self.costs[1..].fill(Costs::default());
            }
            State::Retry(cycles, right) => self.judge_retry(cycles + 1, right + accepted as u32),
        }
    }

    /// A single draft pays if it is right more often than a pass of two rows is longer than one of one. The try ends when the
    /// drafts cannot be that good any more, or have been long enough.
    fn judge_retry(&mut self, cycles: u32, right: u32) {
        let (n, k) = (cycles as f64, right as f64);
        let needed = self.cost(1) / self.cost(0) - 1.0;
        let at_best = (k + 1.0 + 0.5 * n.sqrt()) / (n + 1.0);
        // From the second cycle on, because a disturbance of the first one looks like a slow machine.
        let hopeless = cycles >= 2 && at_best < needed;
        if hopeless || (cycles >= TRY_CYCLES[1] && k / n < needed) {
            self.park();
        } else if cycles >= TRY_CYCLES[0] && k / n >= needed {
            self.acceptance.fill(Acceptance::default());
            self.acceptance[0].set(k / n, self.cycles);
            self.state = State::Running;
            (self.depth, self.for_plain, self.speculated) = (1, 0, 0);
            self.decide();
        } else {
            self.state = State::Retry(cycles, right);
        }
    }

    fn park(&mut self) {
        self.state = State::Parked(self.cool_down);
        self.cool_down = (self.cool_down * 2).min(COOL_DOWN[1]);
        self.parks += 1;
        (self.for_plain, self.speculated, self.probe) = (0, 0, None);
    }

    fn decide(&mut self) {
        let best = self.best();
        if self.score(best) > self.score(self.depth) * HYSTERESIS {
            self.depth = best;
        }
        if self.depth == 0 {
            self.for_plain += 1;
            if self.for_plain >= PARK_AFTER {
                (self.state, self.probe) = (State::Retry(0, 0), None);
                return;
            }
        } else {
            self.for_plain = 0;
            self.speculated += 1;
            if self.speculated >= FORGIVE_AFTER {
                self.cool_down = COOL_DOWN[0];
            }
        }
        if self.cycles - self.last_probe >= PROBE_EVERY {
            self.last_probe = self.cycles;
            self.probes += 1;
            self.probe = self.rival();
        }
    }

    /// A depth beside the chosen one, in turn; plain decoding now and then, because its cost grows with the context too.
    fn rival(&self) -> Option<usize> {
        let (up, down) = (self.depth + 1, self.depth.checked_sub(1));
        let up = Some(up).filter(|d| *d <= self.max);
        match self.probes % 4 {
            0 | 2 => up.or(down),
            1 => down.or(up),
            _ if self.depth > 0 => Some(0),
            _ => up,
        }
    }

    fn best(&self) -> usize {
        let better = |a: usize, b: usize| if self.score(b) > self.score(a) { b } else { a };
        (0..=self.max).fold(0, better)
    }

    /// Expected tokens per second at a depth.
    fn score(&self, depth: usize) -> f64 {
        self.tokens(depth) / self.cost(depth)
    }

    /// Expected tokens of a cycle.
    fn tokens(&self, depth: usize) -> f64 {
        let (mut sum, mut all, mut before) = (1.0, 1.0, ACCEPTANCE_PRIOR);
        for (j, acceptance) in self.acceptance[..depth].iter().enumerate() {
            before = acceptance.estimate(before, self.cycles, j == 0);
            all *= before;
            sum += all;
        }
        sum
    }

    /// Seconds of a cycle, between the nearest measured depths where it was not measured itself.
    fn cost(&self, depth: usize) -> f64 {
        let known = |d: usize| self.costs[d].median().map(|c| (d as f64, c));
        if let Some((_, cost)) = known(depth) {
            return cost;
        }
        let below = (0..depth).rev().find_map(known);
        let above = (depth + 1..=self.max).find_map(known);
        let line = |(x0, y0): (f64, f64), (x1, y1): (f64, f64)| {
            (y0 + (y1 - y0) * (depth as f64 - x0) / (x1 - x0)).max(y0.min(y1))
        };
        match (below, above) {
            (Some(a), Some(b)) => line(a, b),
            (Some(a), None) => {
                let before = (0..a.0 as usize).rev().find_map(known);
                before.map_or(a.1, |z| {
                    line(z, a).max(a.1 + (a.1 - z.1) / (a.0 - z.0) * (depth as f64 - a.0))
                })
            }
            (None, Some(b)) => b.1,
            (None, None) => f64::INFINITY,
        }
    }
}
