//! A cycle of draft, verify and accept, of any number of sequences in the same passes. Whatever the depth, a sequence's tokens
//! are those that it gets alone by plain decoding.

use std::time::Instant;

use candle_core::Tensor;

use super::block::{self, Distribution};
use super::row::{self, Row};
use super::session::{Acceptance, Session, SessionOptions};
use super::Depth;
use crate::error::Result;
use crate::ops::{memory, Context};
use crate::qwen3_5::{DraftRows, Keep, Model, Rows};

/// Rows that a verified pass may have beside the first: copies are longer than the head's drafts.
const MAX_COPY: usize = 7;
/// What numbers are drawn for, beside the tokens themselves.
const PROPOSE: u64 = 1;
const ACCEPT: u64 = 2;
const AFTER: u64 = 3;

/// Sees a cycle's tokens before anything is committed, and may say after how many of them the text ends.
pub type Ends<'a> = dyn FnMut(&[u32]) -> Option<usize> + Send + 'a;

/// A session that takes part in a pass.
pub struct Step<'a> {
    /// The session.
    pub session: &'a mut Session,
    /// See [`Session::step_until`].
    pub ends: Option<&'a mut Ends<'a>>,
}

/// One sequence's share of a cycle.
#[derive(Default)]
struct Plan {
    /// Whether it has rows in the pass.
    active: bool,
    position: u32,
    /// Drafts to make with the head.
    depth: usize,
    drafts: Vec<u32>,
    copied: bool,
    /// What each draft was drawn from, under block verification.
    proposals: Vec<Distribution>,
}

/// The tokens of one cycle per session: at least one each until its text has ended, then none. All rows share the draft
/// head's and the trunk's passes, and every sequence gets the bits that it gets alone. A session whose logits are useless
/// gets an error of its own and stays as it was.
pub fn step_all(model: &Model, cx: &Context, steps: &mut [Step]) -> Result<Vec<Result<Vec<u32>>>> {
    model.in_pool(|| cycle(model, cx, steps))
}

fn cycle(model: &Model, cx: &Context, steps: &mut [Step]) -> Result<Vec<Result<Vec<u32>>>> {
    let start = Instant::now();
    let span = tracing::debug_span!("mtp_cycle", sequences = steps.len());
    let _entered = span.enter();
    let mut outs: Vec<Result<Vec<u32>>> = steps.iter().map(|_| Ok(vec![])).collect();
    let mut plans: Vec<Plan> = vec![];
    for (step, out) in steps.iter_mut().zip(&mut outs) {
        let (plan, first) = begin(model, step);
        plans.push(plan);
        if let Some(tokens) = first {
            *out = Ok(tokens);
        }
    }
    draft(model, cx, steps, &mut plans)?;
    let drafted = start.elapsed().as_secs_f64();
    let rows: Vec<(Vec<u32>, Vec<u32>)> = (steps.iter().zip(&plans))
        .map(|(step, plan)| {
            let tokens = std::iter::once(step.session.next).chain(plan.drafts.iter().copied());
            let tokens: Vec<u32> = tokens.collect();
            let positions = plan.position..plan.position + tokens.len() as u32;
            (tokens, positions.collect())
        })
        .collect();
    let mut batch: Vec<Rows> = (steps.iter_mut().zip(&plans).zip(&rows))
        .filter(|((_, plan), _)| plan.active)
        .map(|((step, _), (tokens, positions))| Rows {
            cache: &mut step.session.cache,
            tokens,
            positions,
            keep: Keep::Pending,
        })
        .collect();
    if batch.is_empty() {
        return Ok(outs);
    }
    let verify = Instant::now();
    let hidden = model.forward(cx, &mut batch)?;
    drop(batch);
    let verified = verify.elapsed().as_secs_f64();
    let sample = Instant::now();
    let wanted = (steps.iter().zip(&plans)).filter(|(_, plan)| plan.active);
    let greedy = wanted.flat_map(|(step, plan)| {
        let greedy = row::is_greedy(&step.session.options);
        std::iter::repeat_n(greedy, plan.drafts.len() + 1)
    });
    let greedy: Vec<bool> = greedy.collect();
    let mut said = match row::rows(model, cx, &hidden, &greedy) {
        Ok(said) => said.into_iter(),
        Err(e) => {
            for (step, _) in steps.iter_mut().zip(&plans).filter(|(_, p)| p.active) {
                step.session.cache.accept(0)?;
            }
            return Err(e);
        }
    };
    let mut judged = vec![];
    for (step, plan) in steps.iter_mut().zip(&plans) {
        let own: Vec<Row> = match plan.active {
            true => said.by_ref().take(plan.drafts.len() + 1).collect(),
            false => vec![],
        };
        judged.push(plan.active.then(|| judge(step.session, plan, own)));
    }
    let sampled = sample.elapsed().as_secs_f64();
    let accept = Instant::now();
    let mut first_row = 0;
    let mut observed = vec![];
    for (i, (step, plan)) in steps.iter_mut().zip(&plans).enumerate() {
        let Some(tokens) = judged[i].take() else {
            continue;
        };
        let own = hidden.narrow(0, first_row, plan.drafts.len() + 1)?;
        first_row += plan.drafts.len() + 1;
        match tokens {
            Ok(tokens) => {
                let (tokens, right) = commit(step, plan, tokens, &own, &rows[i].1)?;
                observed.push((i, right, tokens.len()));
                outs[i] = Ok(tokens);
            }
            Err(e) => {
                step.session.cache.accept(0)?;
                outs[i] = Err(e);
            }
        }
    }
    for (i, ..) in &observed {
        steps[*i].session.catch_up(model, cx)?;
    }
    if observed
        .iter()
        .any(|(i, ..)| steps[*i].session.finished.is_some())
    {
        memory::settle(model.device())?;
    }
    let accepted = accept.elapsed().as_secs_f64();
    let all = start.elapsed().as_secs_f64();
    for (i, right, emitted) in observed {
        let (session, plan) = (&mut *steps[i].session, &plans[i]);
        let stats = &mut session.stats;
        stats.draft_s += drafted;
        stats.verify_s += verified;
        stats.sample_s += sampled;
        stats.accept_s += accepted;
        stats.other_s += (all - drafted - verified - sampled - accepted).max(0.0);
        // Where the text ended inside the block, nobody knows about the drafts after it.
        let whole = emitted > right;
        if plan.copied {
            if let Some(drafter) = &mut session.options.drafter {
                drafter.observe(plan.drafts.len(), right);
            }
        } else if let (Some(controller), true) = (&mut session.controller, whole) {
            if controller.is_parked() {
                stats.parked_tokens += emitted as u64;
                stats.parked_s += all;
            }
            controller.observe(plan.drafts.len(), right, all);
            stats.parks = controller.parks();
        }
    }
    Ok(outs)
}

/// What a session does in this cycle, or the first token, which needs no pass.
fn begin(model: &Model, step: &mut Step) -> (Plan, Option<Vec<u32>>) {
    let session = &mut *step.session;
    if session.finished.is_some() {
        return (Plan::default(), None);
    }
    if !session.first_is_out {
        session.first_is_out = true;
        let mut tokens = vec![session.next];
        let ends = step.ends.as_mut();
        session.emit(&mut tokens, |t| ends.and_then(|ends| ends(t)));
        return (Plan::default(), Some(tokens));
    }
    let position = session.cache.next_position().get();
    let limit = model.longest() as u32;
    if position >= limit {
        session.finished = Some(super::FinishReason::Length);
        return (Plan::default(), None);
    }
    // Drafts that could not be emitted, or would stand past the last position, are not made.
    let room =
        (session.options.max_tokens - session.emitted - 1).min((limit - position - 1) as usize);
    let wanted = match (&session.controller, session.options.depth) {
        (Some(controller), _) => controller.depth(),
        (None, Depth::Off) => 0,
        (None, depth) => depth.max(),
    };
    // After a cycle that failed the head has seen all there is, and has nothing to draft from.
    let depth = match session.unfed.tokens.is_empty() {
        true => 0,
        false => wanted.min(room),
    };
    let mut plan = Plan {
        active: true,
        position,
        depth,
        ..Default::default()
    };
    if let Some(drafter) = &mut session.options.drafter {
        let copied = drafter.propose(session.history.tokens(), MAX_COPY.min(room));
        if copied.len() > depth {
            plan.proposals = copied.iter().map(|t| vec![(*t, 1.0)]).collect();
            (plan.drafts, plan.copied, plan.depth) = (copied, true, 0);
        }
    }
    session.stats.chose(if plan.copied { 0 } else { depth });
    (plan, None)
}

/// Drafts with the head. It first sees the trunk's own rows since it drafted last, which stay in its cache; what it then says
/// to itself is forgotten.
fn draft(model: &Model, cx: &Context, steps: &mut [Step], plans: &mut [Plan]) -> Result<()> {
    let mut batch: Vec<DraftRows> = vec![];
    // The last row of each sequence that drafts.
    let (mut who, mut last, mut rows) = (vec![], vec![], 0);
    for (i, (step, plan)) in steps.iter_mut().zip(&*plans).enumerate() {
        if plan.depth == 0 {
            continue;
        }
        let session = &mut *step.session;
        rows += session.unfed.tokens.len();
        who.push(i);
        last.push(rows as u32 - 1);
        batch.push(DraftRows {
            cache: &mut session.cache,
            tokens: &session.unfed.tokens,
            hidden: &session.unfed.hidden,
            positions: &session.unfed.positions,
        });
    }
    if batch.is_empty() {
        return Ok(());
    }
    let out = model.draft(cx, &mut batch)?;
    drop(batch);
    let mut fed = vec![];
    for i in &who {
        let session = &mut *steps[*i].session;
        session.unfed.clear();
        fed.push(session.cache.draft_rows());
    }
    let hidden = out.index_select(&Tensor::new(last, out.device())?, 0)?;
    let result = chain(model, cx, steps, plans, &who, hidden);
    for (i, rows) in who.iter().zip(fed) {
        let (session, plan) = (&mut *steps[*i].session, &plans[*i]);
        session.history.pop(plan.drafts.len());
        session.cache.truncate_draft(rows)?;
    }
    result
}

/// Drafts from the head's outputs `hidden`, a row per sequence of `who`, which predict the tokens after their positions.
fn chain(
    model: &Model,
    cx: &Context,
    steps: &mut [Step],
    plans: &mut [Plan],
    who: &[usize],
    mut hidden: Tensor,
) -> Result<()> {
    let mut who = who.to_vec();
    loop {
        let (mut on, mut rows) = (vec![], vec![]);
        let all = draft_rows(model, cx, steps, &who, &hidden)?;
        for (row, (i, said)) in who.iter().zip(all).enumerate() {
            let (session, plan) = (&mut *steps[*i].session, &mut plans[*i]);
            let at = plan.position + plan.drafts.len() as u32 + 1;
            // A head whose logits are useless costs drafts, never the text.
            let Ok((token, proposal)) = propose(session, said, at) else {
                plan.depth = plan.drafts.len();
                continue;
            };
            plan.drafts.push(token);
            plan.proposals.extend(proposal);
            session.history.push(token);
            if plan.drafts.len() < plan.depth {
                on.push(*i);
                rows.push(row as u32);
            }
        }
        if on.is_empty() {
            return Ok(());
        }
        let fed = hidden.index_select(&Tensor::new(rows, hidden.device())?, 0)?;
        let fed: Vec<Tensor> = (0..on.len())
            .map(|row| Ok(fed.narrow(0, row, 1)?))
            .collect::<Result<_>>()?;
        let inputs: Vec<(u32, u32)> = on
            .iter()
            .map(|i| {
                let drafts = &plans[*i].drafts;
                let at = plans[*i].position + drafts.len() as u32 - 1;
                (drafts.last().copied().unwrap_or_default(), at)
            })
            .collect();
        let mut batch: Vec<DraftRows> = vec![];
        let mut next = on.iter().zip(&inputs).zip(&fed).peekable();
        for (i, step) in steps.iter_mut().enumerate() {
            if let Some(((_, (token, at)), hidden)) = next.next_if(|((who, _), _)| **who == i) {
                batch.push(DraftRows {
                    cache: &mut step.session.cache,
                    tokens: std::slice::from_ref(token),
                    hidden,
                    positions: std::slice::from_ref(at),
                });
            }
        }
        hidden = model.draft(cx, &mut batch)?;
        who = on;
    }
}

/// The head's row for each sequence of `who`, over its own vocabulary where it has one.
fn draft_rows(
    model: &Model,
    cx: &Context,
    steps: &[Step],
    who: &[usize],
    hidden: &Tensor,
) -> Result<Vec<Row>> {
    let options = |i: &usize| &steps[*i].session.options;
    let greedy: Vec<bool> = who.iter().map(|i| row::is_greedy(options(i))).collect();
    if who.iter().all(|i| options(i).draft_vocabulary.is_none()) {
        return row::rows(model, cx, hidden, &greedy);
    }
    let mut all = vec![];
    for (n, i) in who.iter().enumerate() {
        let (hidden, greedy) = (hidden.narrow(0, n, 1)?, greedy[n]);
        all.extend(match &options(i).draft_vocabulary {
            Some(vocabulary) => row::of_vocabulary(model, cx, &hidden, vocabulary, greedy)?,
            None => row::rows(model, cx, &hidden, &[greedy])?,
        });
    }
    Ok(all)
}

/// A draft for `position`, and what it was drawn from where that matters.
fn propose(session: &Session, said: Row, position: u32) -> Result<(u32, Option<Distribution>)> {
    let options = &session.options;
    if !blockwise(options) {
        return Ok((said.draw(options, &session.history, position)?, None));
    }
    let from = said.distribution(options, &session.history)?;
    let uniform = options.sampling.uniform(PROPOSE, position);
    let token = block::pick(&from, uniform).unwrap_or_default();
    Ok((token, Some(from)))
}

fn blockwise(options: &SessionOptions) -> bool {
    options.acceptance == Acceptance::Block && options.sampling.temperature > 0.0
}

/// The tokens that the target says, the right drafts first. Nothing is changed but the history, which is as before at the end.
fn judge(session: &mut Session, plan: &Plan, said: Vec<Row>) -> Result<Vec<u32>> {
    let mut pushed = 0;
    let result = match blockwise(&session.options) {
        true => judge_block(session, plan, said, &mut pushed),
        false => judge_coupled(session, plan, said, &mut pushed),
    };
    session.history.pop(pushed);
    result
}

fn judge_coupled(
    session: &mut Session,
    plan: &Plan,
    said: Vec<Row>,
    pushed: &mut usize,
) -> Result<Vec<u32>> {
    let mut out = vec![];
    for (row, said) in said.into_iter().enumerate() {
        let position = plan.position + row as u32 + 1;
        let token = said.draw(&session.options, &session.history, position)?;
        out.push(token);
        session.history.push(token);
        *pushed += 1;
        if plan.drafts.get(row) != Some(&token) {
            break;
        }
    }
    Ok(out)
}

fn judge_block(
    session: &mut Session,
    plan: &Plan,
    said: Vec<Row>,
    pushed: &mut usize,
) -> Result<Vec<u32>> {
    let mut targets = vec![];
    for (row, said) in said.into_iter().enumerate() {
        targets.push(said.distribution(&session.options, &session.history)?);
        if let Some(draft) = plan.drafts.get(row) {
            session.history.push(*draft);
            *pushed += 1;
        }
    }
    let sampling = &session.options.sampling;
    let after = |row: usize| plan.position + row as u32 + 1;
    let accept: Vec<f64> = (0..plan.drafts.len())
        .map(|row| sampling.uniform(ACCEPT, after(row)))
        .collect();
    let last = sampling.uniform(AFTER, after(0));
    let (right, next) = block::verify(&targets, &plan.proposals, &plan.drafts, &accept, last)
        .unwrap_or((0, targets[0][0].0));
    let mut out = plan.drafts[..right].to_vec();
    out.push(next);
    Ok(out)
}

/// Commits what a session emits of `tokens`; returns it, and how many drafts were right.
fn commit(
    step: &mut Step,
    plan: &Plan,
    mut tokens: Vec<u32>,
    hidden: &Tensor,
    positions: &[u32],
) -> Result<(Vec<u32>, usize)> {
    let session = &mut *step.session;
    let right = tokens.len() - 1;
    let ends = step.ends.as_mut();
    session.emit(&mut tokens, |t| ends.and_then(|ends| ends(t)));
    let rows = tokens.len();
    session.cache.accept(rows)?;
    tokens.iter().for_each(|t| session.history.push(*t));
    let judged = if rows <= right {
        rows
    } else {
        plan.drafts.len()
    };
    let whole = rows > right;
    session
        .stats
        .cycle(judged, right.min(rows), rows, plan.copied, whole);
    session.feed_later(&hidden.narrow(0, 0, rows)?, &tokens, &positions[..rows])?;
    session.next = tokens[rows - 1];
    Ok((tokens, right))
}
