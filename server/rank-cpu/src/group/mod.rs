//! EP group on CPU ranks: symmetric windows in shared memory.
//!
//! Each direction takes one copy: the source writes rows into its area of the owner's window, and the owner's experts
//! write their partial sums directly into the owner's area of the source's window.

mod routing;

#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use self::routing::Routes;
use crate::config::{ConfigError, EpConfig};
use crate::error::EpError;
use crate::exchange::{Exchange, ExchangeOptions, SlotState, WindowLayout, WindowShape};
pub use crate::exchange::{ReceivedIter, ReceivedRows};
use expertd_compute::linalg::for_each_chunk;
use expertd_shm::ThreadTeam;
use expertd_shm::region::SharedRegion;
use expertd_types::{ExpertOwners, Rank, Sequence, Slot};

/// The gate's decision for a rank's tokens, in host memory.
#[derive(Clone, Copy, Debug)]
pub struct HostRouting<'a> {
    /// The ranks that own each of the layer's experts.
    pub owners: &'a ExpertOwners,
    /// Added to a token's index to choose among the copies of an expert; differs between ranks, so that steps of few tokens use
    /// all copies.
    pub turn: usize,
    /// Number of tokens of this rank; may be zero.
    pub tokens: usize,
    /// Experts per token; the same on every rank, including ranks without tokens.
    pub k: usize,
    /// `[tokens, k]`; [`NO_EXPERT`] marks an unused choice.
    pub ids: &'a [i32],
    /// `[tokens, k]`.
    pub weights: &'a [f32],
}

/// Id of a choice that no expert of this rank computes: in received ids the expert belongs to another rank, in routing the
/// choice is unused.
pub const NO_EXPERT: i32 = -1;

/// Number of rows that one task copies or reduces.
const ROWS_PER_TASK: usize = 16;
/// Copies and reductions of more elements are split into tasks.
const SPLIT_ABOVE: usize = 1 << 18;

/// One CPU rank's membership in an EP group.
///
/// An exchange is one round of these calls for a slot, in this order:
///
/// ```text
/// prepare → dispatch_send → dispatch_wait → received → combine_send → combine_wait
/// ```
///
/// Between a send and its wait the caller may do other work, such as shared experts. Exchanges in different slots may
/// be interleaved, in the same order on every rank. **Every rank runs every exchange**, with zero tokens if it has none.
/// A call that does not fit the slot's state is an error that changes nothing. Each rank counts its exchanges by itself;
/// the sequences agree because all ranks run the same exchanges. After set-up, no call allocates.
#[derive(Debug)]
pub struct CpuGroup {
    config: EpConfig,
    exchange: Exchange,
    /// `[slots]`.
    routes: Vec<Routes>,
}

/// The layout of a group's windows.
pub fn window_layout(config: &EpConfig) -> Result<WindowLayout, ConfigError> {
    config.validate()?;
    let &EpConfig { ranks, slots, hidden, max_top_k, max_tokens_per_rank, .. } = config;
    WindowLayout::new(WindowShape { ranks, slots, hidden, max_top_k, max_tokens_per_rank })
        .map_err(|_| ConfigError::TooLarge { ranks, slots, max_tokens_per_rank, hidden })
}

/// Creates the windows of a generation, whose descriptor the ranks inherit.
pub fn create_windows(config: &EpConfig) -> Result<Arc<SharedRegion>, EpError> {
    Ok(window_layout(config)?.create(config.generation)?)
}

/// Makes a group of N ranks in one process, for N threads. Each rank has a mapping of its own and runs the same code as in
/// a process of its own. `config.rank` is ignored.
pub fn loopback(config: &EpConfig) -> Result<Vec<CpuGroup>, EpError> {
    let config = EpConfig { rank: Rank(0), ..config.clone() };
    let region = create_windows(&config)?;
    let ranks = 0..config.ranks as u32;
    let join = |rank| {
        let fd = region.try_clone_fd()?;
        CpuGroup::from_fd(fd, EpConfig { rank: Rank(rank), ..config.clone() })
    };
    ranks.map(join).collect()
}

impl CpuGroup {
    /// Joins the group whose windows are in `region`.
    pub fn attach(region: &Arc<SharedRegion>, config: EpConfig) -> Result<Self, EpError> {
        let exchange = Exchange::attach(&window_layout(&config)?, region, options(&config))?;
        Ok(Self::over(exchange, config))
    }

    /// Joins the group whose windows are in an inherited descriptor.
    pub fn from_fd(fd: OwnedFd, config: EpConfig) -> Result<Self, EpError> {
        let exchange = Exchange::from_fd(&window_layout(&config)?, fd, options(&config))?;
        Ok(Self::over(exchange, config))
    }

    fn over(exchange: Exchange, config: EpConfig) -> Self {
        let routes = (0..config.slots).map(|_| Routes::new(&config)).collect();
        Self { config, exchange, routes }
    }

    fn expect(&self, slot: Slot, expected: SlotState) -> Result<(), EpError> {
        Ok(self.exchange.expect(slot, expected)?)
    }

    fn check_rows(&self, slot: Slot, what: &'static str, found: usize) -> Result<(), EpError> {
        let expected = self.routes[slot.index()].tokens() * self.config.hidden;
        if found == expected { Ok(()) } else { Err(EpError::Length { what, expected, found }) }
    }
}

fn options(config: &EpConfig) -> ExchangeOptions {
    ExchangeOptions {
        rank: config.rank,
        generation: config.generation,
        deadline: config.wait_deadline,
        spin: config.spin,
        poison: config.poison,
    }
}

impl CpuGroup {
    /// The configuration of the group.
    pub fn config(&self) -> &EpConfig {
        &self.config
    }

    /// Begins an exchange in an idle slot: determines which ranks each token goes to and lays out the routing, which the
    /// slot keeps until [`combine_wait`](Self::combine_wait).
    pub fn prepare(&mut self, slot: Slot, routing: HostRouting<'_>) -> Result<Sequence, EpError> {
        self.expect(slot, SlotState::Idle)?;
        self.routes[slot.index()].lay_out(&routing)?;
        let sequence = self.exchange.begin(slot, routing.k as u32)?;
        for (rank, route) in self.routes[slot.index()].routes().enumerate() {
            let out = self.exchange.outgoing(slot, rank)?;
            route.write(&routing, Rank(rank as u32), out);
        }
        Ok(sequence)
    }

    /// Pushes each row once to every rank that owns one of its experts, and signals all ranks. Never waits.
    pub fn dispatch_send(
        &mut self,
        slot: Slot,
        rows: &[f32],
        team: Option<&ThreadTeam>,
    ) -> Result<(), EpError> {
        self.expect(slot, SlotState::Open)?;
        self.check_rows(slot, "rows", rows.len())?;
        let hidden = self.config.hidden;
        for (rank, route) in self.routes[slot.index()].routes().enumerate() {
            let out = &mut self.exchange.outgoing(slot, rank)?.rows[..route.tokens.len() * hidden];
            let copy = |out: &mut [f32], tokens: &[u32]| {
                for (out, &token) in out.chunks_exact_mut(hidden).zip(tokens) {
                    out.copy_from_slice(&rows[token as usize * hidden..][..hidden]);
                }
            };
            let team = team.filter(|_| out.len() > SPLIT_ABOVE);
            for_each_chunk(team, (out, ROWS_PER_TASK * hidden), (route.tokens, ROWS_PER_TASK), copy);
        }
        Ok(self.exchange.send_dispatch(slot)?)
    }

    /// Waits until every rank's rows for this rank have arrived.
    pub fn dispatch_wait(&mut self, slot: Slot) -> Result<(), EpError> {
        Ok(self.exchange.wait_dispatch(slot)?)
    }

    /// The rows that arrived. The caller writes **every** partial row: the weighted sum of the outputs of this rank's
    /// experts.
    pub fn received(&mut self, slot: Slot) -> Result<ReceivedIter<'_>, EpError> {
        Ok(self.exchange.received(slot)?)
    }

    /// Returns the partial rows to their sources, and signals all ranks. Never waits.
    pub fn combine_send(&mut self, slot: Slot) -> Result<(), EpError> {
        Ok(self.exchange.send_combine(slot)?)
    }

    /// Waits until every rank's partial rows have arrived, and writes each token's sum over ranks to `out`, added in f32 in
    /// ascending order of ranks. A token without experts gets zeros. Ends the exchange.
    pub fn combine_wait(
        &mut self,
        slot: Slot,
        out: &mut [f32],
        team: Option<&ThreadTeam>,
    ) -> Result<(), EpError> {
        self.expect(slot, SlotState::Returning)?;
        self.check_rows(slot, "out", out.len())?;
        self.exchange.wait_combine(slot)?;
        let hidden = self.config.hidden;
        let routes = &self.routes[slot.index()];
        let failure = OnceLock::new();
        let reduce = |out: &mut [f32], rows: &[u32]| {
            for (out, rows) in out.chunks_exact_mut(hidden).zip(rows.chunks_exact(self.config.ranks)) {
                if let Err(error) = self.reduce(slot, rows, out) {
                    let _ = failure.set(error);
                }
            }
        };
        let team = team.filter(|_| out.len() > SPLIT_ABOVE);
        let rows_per_task = ROWS_PER_TASK * self.config.ranks;
        for_each_chunk(team, (out, ROWS_PER_TASK * hidden), (routes.rows(), rows_per_task), reduce);
        failure.into_inner().map_or(Ok(()), Err)?;
        Ok(self.exchange.finish(slot)?)
    }

    /// Reports to every rank that this one failed, so that none waits for it, and ends the group. Dropping the group during
    /// an exchange does the same.
    pub fn abort(&mut self) {
        self.exchange.abort();
    }

    /// Calls [`dispatch_send`](Self::dispatch_send), then [`dispatch_wait`](Self::dispatch_wait).
    pub fn dispatch(&mut self, slot: Slot, rows: &[f32], team: Option<&ThreadTeam>) -> Result<(), EpError> {
        self.dispatch_send(slot, rows, team)?;
        self.dispatch_wait(slot)
    }

    /// Calls [`combine_send`](Self::combine_send), then [`combine_wait`](Self::combine_wait).
    pub fn combine(&mut self, slot: Slot, out: &mut [f32], team: Option<&ThreadTeam>) -> Result<(), EpError> {
        self.combine_send(slot)?;
        self.combine_wait(slot, out, team)
    }
}

impl CpuGroup {
    /// Adds one token's partial rows in ascending order of ranks. `rows[rank]` is the token's row among those that went to
    /// the rank.
    fn reduce(&self, slot: Slot, rows: &[u32], out: &mut [f32]) -> Result<(), EpError> {
        let mut first = true;
        for (rank, &row) in rows.iter().enumerate() {
            if row == routing::NOT_SENT {
                continue;
            }
            let partial = &self.exchange.returned(slot, rank)?[row as usize * out.len()..][..out.len()];
            if first {
                out.copy_from_slice(partial);
                first = false;
            } else {
                out.iter_mut().zip(partial).for_each(|(sum, part)| *sum += part);
            }
        }
        if first {
            out.fill(0.0);
        }
        Ok(())
    }
}
