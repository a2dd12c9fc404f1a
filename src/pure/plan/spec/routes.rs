//! Routes, and who may use them: limits, tiers, tenants, keys.

use super::pools::tokenizer;
use super::{
    BudgetSpec, CanarySpec, KeySpec, Over, RouteSpec, ShadowSpec, TOKENS_MAX, TenantSpec, TierSpec,
    WEIGHT_MAX, by_member, fields_or_none, place, words,
};
use crate::pure::board::AMOUNT_MAX;
use crate::pure::limit::Per;
use crate::pure::plan::read::{Fields, Item, Named, Reader, shown};
use crate::pure::plan::terms::{
    Admission, Conditions, Headroom, Limits, Priority, Promote, Queue, Reserve, UnitSpec,
};
use crate::pure::plan::value;
use crate::pure::plan::{Match, Pattern, Retry, Strategy};

pub(super) fn route<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<RouteSpec> {
    by_member(r, "route", "name", item, |r, item| r.fields(item, route_fields))
}

fn route_fields<'a>(r: &mut Reader<'a>, f: &mut Fields<'a>) -> Option<RouteSpec> {
    let at =
        f.need(r, "name", "routes are told apart by name in logs and metrics", Reader::reference);
    let matches = f.get(r, "match", matching).unwrap_or_default();
    let pool = f.need(r, "pool", "the pool that serves this route", Reader::reference);
    let strategy = f.get(r, "strategy", |r, item| Some((strategy(r, item)?, item.pos())));
    let weights = f.get(r, "weights", |r, item| {
        let named = r.named(item);
        Some(
            named
                .into_iter()
                .filter_map(|(at, item)| Some((at, r.small(&item, 0, WEIGHT_MAX)?)))
                .collect::<Vec<_>>(),
        )
    });
    let sticky = f.get(r, "sticky", |r, item| {
        r.fields(item, |r, f| {
            f.need(r, "header", "as in `header: X-Session-ID`", Reader::header_name)
        })
    });
    let retry = f.get(r, "retry", |r, item| {
        r.fields(item, |r, f| {
            let attempts =
                f.need(r, "attempts", "tries after the first", |r, item| r.small(item, 0, 10));
            let budget = f.get(r, "budget", Reader::ratio);
            Some(Retry { attempts: attempts?, budget: budget.unwrap_or(0.2) })
        })
    });
    let heartbeat = f.get(r, "heartbeat", Reader::duration);
    let tokenizer = f.get(r, "tokenizer", tokenizer);
    let rate_limit = f.get(r, "rate_limit", limits);
    let queue = f.get(r, "queue", |r, item| {
        r.fields(item, |r, f| {
            let max = f.need(r, "max", "how many may wait", |r, item| r.small(item, 1, 10_000_000));
            let wait = f.need(r, "wait", "how long each may wait", Reader::duration);
            Some(Queue { max: max?, wait: wait? })
        })
    });
    let canary = f.get(r, "canary", canary);
    let shadow = f.get(r, "shadow", shadow);
    let units = f.get(r, "units", |r, item| Some(r.all(item, unit)));
    let admission = f.get(r, "admission", |r, item| {
        r.fields(item, |r, f| {
            let headroom = f.get(r, "headroom", |r, item| {
                r.choice(item, "headroom", &[("kv", Headroom::Kv), ("nvml", Headroom::Nvml)])
            });
            let reserve = f.get(r, "reserve", Reader::ratio);
            Some(Admission {
                headroom: headroom.unwrap_or(Headroom::Kv),
                reserve: reserve.unwrap_or(0.8),
            })
        })
    });
    Some(RouteSpec {
        at: at?,
        matches,
        pool: pool?,
        strategy,
        weights: weights.unwrap_or_default(),
        sticky,
        retry: retry.unwrap_or_default(),
        heartbeat,
        tokenizer,
        rate_limit,
        queue,
        canary,
        shadow,
        units: units.unwrap_or_default(),
        admission,
    })
}

fn matching<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Match> {
    r.fields(item, |r, f| {
        let models = f.get(r, "model", |r, item| Some(r.all(item, Reader::pattern)));
        let headers = f.get(r, "header", |r, item| {
            let named = r.named(item);
            Some(named.iter().filter_map(|(at, item)| header_match(r, at, item)).collect())
        });
        let paths = f.get(r, "path", |r, item| {
            Some(r.all(item, |r, item| {
                let pattern = r.pattern(item)?;
                if !pattern.as_str().starts_with(['/', '*']) {
                    let hint = "as in `/v1/files*`".to_owned();
                    r.wrong(item, format!("{} can match no path", shown(item)), Some(hint));
                }
                Some(pattern)
            }))
        });
        let tiers = f.get(r, "tier", words).unwrap_or_default();
        let profiles = f.get(r, "profile", words).unwrap_or_default();
        let compliance = f.get(r, "compliance", words).unwrap_or_default();
        let tokens = f.get(r, "prompt_tokens", |r, item| {
            r.fields(item, |r, f| {
                let min = f.get(r, "min", |r, item| r.integer(item, 0, TOKENS_MAX));
                let max = f.get(r, "max", |r, item| r.integer(item, 0, TOKENS_MAX));
                Some((min, max))
            })
        });
        let (prompt_tokens_min, prompt_tokens_max) = tokens.unwrap_or_default();
        Some(Match {
            models: models.unwrap_or_default(),
            headers: headers.unwrap_or_default(),
            paths: paths.unwrap_or_default(),
            conditions: Conditions {
                tiers,
                profiles,
                compliance,
                prompt_tokens_min,
                prompt_tokens_max,
            },
        })
    })
}

fn placed_pattern<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<(Pattern, Named)> {
    Some((r.pattern(item)?, place(item)))
}

fn header_match<'a>(
    r: &mut Reader<'a>,
    at: &Named,
    item: &Item<'a>,
) -> Option<(Box<str>, Vec<Pattern>)> {
    let name = match value::header_name(&at.name) {
        Ok(name) => name,
        Err(wrong) => {
            r.problem(at.pos, &at.path, wrong.message_for(&format!("`{}`", at.name)), wrong.hint);
            return None;
        }
    };
    Some((name, r.all(item, Reader::pattern)))
}

fn strategy<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Strategy> {
    let strategies = [
        ("weighted-round-robin", Strategy::WeightedRoundRobin),
        ("least-requests", Strategy::LeastRequests),
        ("weighted-split", Strategy::WeightedSplit),
        ("consistent-hash", Strategy::ConsistentHash),
        ("prefix", Strategy::Prefix),
        ("adaptive", Strategy::Adaptive),
        ("least-queued", Strategy::LeastQueued),
        ("least-latency", Strategy::LeastLatency),
        ("most-available", Strategy::MostAvailable),
        ("cost", Strategy::Cost),
        ("cost-optimized", Strategy::Cost),
    ];
    r.choice(item, "strategy", &strategies)
}

fn canary<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<CanarySpec> {
    r.fields(item, |r, f| {
        let candidate = f.need(r, "candidate", "the version that is tried", Reader::reference);
        let baseline = f.need(r, "baseline", "the version it is compared with", Reader::reference);
        let steps = f.need(r, "steps", "as in `steps: [{ weight: 5, for: 5m }]`", |r, item| {
            let steps = r.all(item, |r, item| {
                r.fields(item, |r, f| {
                    let weight = f.need(r, "weight", "per cent of the requests", |r, item| {
                        r.small(item, 0, 100)
                    });
                    let hold = f.get(r, "for", Reader::duration);
                    Some((weight?, hold))
                })
            });
            if steps.is_sorted_by(|a, b| a.0 < b.0) {
                Some(steps)
            } else {
                r.wrong(item, "the weights of the steps must rise".to_owned(), None);
                None
            }
        });
        let rollback = f.get(r, "rollback", |r, item| {
            r.fields(item, |r, f| {
                let error_rate = f.get(r, "error_rate", Reader::ratio);
                let p99_ratio = f.get(r, "p99_ratio", |r, item| r.parsed(item, value::factor));
                let min_requests =
                    f.get(r, "min_requests", |r, item| r.integer(item, 1, 1_000_000_000));
                Some((error_rate, p99_ratio, min_requests))
            })
        });
        let (error_rate, p99_ratio, min_requests) = rollback.unwrap_or_default();
        Some(CanarySpec {
            candidate: candidate?,
            baseline: baseline?,
            steps: steps?,
            error_rate,
            p99_ratio,
            min_requests,
        })
    })
}

fn shadow<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<ShadowSpec> {
    r.fields(item, |r, f| {
        let pool = f.need(r, "pool", "the pool that gets the copies", Reader::reference);
        let sample = f.get(r, "sample", Reader::ratio);
        let promote = f.get(r, "promote", |r, item| {
            r.fields(item, |r, f| {
                const HINT: &str =
                    "as in `promote: { consecutive: 1000, agree: 99.95%, within: 50ms }`";
                let consecutive =
                    f.need(r, "consecutive", HINT, |r, item| r.integer(item, 1, 1_000_000_000));
                let agree = f.need(r, "agree", HINT, Reader::ratio);
                let within = f.need(r, "within", HINT, Reader::duration);
                Some(Promote { consecutive: consecutive?, agree: agree?, within: within? })
            })
        });
        Some(ShadowSpec { pool: pool?, sample: sample.unwrap_or(1.0), promote })
    })
}

/// `prompt-filter: { words: words.txt }`: a map with the unit's name as its only key.
fn unit<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<UnitSpec> {
    r.fields(item, |r, f| {
        let filter = f.get(r, "prompt-filter", |r, item| {
            r.fields(item, |r, f| {
                let words = f.need(r, "words", "the file with the words", Reader::text);
                let when = f.get(r, "when", when).unwrap_or_default();
                Some(UnitSpec::PromptFilter { words: words?.into(), when })
            })
        });
        let redact = f.get(r, "redact", |r, item| {
            r.fields(item, |r, f| {
                let paths = f.get(r, "paths", |r, item| {
                    Some(r.all(item, |r, item| r.text(item).map(String::into_boxed_str)))
                });
                let kinds = f.need(r, "kinds", "as in `kinds: [phone, email]`", words);
                let when = f.get(r, "when", when).unwrap_or_default();
                Some(UnitSpec::Redact { paths: paths.unwrap_or_default(), kinds: kinds?, when })
            })
        });
        match (filter, redact) {
            (Some(unit), None) | (None, Some(unit)) => Some(unit),
            (Some(_), Some(_)) => {
                let message = "two units in one entry; their order would be unclear".to_owned();
                r.wrong(f.item(), message, Some("write one entry per unit".to_owned()));
                None
            }
            (None, None) => None,
        }
    })
}

fn when<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Vec<(Box<str>, Vec<Pattern>)>> {
    r.fields(item, |r, f| {
        f.need(r, "header", "as in `header: { X-Enable-PII-Scan: \"true\" }`", |r, item| {
            let named = r.named(item);
            Some(named.iter().filter_map(|(at, item)| header_match(r, at, item)).collect())
        })
    })
}

pub(super) fn limits<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Limits> {
    r.fields(item, |r, f| Some(limit_fields(r, f)))
}

fn limit_fields<'a>(r: &mut Reader<'a>, f: &mut Fields<'a>) -> Limits {
    // Above this a limit is none, and a window times it would leave 128 bits.
    const LIMIT_MAX: u64 = 1 << 50;
    let limit = |r: &mut Reader<'a>, item: &Item<'a>| r.integer(item, 1, LIMIT_MAX);
    Limits {
        rpm: f.get(r, "rpm", limit),
        tpm: f.get(r, "tpm", limit),
        itpm: f.get(r, "itpm", limit),
        otpm: f.get(r, "otpm", limit),
        tpd: f.get(r, "tpd", limit),
        concurrency: f.get(r, "concurrency", |r, item| r.small(item, 1, 100_000_000)),
        burst: f.get(r, "burst", limit),
        strict: f.get(r, "strict", Reader::flag),
        limit_wait: f.get(r, "limit_wait", Reader::duration_or_zero),
    }
}

pub(super) fn tier<'a>(r: &mut Reader<'a>, at: Named, item: &Item<'a>) -> Option<TierSpec> {
    fields_or_none(r, item, |r, f| {
        let limits = limit_fields(r, f);
        let priority = f.get(r, "priority", |r, item| {
            let priorities =
                [("low", Priority::Low), ("normal", Priority::Normal), ("high", Priority::High)];
            r.choice(item, "priority", &priorities)
        });
        Some(TierSpec { at, limits, priority: priority.unwrap_or_default() })
    })
}

pub(super) fn tenant<'a>(r: &mut Reader<'a>, at: Named, item: &Item<'a>) -> Option<TenantSpec> {
    fields_or_none(r, item, |r, f| {
        let tier = f.get(r, "tier", Reader::reference);
        let models = f.get(r, "models", |r, item| {
            let models = r.all(item, placed_pattern);
            if models.is_empty() {
                let hint = "leave `models` out to allow every model".to_owned();
                r.wrong(item, "an empty list would allow no model".to_owned(), Some(hint));
            }
            Some(models)
        });
        let deny_models = f.get(r, "deny_models", |r, item| Some(r.all(item, Reader::pattern)));
        let regions = f.get(r, "regions", words);
        let reserve = f.get(r, "reserve", |r, item| {
            let reserves = [
                ("p50", Reserve::P50),
                ("p95", Reserve::P95),
                ("max", Reserve::Max),
                ("none", Reserve::None),
            ];
            r.choice(item, "way to reserve", &reserves)
        });
        let budget = f.get(r, "budget", budget);
        let rate_limit = f.get(r, "rate_limit", limits);
        let model_limits = f.get(r, "model_limits", |r, item| {
            let named = r.named(item);
            let read = |(at, item)| Some((at, limits(r, &item)?));
            Some(named.into_iter().filter_map(read).collect())
        });
        Some(TenantSpec {
            at,
            tier,
            rate_limit,
            model_limits: model_limits.unwrap_or_default(),
            models: models.unwrap_or_default(),
            deny_models: deny_models.unwrap_or_default(),
            regions: regions.unwrap_or_default(),
            reserve: reserve.unwrap_or_default(),
            budget,
        })
    })
}

fn budget<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<BudgetSpec> {
    #[derive(Clone, Copy)]
    enum Kind {
        Refuse,
        Downgrade,
        ReadOnly,
    }
    r.fields(item, |r, f| {
        let tokens = f.get(r, "tokens", |r, item| r.integer(item, 1, AMOUNT_MAX));
        let usd = match f.has("usd") || tokens.is_none() {
            true => f.need(r, "usd", "as in `usd: 5000`, or `tokens: 1_000_000`", Reader::usd),
            false => None,
        };
        let per = f.need(r, "per", "`day`, `week`, `month` or `total`", |r, item| {
            let windows = [
                ("day", Per::Day),
                ("week", Per::Week),
                ("month", Per::Month),
                ("total", Per::Total),
            ];
            r.choice(item, "window", &windows)
        });
        let over = f.get(r, "over", |r, item| {
            let kinds = [
                ("refuse", Kind::Refuse),
                ("downgrade", Kind::Downgrade),
                ("read-only", Kind::ReadOnly),
            ];
            r.choice(item, "way to go over budget", &kinds)
        });
        let over = match over.unwrap_or(Kind::Refuse) {
            Kind::Downgrade => {
                let hint = "the model to use when the budget is spent";
                Over::Downgrade(f.need(r, "to", hint, Reader::reference)?)
            }
            kind => {
                if f.has("to") {
                    let message = "`to` goes with `over: downgrade` only".to_owned();
                    f.get(r, "to", |r, item| {
                        r.wrong(item, message, None);
                        None::<()>
                    });
                }
                match kind {
                    Kind::ReadOnly => Over::ReadOnly,
                    Kind::Refuse | Kind::Downgrade => Over::Refuse,
                }
            }
        };
        let soft = matches!(over, Over::Downgrade(_));
        let cut = f.get(r, "cut", |r, item| {
            let cut = r.flag(item)?;
            if cut && soft {
                let message = "a budget that turns to a cheaper model does not cut".to_owned();
                r.wrong(item, message, Some("leave `cut` out, or `refuse` over it".to_owned()));
            }
            Some(cut)
        });
        if usd.is_none() && tokens.is_none() {
            return None;
        }
        Some(BudgetSpec { usd, tokens, per: per?, over, cut: cut.unwrap_or(false) })
    })
}

pub(super) fn key<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<KeySpec> {
    by_member(r, "key", "id", item, |r, item| {
        r.fields(item, |r, f| {
            let at = f.need(r, "id", "keys are told apart by id in logs", Reader::reference);
            let tenant = f.need(r, "tenant", "the tenant who pays", Reader::reference);
            let sha256 = f.need(r, "sha256", "`printf %s \"$KEY\" | sha256sum`", |r, item| {
                r.parsed(item, value::sha256)
            });
            let rate_limit = f.get(r, "rate_limit", limits);
            let models = f.get(r, "models", |r, item| Some(r.all(item, Reader::pattern)));
            let deny_models = f.get(r, "deny_models", |r, item| Some(r.all(item, Reader::pattern)));
            Some(KeySpec {
                at: at?,
                tenant: tenant?,
                sha256: sha256?,
                rate_limit,
                models: models.unwrap_or_default(),
                deny_models: deny_models.unwrap_or_default(),
            })
        })
    })
}
