//! The numbers as text: every Prometheus metric with its name, unit and labels, usage as JSON, and
//! the small writers they need.
//!
//! Labels come from the plan alone, so the number of series is bounded by what the operator
//! wrote; a name that is in no plan counts as `other`. Every series of a known name is there from
//! the start with value 0, because a counter that appears with value 1 hides its first event from
//! `rate()`. The only exceptions are statuses other than 200, of which there are 46 at most.

use std::fmt::Write as _;
use std::sync::Arc;

use super::usage::{self, Spend};
use super::{Booked, Catalog, Failure, Ledger, STATUSES, TIMED_NAMES_MAX, Times, TokenRow};
use crate::pure::board::Totals;
use crate::pure::jwt::Known;
use crate::pure::units::{Series, ShardId, civil};

/// What `/metrics` shows beside the ledger.
#[derive(Debug)]
pub struct Facts<'a> {
    pub ledger: &'a Ledger,
    pub catalog: &'a Catalog,
    pub totals: &'a Totals,
    /// Each shard and its driver's name.
    pub shards: &'a [(ShardId, &'static str)],
    pub ready: bool,
    pub plan_digest: u64,
    pub reloads_in_force: u64,
    pub reloads_refused: u64,
    /// Tasks that panicked and were contained.
    pub panics: u64,
    /// Tenants with a budget, and which share of it is spent.
    pub budgets: Vec<(Arc<str>, f64)>,
    /// Issuers of tokens, and what is known of their keys.
    pub issuers: Vec<(Arc<str>, Known)>,
    /// Whether the fleet's Redis answers, and what was leased from it; `None` without a fleet.
    pub fleet: Option<(bool, u64)>,
    /// Of the store: groups written, and attempts that failed.
    pub state_commits: u64,
    pub state_failures: u64,
    /// Access records that reached the writer and could not be written.
    pub records_unwritten: u64,
    /// By sink and result: records and alerts that were to leave the process.
    pub exported: [(&'static str, &'static str, u64); 5],
    pub events_lost: u64,
    pub process: Process,
}

/// What the kernel says of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Process {
    pub cpu_seconds: f64,
    pub resident_bytes: u64,
    pub open_fds: u64,
    pub max_fds: u64,
    pub start_unix_seconds: f64,
}

/// The whole of `/metrics` in the Prometheus text format 0.0.4.
pub fn render(facts: &Facts) -> String {
    let mut page = Page(String::with_capacity(64 * 1024));
    requests(&mut page, facts);
    times(&mut page, facts);
    tokens(&mut page, facts);
    backends(&mut page, facts);
    connections(&mut page, facts);
    gateway(&mut page, facts);
    process(&mut page, &facts.process);
    page.0
}

fn requests(page: &mut Page, facts: &Facts) {
    let Facts { ledger, catalog, .. } = facts;
    page.head("forebay_requests_total", COUNTER, "Requests that have ended, by answered status.");
    for (series, route) in numbered(&catalog.routes) {
        let row = ledger.routes.of(series);
        for (slot, status) in STATUSES.iter().map(Some).chain([None]).enumerate() {
            let count = row.map_or(0, |row| row.statuses[slot]);
            if count == 0 && status != Some(&200) {
                continue;
            }
            match status {
                Some(status) => page.line(
                    "forebay_requests_total",
                    &[("route", route), ("status", &status.to_string())],
                    count,
                ),
                None => page.line(
                    "forebay_requests_total",
                    &[("route", route), ("status", "other")],
                    count,
                ),
            }
        }
    }
    page.head("forebay_requests_in_flight", GAUGE, "Requests that run now.");
    page.line("forebay_requests_in_flight", &[], facts.totals.requests_in_flight.held());

    page.head("forebay_client_aborts_total", COUNTER, "Clients that left before the end.");
    for (series, route) in numbered(&catalog.routes) {
        let count = ledger.routes.of(series).map_or(0, |row| row.aborts);
        page.line("forebay_client_aborts_total", &[("route", route)], count);
    }
    page.head("forebay_retries_total", COUNTER, "Attempts after the first.");
    for (series, route) in numbered(&catalog.routes) {
        let count = ledger.routes.of(series).map_or(0, |row| row.retries);
        page.line("forebay_retries_total", &[("route", route)], count);
    }
}

fn times(page: &mut Page, facts: &Facts) {
    let Facts { ledger, catalog, .. } = facts;
    let routes = || numbered(&catalog.routes).take(TIMED_NAMES_MAX);
    let of = |series| ledger.routes.of(series);
    page.histogram(
        "forebay_time_to_first_token_seconds",
        "From the whole request to the first content written to the client.",
        "route",
        routes().map(|(series, name)| (name, of(series).map(|row| &row.ttft))),
        TTFT,
    );
    page.histogram(
        "forebay_inter_token_seconds",
        "Between two content chunks of a stream.",
        "route",
        routes().map(|(series, name)| (name, of(series).map(|row| &row.gap))),
        GAP,
    );
    page.histogram(
        "forebay_request_duration_seconds",
        "From the request's first byte to the answer's last.",
        "route",
        routes().map(|(series, name)| (name, of(series).map(|row| &row.duration))),
        DURATION,
    );
    page.histogram(
        "forebay_backend_time_to_first_token_seconds",
        "The same time to the first content, by the backend that sent it.",
        "backend",
        catalog
            .backends
            .iter()
            .take(TIMED_NAMES_MAX)
            .map(|row| (&*row.name, ledger.backends.of(row.series).map(|row| &row.ttft))),
        TTFT,
    );
}

fn tokens(page: &mut Page, facts: &Facts) {
    let Facts { ledger, catalog, .. } = facts;
    let none = Booked::default();
    let tenants = catalog.tenants.iter().map(|tenant| {
        let row = ledger.tenants.of(tenant.series);
        (&*tenant.name, row.map_or(&none, |row| &row.booked))
    });
    let models = numbered(&catalog.models).map(|(series, name)| (name, ledger.models.of(series)));
    let models = models.map(|(name, row)| (name, row.map_or(&none, |row| &row.booked)));
    page.tokens("forebay_tenant_tokens_total", "Tokens booked, by who pays.", "tenant", tenants);
    page.tokens("forebay_tokens_total", "Tokens booked, by model.", "model", models);
    let keys = numbered(&catalog.keys).map(|(series, name)| (name, ledger.keys.of(series)));
    let keys = keys.map(|(name, row)| (name, row.map_or(&none, |row| &row.booked)));
    let routes = numbered(&catalog.routes).map(|(series, name)| (name, ledger.routes.of(series)));
    let routes = routes.map(|(name, row)| (name, row.map_or(&none, |row| &row.booked)));
    page.tokens("forebay_key_tokens_total", "Tokens booked, by key.", "key", keys);
    page.tokens("forebay_route_tokens_total", "Tokens booked, by route.", "route", routes);
    page.head("forebay_tenant_cost_usd_total", COUNTER, "Booked tokens by their model's price.");
    for tenant in &catalog.tenants {
        let nano = ledger.tenants.of(tenant.series).map_or(0, |row| row.booked.nano);
        let labels = [("tenant", &*tenant.name)];
        page.line("forebay_tenant_cost_usd_total", &labels, dollars(nano));
    }
    page.head("forebay_cost_usd_total", COUNTER, "The same, by model.");
    for (series, model) in numbered(&catalog.models) {
        let nano = ledger.models.of(series).map_or(0, |row| row.booked.nano);
        page.line("forebay_cost_usd_total", &[("model", model)], dollars(nano));
    }
    page.head("forebay_tenant_concurrency", GAUGE, "Requests of a tenant that run now.");
    for tenant in &catalog.tenants {
        let labels = [("tenant", &*tenant.name)];
        page.line("forebay_tenant_concurrency", &labels, tenant.concurrency.now());
    }
    page.head("forebay_reserved_tokens", GAUGE, "Tokens held by requests that run now.");
    for tenant in &catalog.tenants {
        let labels = [("tenant", &*tenant.name)];
        page.line("forebay_reserved_tokens", &labels, tenant.reserved_tokens.now());
    }
}

/// `cached` is part of `prompt`, `reasoning` of `completion`, `estimated` of their sum.
fn kinds(booked: &Booked) -> [(&'static str, u64); 5] {
    [
        ("prompt", booked.prompt),
        ("completion", booked.completion),
        ("cached", booked.cached),
        ("reasoning", booked.reasoning),
        ("estimated", booked.estimated),
    ]
}

fn backends(page: &mut Page, facts: &Facts) {
    let Facts { ledger, catalog, .. } = facts;
    page.head("forebay_backend_in_flight", GAUGE, "Attempts that run on a backend now.");
    for row in &catalog.backends {
        page.line("forebay_backend_in_flight", &[("backend", &*row.name)], row.in_flight());
    }
    page.head("forebay_backend_ready", GAUGE, "1 if a backend may be picked.");
    for row in &catalog.backends {
        let ready = row.ready() && !row.draining();
        page.line("forebay_backend_ready", &[("backend", &*row.name)], u64::from(ready));
    }
    page.head("forebay_upstream_failures_total", COUNTER, "Attempts that a backend failed.");
    for row in &catalog.backends {
        let counts = ledger.backends.of(row.series);
        for failure in Failure::ALL {
            let count = counts.map_or(0, |row| row.failures[failure as usize]);
            let labels = [("backend", &*row.name), ("reason", failure.name())];
            page.line("forebay_upstream_failures_total", &labels, count);
        }
    }
    page.head(
        "forebay_stale_resends_total",
        COUNTER,
        "Requests sent again because a pooled connection had been closed under them.",
    );
    for row in &catalog.backends {
        let count = ledger.backends.of(row.series).map_or(0, |row| row.stale_resends);
        page.line("forebay_stale_resends_total", &[("backend", &*row.name)], count);
    }
}

fn connections(page: &mut Page, facts: &Facts) {
    let shards = &facts.ledger.shards;
    page.head("forebay_connections", GAUGE, "Client connections that are open.");
    page.line("forebay_connections", &[], facts.totals.connections.held());
    page.head("forebay_connections_opened_total", COUNTER, "Client connections accepted.");
    page.line("forebay_connections_opened_total", &[], shards.opened);
    page.head("forebay_connections_closed_total", COUNTER, "Client connections ended.");
    page.line("forebay_connections_closed_total", &[], shards.closed);
    page.head("forebay_bad_requests_total", COUNTER, "Requests refused by the rules of the wire.");
    page.line("forebay_bad_requests_total", &[], shards.bad_requests);
    page.head("forebay_buffered_bytes", GAUGE, "Bodies held in memory.");
    page.line("forebay_buffered_bytes", &[], facts.totals.buffered_bytes.held());
    page.head("forebay_received_bytes_total", COUNTER, "Body bytes from clients.");
    page.line("forebay_received_bytes_total", &[], shards.bytes_in);
    page.head("forebay_sent_bytes_total", COUNTER, "Body bytes to clients.");
    page.line("forebay_sent_bytes_total", &[], shards.bytes_out);
}

fn gateway(page: &mut Page, facts: &Facts) {
    page.head("forebay_build_info", GAUGE, "1; the label says which build runs.");
    page.line("forebay_build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
    page.head("forebay_plan_info", GAUGE, "1; the label identifies the configuration in force.");
    page.line("forebay_plan_info", &[("digest", &format!("{:016x}", facts.plan_digest))], 1);
    page.head("forebay_driver_info", GAUGE, "1; how a shard talks to the kernel.");
    for (shard, driver) in facts.shards {
        page.line("forebay_driver_info", &[("driver", driver), ("shard", &shard.0.to_string())], 1);
    }
    page.head("forebay_ready", GAUGE, "1 while new requests are served, 0 while draining.");
    page.line("forebay_ready", &[], u64::from(facts.ready));
    page.head("forebay_config_reloads_total", COUNTER, "Reloads, by result.");
    page.line("forebay_config_reloads_total", &[("result", "in_force")], facts.reloads_in_force);
    page.line("forebay_config_reloads_total", &[("result", "refused")], facts.reloads_refused);
    page.head("forebay_panics_total", COUNTER, "Panics contained; each is a bug.");
    page.line("forebay_panics_total", &[], facts.panics);
    page.head("forebay_budget_spent_ratio", GAUGE, "Share of the budget spent or held.");
    for (tenant, share) in &facts.budgets {
        page.line("forebay_budget_spent_ratio", &[("tenant", tenant)], share);
    }
    if !facts.issuers.is_empty() {
        page.head("forebay_jwks_keys", GAUGE, "Keys that an issuer's tokens may be signed by.");
        for (issuer, known) in &facts.issuers {
            let keys = known.set.as_ref().map_or(0, |set| set.len());
            page.line("forebay_jwks_keys", &[("issuer", issuer)], keys);
        }
        page.head("forebay_jwks_refreshes_total", COUNTER, "Times an issuer's keys were read.");
        for (issuer, known) in &facts.issuers {
            for (result, count) in [("ok", known.refreshed), ("failed", known.failed)] {
                let labels = [("issuer", &**issuer), ("result", result)];
                page.line("forebay_jwks_refreshes_total", &labels, count);
            }
        }
    }
    if let Some((up, leases)) = facts.fleet {
        page.head("forebay_fleet_up", GAUGE, "Whether the fleet's Redis answers.");
        page.line("forebay_fleet_up", &[], u8::from(up));
        page.head("forebay_fleet_leases_total", COUNTER, "Blocks leased from the fleet.");
        page.line("forebay_fleet_leases_total", &[], leases);
    }
    page.head("forebay_state_commits_total", COUNTER, "Groups of counters written to state.dir.");
    page.line("forebay_state_commits_total", &[], facts.state_commits);
    page.head("forebay_state_failures_total", COUNTER, "Groups that could not be written yet.");
    page.line("forebay_state_failures_total", &[], facts.state_failures);
    page.head("forebay_access_log_dropped_total", COUNTER, "Access records nobody could take.");
    let dropped = facts.ledger.shards.records_dropped.saturating_add(facts.records_unwritten);
    page.line("forebay_access_log_dropped_total", &[], dropped);
    page.head(
        "forebay_exported_total",
        COUNTER,
        "Usage records and alerts, by what became of them.",
    );
    for (sink, result, count) in facts.exported {
        page.line("forebay_exported_total", &[("sink", sink), ("result", result)], count);
    }
    page.head("forebay_events_dropped_total", COUNTER, "Diagnostic events that were not written.");
    page.line("forebay_events_dropped_total", &[], facts.events_lost);
}

/// The names that every Prometheus client library uses.
fn process(page: &mut Page, process: &Process) {
    page.head("process_cpu_seconds_total", COUNTER, "User and system CPU time spent.");
    page.line("process_cpu_seconds_total", &[], process.cpu_seconds);
    page.head("process_resident_memory_bytes", GAUGE, "Resident memory.");
    page.line("process_resident_memory_bytes", &[], process.resident_bytes);
    page.head("process_open_fds", GAUGE, "Open file descriptors.");
    page.line("process_open_fds", &[], process.open_fds);
    page.head("process_max_fds", GAUGE, "Most file descriptors it may open.");
    page.line("process_max_fds", &[], process.max_fds);
    page.head("process_start_time_seconds", GAUGE, "Start, in seconds since 1970.");
    page.line("process_start_time_seconds", &[], process.start_unix_seconds);
}

/// Upper bounds in µs and as `le` writes them: those of OpenTelemetry's GenAI conventions
/// (`gen_ai.server.time_to_first_token`), with a tail for long prompts.
const TTFT: &[(u64, &str)] = &[
    (1_000, "0.001"),
    (5_000, "0.005"),
    (10_000, "0.01"),
    (20_000, "0.02"),
    (40_000, "0.04"),
    (60_000, "0.06"),
    (80_000, "0.08"),
    (100_000, "0.1"),
    (250_000, "0.25"),
    (500_000, "0.5"),
    (750_000, "0.75"),
    (1_000_000, "1"),
    (2_500_000, "2.5"),
    (5_000_000, "5"),
    (7_500_000, "7.5"),
    (10_000_000, "10"),
    (30_000_000, "30"),
    (60_000_000, "60"),
];

/// `gen_ai.server.time_per_output_token`, with room below for small models.
const GAP: &[(u64, &str)] = &[
    (1_000, "0.001"),
    (5_000, "0.005"),
    (10_000, "0.01"),
    (25_000, "0.025"),
    (50_000, "0.05"),
    (75_000, "0.075"),
    (100_000, "0.1"),
    (150_000, "0.15"),
    (200_000, "0.2"),
    (300_000, "0.3"),
    (400_000, "0.4"),
    (500_000, "0.5"),
    (750_000, "0.75"),
    (1_000_000, "1"),
    (2_500_000, "2.5"),
    (10_000_000, "10"),
];

/// `gen_ai.server.request.duration`, with a tail for long answers.
const DURATION: &[(u64, &str)] = &[
    (10_000, "0.01"),
    (20_000, "0.02"),
    (40_000, "0.04"),
    (80_000, "0.08"),
    (160_000, "0.16"),
    (320_000, "0.32"),
    (640_000, "0.64"),
    (1_280_000, "1.28"),
    (2_560_000, "2.56"),
    (5_120_000, "5.12"),
    (10_240_000, "10.24"),
    (20_480_000, "20.48"),
    (40_960_000, "40.96"),
    (81_920_000, "81.92"),
    (300_000_000, "300"),
];

fn numbered(names: &[std::sync::Arc<str>]) -> impl Iterator<Item = (Series, &str)> {
    // There are fewer than 2^32 names: the registry's bound.
    names.iter().enumerate().map(|(index, name)| (Series(index as u32), &**name))
}

const COUNTER: &str = "counter";
const GAUGE: &str = "gauge";

struct Page(String);

impl Page {
    /// Tokens of every kind, for each value of `label`.
    fn tokens<'a>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        rows: impl Iterator<Item = (&'a str, &'a Booked)>,
    ) {
        self.head(name, COUNTER, help);
        for (value, booked) in rows {
            for (kind, count) in kinds(booked) {
                self.line(name, &[(label, value), ("kind", kind)], count);
            }
        }
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        self.0.push_str(name);
        for (index, (label, text)) in labels.iter().enumerate() {
            self.0.push(if index == 0 { '{' } else { ',' });
            self.0.push_str(label);
            self.0.push_str("=\"");
            for c in text.chars() {
                match c {
                    '\\' => self.0.push_str("\\\\"),
                    '"' => self.0.push_str("\\\""),
                    '\n' => self.0.push_str("\\n"),
                    c => self.0.push(c),
                }
            }
            self.0.push('"');
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    fn histogram<'a>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        rows: impl Iterator<Item = (&'a str, Option<&'a Times<u64>>)>,
        bounds: &[(u64, &str)],
    ) {
        self.head(name, "histogram", help);
        let micros: Vec<u64> = bounds.iter().map(|(us, _)| *us).collect();
        let (bucket, sum) = (format!("{name}_bucket"), format!("{name}_sum"));
        let count_name = format!("{name}_count");
        let mut counts = vec![0; bounds.len()];
        for (value, times) in rows {
            counts.fill(0);
            if let Some(times) = times {
                times.cumulative(&micros, &mut counts);
            }
            for ((_, le), count) in bounds.iter().zip(&counts) {
                self.line(&bucket, &[(label, value), ("le", le)], count);
            }
            let count = times.map_or(0, Times::count);
            self.line(&bucket, &[(label, value), ("le", "+Inf")], count);
            let seconds = times.map_or(0.0, |times| times.sum().as_secs_f64());
            self.line(&sum, &[(label, value)], seconds);
            self.line(&count_name, &[(label, value)], count);
        }
    }
}

/// One tenant of `GET /usage`.
pub fn usage_json(out: &mut String, tenant: &str, row: Option<&TokenRow>) {
    out.push_str("{\"tenant\":");
    json_string(out, tenant, usize::MAX);
    for (field, value) in usage::fields(&spent(row)) {
        let _ = write!(out, ",\"{field}\":{value}");
    }
    out.push('}');
}

/// The line above those of [`usage_csv`].
pub fn usage_csv_head() -> String {
    let fields = usage::fields(&Spend::default()).map(|(field, _)| field);
    format!("tenant,{}\n", fields.join(","))
}

/// Appends a tenant's line under [`usage_csv_head`].
pub fn usage_csv(out: &mut String, tenant: &str, row: Option<&TokenRow>) {
    let values = usage::fields(&spent(row)).map(|(_, value)| value);
    // RFC 4180: quoted, with quotes doubled.
    let _ = writeln!(out, "\"{}\",{}", tenant.replace('"', "\"\""), values.join(","));
}

fn spent(row: Option<&TokenRow>) -> Spend {
    row.map_or(Spend::default(), |row| Spend { requests: row.requests, booked: row.booked })
}

/// Billionths of a dollar as dollars, exactly: `0.0045`.
pub fn dollars(nano: u64) -> String {
    let mut out = format!("{}.{:09}", nano / 1_000_000_000, nano % 1_000_000_000);
    out.truncate(out.trim_end_matches('0').trim_end_matches('.').len());
    out
}

/// Appends `text` as a JSON string of at most `chars_max` characters before escaping. Beside what
/// JSON demands, everything that moves a terminal's cursor or turns text around is escaped, so
/// that a line of a log is what it seems.
pub fn json_string(out: &mut String, text: &str, chars_max: usize) {
    out.push('"');
    for (index, c) in text.chars().enumerate() {
        if index == chars_max {
            out.push('…');
            break;
        }
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\0'..='\u{1f}'
            | '\u{7f}'..='\u{9f}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// Appends `2026-03-01T12:34:56.789Z`.
pub fn time_string(out: &mut String, unix_ms: u64) {
    let (seconds, ms) = (unix_ms / 1_000, unix_ms % 1_000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    let _ = write!(out, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z");
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};
    use std::time::Duration;

    use super::*;
    use crate::meter::Meter;
    use crate::pure::board::{Kind, Registry};
    use crate::pure::units::Instant;

    fn registry() -> Registry {
        let mut registry = Registry::new();
        for name in ["u1", "u2"] {
            registry.backend(name).expect("room");
        }
        registry.tenant("a").expect("room");
        for (kind, name) in
            [(Kind::Model, "模型"), (Kind::Route, "route-1"), (Kind::Route, "we\"ird\\\n")]
        {
            registry.series(kind, name).expect("room");
        }
        registry
    }

    fn page(ledger: &Ledger, registry: &Registry) -> String {
        render(&Facts {
            ledger,
            catalog: &Catalog::of(registry),
            totals: registry.totals(),
            shards: &[(ShardId(0), "epoll"), (ShardId(1), "epoll")],
            ready: true,
            plan_digest: 0xAB,
            reloads_in_force: 0,
            reloads_refused: 0,
            panics: 0,
            issuers: Vec::new(),
            budgets: vec![(Arc::from("a"), 0.25)],
            fleet: Some((true, 3)),
            state_commits: 0,
            state_failures: 0,
            records_unwritten: 0,
            exported: ["a", "b", "c", "d", "e"].map(|sink| (sink, "sent", 0)),
            events_lost: 0,
            process: Process::default(),
        })
    }

    /// Series to value; checks the form of every line on the way.
    fn parse(page: &str) -> HashMap<String, f64> {
        let mut typed = HashSet::new();
        let mut series = HashMap::new();
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').expect("a kind");
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                assert!(typed.insert(name.to_owned()), "{name} is declared twice");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            } else if !line.starts_with("# HELP ") {
                let (labelled, value) = line.rsplit_once(' ').expect("a value");
                let name = labelled.split('{').next().expect("a name");
                let stem = ["_bucket", "_sum", "_count"].iter().find_map(|s| name.strip_suffix(s));
                assert!(typed.contains(name) || typed.contains(stem.unwrap_or(name)), "{line}");
                let value = value.parse().expect("a number");
                assert!(series.insert(labelled.to_owned(), value).is_none(), "twice: {line}");
            }
        }
        series
    }

    #[test]
    fn every_known_name_is_there_from_the_start_with_nothing() {
        let registry = registry();
        let series = parse(&page(&Ledger::default(), &registry));
        for name in [
            "forebay_requests_total{route=\"route-1\",status=\"200\"}",
            "forebay_requests_total{route=\"other\",status=\"200\"}",
            "forebay_requests_total{route=\"we\\\"ird\\\\\\n\",status=\"200\"}",
            "forebay_requests_in_flight",
            "forebay_backend_in_flight{backend=\"u1\"}",
            "forebay_tenant_concurrency{tenant=\"a\"}",
            "forebay_reserved_tokens{tenant=\"a\"}",
            "forebay_upstream_failures_total{backend=\"u2\",reason=\"in_stream_error\"}",
            "forebay_client_aborts_total{route=\"route-1\"}",
            "forebay_tenant_tokens_total{tenant=\"a\",kind=\"estimated\"}",
            "forebay_tokens_total{model=\"模型\",kind=\"prompt\"}",
            "forebay_time_to_first_token_seconds_count{route=\"route-1\"}",
            "forebay_inter_token_seconds_bucket{route=\"other\",le=\"0.01\"}",
            "forebay_request_duration_seconds_bucket{route=\"other\",le=\"+Inf\"}",
            "forebay_connections",
            "forebay_buffered_bytes",
            "forebay_access_log_dropped_total",
            "forebay_panics_total",
            "forebay_config_reloads_total{result=\"refused\"}",
        ] {
            assert_eq!(series.get(name), Some(&0.0), "{name}");
        }
        assert_eq!(series["forebay_driver_info{driver=\"epoll\",shard=\"1\"}"], 1.0);
    }

    #[test]
    fn strangers_make_no_series_but_statuses() {
        let registry = registry();
        let before = parse(&page(&Ledger::default(), &registry)).len();
        let (mut meter, link) = Meter::linked(ShardId(0), None);
        let mut rng = crate::pure::units::Rng::seeded(3);
        for status in 0..2_000 {
            let done = crate::meter::Done {
                at: Instant::ZERO,
                request_id: crate::meter::RequestId::new(b""),
                tenant: Series(0),
                key: Series(0),
                route: Series(0),
                model: Series(0),
                backend: Series(0),
                status,
                streamed: true,
                how: crate::meter::Ending::Refused,
                path: crate::pure::dialect::Endpoint::Other,
                attempts: 0,
                bytes_in: 1,
                bytes_out: 1,
                queue: None,
                ttft: None,
                duration: Duration::from_micros(rng.below(1_000_000_000)),
                usage: Booked::default(),
            };
            meter.done(&done);
            meter.ttft(Series(0), Series(0), done.duration);
        }
        meter.tick(Instant::ZERO);
        let mut ledger = Ledger::default();
        ledger.fold(&[link]);
        let text = page(&ledger, &registry);
        let series = parse(&text);
        // One for each known status but 200, which was there, and one for all others.
        assert_eq!(series.len() - before, STATUSES.len());
        let count = |name: &str| series[&format!("forebay_request_duration_seconds_{name}")];
        assert_eq!(count("count{route=\"other\"}"), 2_000.0);
        assert_eq!(count("bucket{route=\"other\",le=\"+Inf\"}"), 2_000.0);
        let mut last = 0.0;
        for (_, le) in DURATION {
            let now = count(&format!("bucket{{route=\"other\",le=\"{le}\"}}"));
            assert!(now >= last, "{le}");
            last = now;
        }
        assert!(last > 0.0 && last < 2_000.0);
    }

    #[test]
    fn bounds_are_what_they_say() {
        for bounds in [TTFT, GAP, DURATION] {
            assert!(bounds.is_sorted());
            for (us, le) in bounds {
                let seconds: f64 = le.parse().expect("a number");
                assert_eq!((seconds * 1e6).round() as u64, *us, "{le}");
            }
        }
    }

    #[test]
    fn any_text_survives_as_a_json_string() {
        let everything: String = ('\0'..='\u{2fff}').chain(['😀', '\u{feff}']).collect();
        let mut out = String::new();
        json_string(&mut out, &everything, usize::MAX);
        assert_eq!(serde_json::from_str::<String>(&out).expect("JSON"), everything);
        assert!(!out.chars().any(|c| c.is_control() || ('\u{2028}'..='\u{202e}').contains(&c)));

        let mut cut = String::new();
        json_string(&mut cut, "äöü", 2);
        assert_eq!(cut, "\"äö…\"");
    }

    #[test]
    fn usage_is_json_with_the_sum() {
        let row = TokenRow {
            requests: 2,
            booked: Booked { prompt: 9, completion: 3, estimated: 1, ..Booked::default() },
            ..TokenRow::default()
        };
        let mut out = String::new();
        usage_json(&mut out, "t\"1", Some(&row));
        let usage: serde_json::Value = serde_json::from_str(&out).expect("JSON");
        assert_eq!(usage["tenant"], "t\"1");
        assert_eq!(usage["total_tokens"], 12);
        assert_eq!(usage["estimated_tokens"], 1);
        out.clear();
        usage_json(&mut out, "new", None);
        let usage: serde_json::Value = serde_json::from_str(&out).expect("JSON");
        assert_eq!(usage["total_tokens"], 0);
    }

    #[test]
    fn dates_agree_with_counting_days() {
        let (mut year, mut month, mut day) = (1970, 1, 1);
        for days in 0..160_000 {
            assert_eq!(civil(days), (year, month, day));
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let length = match month {
                2 => 28 + u64::from(leap),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            day += 1;
            if day > length {
                (month, day) = (month + 1, 1);
            }
            if month > 12 {
                (year, month) = (year + 1, 1);
            }
        }
        let mut out = String::new();
        time_string(&mut out, 1_772_368_496_789);
        assert_eq!(out, "2026-03-01T12:34:56.789Z");
    }
}
