//! What goes in comes out: shards record at random against a plain sum of the same numbers,
//! while control folds, pauses and folds again.

use super::*;
use crate::pure::units::Rng;

fn done(rng: &mut Rng) -> Done {
    let series = |rng: &mut Rng| Series(rng.below(5) as u32);
    Done {
        at: Instant::ZERO,
        request_id: RequestId::new(b"r-1"),
        tenant: series(rng),
        key: series(rng),
        route: series(rng),
        model: series(rng),
        backend: series(rng),
        status: [0, 200, 429, 599][rng.below(4) as usize],
        streamed: false,
        how: Ending::Whole,
        path: Endpoint::Chat,
        attempts: 1,
        bytes_in: rng.below(1_000),
        bytes_out: rng.below(1_000),
        queue: None,
        ttft: None,
        duration: Duration::from_nanos(rng.below(2_000_000_000)),
        usage: Booked {
            prompt: rng.below(1_000),
            completion: rng.below(1_000),
            cached: rng.below(10),
            reasoning: rng.below(10),
            estimated: rng.below(10),
            nano: rng.below(1_000_000),
        },
    }
}

/// Everything that can be compared as one number per line.
fn sums(ledger: &mut Ledger) -> Vec<u64> {
    let mut sums = vec![ledger.requests()];
    for series in (0..5).map(Series) {
        if let Some(row) = ledger.routes.of(series) {
            sums.extend(row.statuses);
            sums.extend([row.aborts, row.retries, row.booked.nano]);
            for times in [&row.ttft, &row.gap, &row.duration] {
                sums.extend([times.count(), times.sum_us]);
            }
        }
        if let Some(row) = ledger.backends.of(series) {
            sums.extend(row.failures);
            sums.extend([row.stale_resends, row.ttft.count(), row.ttft.sum_us]);
        }
        for rows in [&ledger.tenants, &ledger.models, &ledger.keys] {
            if let Some(row) = rows.of(series) {
                let b = row.booked;
                sums.push(row.requests);
                sums.extend([b.prompt, b.completion, b.cached, b.reasoning, b.estimated, b.nano]);
            }
        }
    }
    let s = ledger.shards;
    sums.extend([s.opened, s.closed, s.bad_requests, s.bytes_in, s.bytes_out]);
    let mut spends: Vec<_> = ledger.spends().collect();
    spends.sort_unstable_by_key(|(w, _)| [w.tenant.0, w.key.0, w.model.0, w.route.0, w.day]);
    sums.extend(spends.iter().flat_map(|(_, spend)| spend.words()));
    sums
}

/// One call at random; the oracle makes the same ones and folds them in good time.
fn record(meter: &mut Meter, rng: &mut Rng) {
    let (a, b) = (Series(rng.below(5) as u32), Series(rng.below(5) as u32));
    let span = Duration::from_nanos(rng.below(3_000_000_000));
    match rng.below(9) {
        0 => meter.ttft(a, b, span),
        1..=3 => meter.gap(a, span),
        4 => meter.upstream_failure(b, Failure::ALL[rng.below(12) as usize]),
        5 => meter.client_abort(a),
        6 => meter.retry(a),
        7 => {
            meter.stale_resend(b);
            meter.connection_opened();
            meter.connection_closed();
            meter.bad_request();
        }
        _ => meter.done(&done(rng)),
    }
}

const SHARDS: u64 = 4;
const CALLS: u64 = 10_000;

#[test]
fn nothing_is_lost_while_control_is_away() {
    let (meters, links): (Vec<_>, Vec<_>) =
        (0..SHARDS).map(|id| Meter::linked(ShardId(id as u32), None)).unzip();
    let mut ledger = Ledger::default();
    std::thread::scope(|scope| {
        for (seed, mut meter) in (0..).zip(meters) {
            scope.spawn(move || {
                let mut rng = Rng::seeded(seed);
                for call in 0..CALLS {
                    record(&mut meter, &mut rng);
                    // Ticks fall anywhere between two calls.
                    if call % 7 == seed {
                        meter.tick(Instant::from_nanos(call));
                    }
                }
            });
        }
        let mut turn = 0_u64;
        while !links.iter().all(|link| link.closed()) {
            // Away for three quarters of the time.
            if turn % 1_024 < 256 {
                ledger.fold(&links);
            }
            turn += 1;
            std::hint::spin_loop();
        }
    });
    ledger.fold(&links);

    let mut expected = Ledger::default();
    for seed in 0..SHARDS {
        let (mut meter, link) = Meter::linked(ShardId(0), None);
        let mut rng = Rng::seeded(seed);
        for call in 0..CALLS {
            record(&mut meter, &mut rng);
            if call % 50 == 49 {
                meter.tick(Instant::from_nanos(call));
                expected.fold(std::slice::from_ref(&link));
            }
        }
    }
    assert_eq!(sums(&mut ledger), sums(&mut expected));
    assert!(ledger.requests() > 2_500);
}

#[test]
fn a_sheet_that_is_not_taken_is_written_on_further() {
    let (mut meter, link) = Meter::linked(ShardId(0), None);
    for _ in 0..100 {
        meter.retry(Series(3));
        meter.tick(Instant::ZERO);
    }
    // One sheet waits, one is in use, and there is no third.
    assert_eq!((link.full.len(), link.blank.len()), (1, 0));
    let mut ledger = Ledger::default();
    ledger.fold(std::slice::from_ref(&link));
    assert_eq!(ledger.routes.of(Series(3)).map(|row| row.retries), Some(1));
    meter.tick(Instant::ZERO);
    ledger.fold(std::slice::from_ref(&link));
    assert_eq!(ledger.routes.of(Series(3)).map(|row| row.retries), Some(100));
}

#[test]
fn a_closed_meter_has_said_everything_once() {
    let (mut meter, link) = Meter::linked(ShardId(0), None);
    meter.retry(Series(1));
    meter.tick(Instant::ZERO);
    meter.retry(Series(1));
    meter.close();
    assert!(link.closed());
    meter.retry(Series(1));
    meter.tick(Instant::ZERO);
    drop(meter);
    let mut ledger = Ledger::default();
    ledger.fold(std::slice::from_ref(&link));
    assert_eq!(ledger.routes.of(Series(1)).map(|row| row.retries), Some(2));
}

#[test]
fn a_shard_that_dies_has_its_last_sheet_counted() {
    let (mut meter, link) = Meter::linked(ShardId(0), None);
    meter.retry(Series(1));
    meter.tick(Instant::ZERO);
    meter.retry(Series(1));
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _meter = meter;
        std::panic::resume_unwind(Box::new("a bug"));
    }));
    assert!(died.is_err() && link.closed());
    let mut ledger = Ledger::default();
    ledger.fold(std::slice::from_ref(&link));
    assert_eq!(ledger.routes.of(Series(1)).map(|row| row.retries), Some(2));
}

#[test]
fn late_names_keep_their_counts_and_share_histograms() {
    let (mut meter, link) = Meter::linked(ShardId(0), None);
    let late = Series(TIMED_NAMES_MAX as u32);
    meter.gap(late, Duration::from_millis(1));
    meter.retry(late);
    meter.tick(Instant::ZERO);
    let mut ledger = Ledger::default();
    ledger.fold(std::slice::from_ref(&link));
    assert_eq!(ledger.routes.of(Series(0)).map(|row| row.gap.count()), Some(1));
    let row = ledger.routes.of(late);
    assert_eq!(row.map(|row| (row.retries, row.gap.count())), Some((1, 0)));
}

#[test]
fn buckets_agree_with_counting_the_values_one_by_one() {
    let mut rng = Rng::seeded(7);
    let bounds = [1_000, 5_000, 250_000, 1_000_000, 60_000_000];
    let mut times = Times::<u32>::default();
    let mut values = Vec::new();
    for _ in 0..20_000 {
        // Every magnitude from 1 µs to far beyond the longest.
        let us = rng.next_u64() >> (34 + rng.below(30));
        values.push(us);
        times.record(Duration::from_micros(us));
    }
    let mut total = Times::<u64>::default();
    times.fold(&mut total);
    let mut counts = Vec::new();
    total.cumulative(&bounds, &mut counts);
    for (bound, count) in bounds.iter().zip(&counts) {
        // Exact up to the histogram's own resolution of one part in 128 around the bound.
        let within = |slack: u64| {
            values.iter().filter(|&&us| us <= bound + bound / 100 * slack).count() as u64
        };
        let below = values.iter().filter(|&&us| us <= bound - bound / 100).count() as u64;
        assert!((below..=within(1)).contains(count), "{bound}: {count}");
    }
    assert_eq!(total.count(), 20_000);
    assert_eq!(total.sum_us, values.iter().sum::<u64>());
    let median = total.quantile(0.5).expect("has values").as_micros() as u64;
    values.sort_unstable();
    let exact = values[values.len() / 2];
    assert!(median.abs_diff(exact) <= exact / 100 + 1, "{median} is not {exact}");
    assert_eq!(times.count(), 0);
}

#[test]
fn every_status_has_one_place() {
    assert!(STATUSES.is_sorted());
    for status in 0..=u16::MAX {
        let slot = status_slot(status);
        match STATUSES.get(slot) {
            Some(&known) => assert_eq!(known, status),
            None => assert!(slot == STATUS_SLOTS - 1 && !STATUSES.contains(&status)),
        }
    }
}

#[test]
fn a_request_id_is_short_and_visible() {
    assert_eq!(RequestId::new(b"req-1").as_str(), "req-1");
    assert_eq!(RequestId::new("a\r\né\u{1b} ".as_bytes()).as_str(), "a??????");
    assert_eq!(RequestId::new(&[b'x'; 300]).as_str(), "x".repeat(40));
    assert_eq!(RequestId::new(b"").as_str(), "");
}

#[test]
fn failures_are_numbered_as_they_are_listed() {
    for (index, failure) in Failure::ALL.into_iter().enumerate() {
        assert_eq!(failure as usize, index);
    }
}

#[test]
fn records_that_find_no_room_are_counted() {
    let (records, mut reader) = Records::to(std::thread::current());
    let (mut meter, link) = Meter::linked(ShardId(0), Some(records));
    let mut rng = Rng::seeded(1);
    for _ in 0..RECORDS + 10 {
        meter.done(&done(&mut rng));
    }
    meter.tick(Instant::ZERO);
    let mut ledger = Ledger::default();
    ledger.fold(std::slice::from_ref(&link));
    assert_eq!(ledger.shards.records_dropped, 10);
    assert_eq!(ledger.requests() as usize, RECORDS + 10);
    assert!(reader.pop().expect("a record").unix_ms > 1_600_000_000_000);
}

#[test]
fn wall_time_follows_the_clock_it_was_set_by() {
    let mut wall = WallClock::default();
    let now = Instant::from_nanos(5_000_000_000);
    wall.keep(now);
    let then = wall.unix_ms(now);
    assert!(then.abs_diff(unix_ns() / 1_000_000) < 1_000);
    assert_eq!(wall.unix_ms(now + Duration::from_millis(1_500)), then + 1_500);
}

#[test]
fn a_tick_is_seen_from_outside_also_when_nothing_was_counted() {
    let (mut meter, link) = Meter::linked(ShardId(0), None);
    assert_eq!(link.beat(), None);
    meter.tick(Instant::from_nanos(5));
    assert_eq!(link.beat(), Some(Instant::from_nanos(5)));
}
