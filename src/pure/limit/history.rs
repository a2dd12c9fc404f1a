//! How long answers have been: what the next one is expected to take.

use std::collections::HashMap;

use foldhash::fast::FixedState;

use crate::pure::units::Series;

/// How long this tenant's answers of this model have been, on one shard: what an answer is expected
/// to take. Bounded; who comes when it is full has no history.
#[derive(Debug, Default)]
pub struct History {
    past: HashMap<(Series, Series), Lengths, FixedState>,
}

const PAST_MAX: usize = 4_096;

impl History {
    pub fn learn(&mut self, tenant: Series, model: Series, tokens: u64) {
        let key = (tenant, model);
        if self.past.len() < PAST_MAX || self.past.contains_key(&key) {
            self.past.entry(key).or_default().add(tokens);
        }
    }

    /// A length that `share` (0 to 1) of the answers did not exceed; `None` without history.
    pub fn quantile(&self, tenant: Series, model: Series, share: f64) -> Option<u64> {
        self.past.get(&(tenant, model))?.quantile(share)
    }
}

/// A histogram of lengths in quarters of an octave, which forgets slowly.
#[derive(Clone, Debug)]
struct Lengths {
    counts: [u16; BUCKETS],
    total: u32,
}

/// Up to 2^20 tokens.
const BUCKETS: usize = 80;
/// So many answers are remembered in full; then all counts are halved.
const REMEMBERED: u32 = 2_000;
/// Fewer say nothing about a tail.
const ENOUGH: u32 = 8;

impl Default for Lengths {
    fn default() -> Lengths {
        Lengths { counts: [0; BUCKETS], total: 0 }
    }
}

impl Lengths {
    fn add(&mut self, tokens: u64) {
        self.counts[bucket(tokens)] += 1;
        self.total += 1;
        if self.total >= REMEMBERED {
            for count in &mut self.counts {
                *count /= 2;
            }
            self.total = self.counts.iter().map(|&count| u32::from(count)).sum();
        }
    }

    fn quantile(&self, share: f64) -> Option<u64> {
        if self.total < ENOUGH {
            return None;
        }
        // Between 0 and the total, both small.
        let wanted = (f64::from(self.total) * share).ceil() as u32;
        let mut sum = 0;
        let found = self.counts.iter().position(|&count| {
            sum += u32::from(count);
            sum >= wanted
        });
        found.map(upper)
    }
}

/// The quarter of an octave that a length falls in.
fn bucket(tokens: u64) -> usize {
    let tokens = tokens.clamp(1, (1 << 20) - 1);
    let octave = tokens.ilog2();
    // The two bits behind the leading one.
    let quarter = (tokens << 2 >> octave) & 3;
    octave as usize * 4 + quarter as usize
}

/// The longest length of a bucket.
fn upper(bucket: usize) -> u64 {
    let (octave, quarter) = (bucket as u64 / 4, bucket as u64 % 4);
    (((4 + quarter + 1) << octave).div_ceil(4) - 1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_expected_to_be_as_long_as_most_have_been() {
        let (tenant, model) = (Series(1), Series(2));
        let mut history = History::default();
        assert_eq!(history.quantile(tenant, model, 0.95), None);
        for _ in 0..95 {
            history.learn(tenant, model, 100);
        }
        for _ in 0..5 {
            history.learn(tenant, model, 4_000);
        }
        let p50 = history.quantile(tenant, model, 0.5).expect("history");
        let p95 = history.quantile(tenant, model, 0.95).expect("history");
        let p99 = history.quantile(tenant, model, 0.99).expect("history");
        assert!((100..125).contains(&p50) && p95 == p50, "{p50} {p95}");
        assert!((4_000..5_000).contains(&p99), "{p99}");
        // It forgets: a new habit is the expectation after some time.
        for _ in 0..10_000 {
            history.learn(tenant, model, 10);
        }
        assert!(history.quantile(tenant, model, 0.99).expect("history") <= 12);
        for other in 0..10_000 {
            history.learn(Series(other), model, 1);
        }
        assert!(history.past.len() <= PAST_MAX);
    }

    #[test]
    fn every_length_is_within_its_bucket_and_no_bucket_is_wide() {
        for tokens in (1..5_000).chain([65_535, 65_536, (1 << 20) - 1]) {
            let upper = upper(bucket(tokens));
            assert!(upper >= tokens && upper <= tokens + tokens / 4 + 1, "{tokens}: {upper}");
        }
        assert_eq!(bucket(0), bucket(1));
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }
}
