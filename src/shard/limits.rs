//! What a request holds of its limits, from its admission to its settlement, and what the client is
//! told of them.

use std::time::Duration;

use super::commits::{self, Kept};
use super::{Call, Stop, Trip};
use crate::client::Client;
use crate::meter::{Booked, Ending};
use crate::pure::answer::{Refusal, push_decimal};
use crate::pure::board::{Dry, ScopeKind};
use crate::pure::fields::{Name, Own};
use crate::pure::limit::{Amount, Denied, Grant, Quota, Quotas, Scopes, What};
use crate::pure::plan::{Plan, Price, Reserve, Unwritten};
use crate::pure::units::{Instant, KeyId, ModelId, RouteId, TenantId};
use crate::rt;

/// Whose request it is, and what it asks for: which limits it stands under.
#[derive(Clone, Copy, Debug, Default)]
pub struct Who {
    pub key: Option<KeyId>,
    pub tenant: Option<TenantId>,
    /// That a token names, as an index into the plan's tiers.
    pub tier: Option<usize>,
    pub model: Option<ModelId>,
    pub route: RouteId,
}

impl Who {
    fn scopes<'p>(&self, plan: &'p Plan) -> Scopes<'p> {
        plan.scopes(self.key, self.tenant, self.tier, self.model, self.route)
    }

    /// Whether it may use a model under the name it asked for; on a gateway without keys all may.
    pub fn may_use(&self, plan: &Plan, asked: &str) -> bool {
        match (self.key, self.tenant) {
            (Some(key), _) => plan.key_may_use(key, asked),
            (None, Some(tenant)) => plan.may_use(tenant, asked),
            (None, None) => true,
        }
    }

    fn price(&self, plan: &Plan) -> Option<Price> {
        self.model.and_then(|model| plan.models[model.index()].price)
    }

    /// What `usage` costs, in billionths of a dollar.
    pub fn cost(&self, plan: &Plan, usage: &Booked) -> u64 {
        let price = self.price(plan);
        price.map_or(0, |price| price.of(usage.prompt, usage.cached, usage.completion))
    }
}

/// An admitted request's hold on its limits.
pub struct Stand {
    who: Who,
    grant: Grant,
    /// How many answers it asked for.
    answers: u64,
    /// Some of it is counted over a day or longer.
    kept: bool,
    /// A budget cuts the answer when it is spent.
    cut: bool,
}

/// Takes what the request needs of every limit, waiting where a limit says that it may.
pub async fn reserve(trip: &mut Trip, client: &mut Client, call: &Call) -> Result<(), Stop> {
    let plan = trip.plan.clone();
    let who = Who { route: call.route, model: call.model, ..trip.who };
    trip.who = who;
    let scopes = who.scopes(&plan);
    if scopes.is_empty() {
        return Ok(());
    }
    let kept = scopes.count_windows();
    if plan.unwritten == Unwritten::Refuse && kept && trip.shard.shared.commits.is_failing() {
        return Err(not_written().into());
    }
    let ask = ask(trip, call, &plan, &scopes);
    let began = rt::now();
    let (deadline, asked) = (began + scopes.wait(), began + ASKED_MAX);
    loop {
        let windows = **trip.shard.shared.windows.load();
        let now = rt::now();
        let shard = trip.shard.clone();
        let taken = scopes.take(ask, now, &windows, &mut shard.accounts.borrow_mut());
        match taken {
            Ok(grant) => {
                trip.quotas = QuotaFields::new(&scopes.quotas(now, &shard.accounts.borrow()));
                if let Some(tenant) = who.tenant {
                    plan.tenants[tenant.index()].row.reserved_tokens.add(ask.tokens());
                }
                let cut = scopes.cut();
                trip.stand = Some(Stand { who, grant, answers: call.answers, kept, cut });
                break;
            }
            Err(denied) if denied.what == What::Concurrency && now < deadline => {
                super::park(trip, client, deadline).await?;
            }
            Err(denied) if denied.dry == Dry::Asked && now < asked => {
                super::park(trip, client, now + ASK_AGAIN).await?;
            }
            Err(denied) => {
                trip.quotas = QuotaFields::new(&scopes.quotas(now, &shard.accounts.borrow()));
                return Err(refusal(&denied, ask).into());
            }
        }
    }
    if !trip.waits_for_store() {
        return Ok(());
    }
    match commits::kept(&trip.shard, client, plan.server.half_close).await {
        Kept::Gone => Err(Stop::Gone),
        Kept::Failing if plan.unwritten == Unwritten::Refuse => Err(not_written().into()),
        Kept::OnDisk | Kept::Failing => Ok(()),
    }
}

fn not_written() -> Refusal {
    let text = "What this request would use cannot be written down at the moment.";
    Refusal::busy("state_not_written", text, Duration::from_secs(5))
}

/// How long the fleet has to answer, and how often a request looks whether it has.
const ASKED_MAX: Duration = Duration::from_millis(250);
const ASK_AGAIN: Duration = Duration::from_millis(2);

/// What is reserved before anything is known: the prompt as estimated, and the answer as long as
/// most have been, or as long as it may be.
fn ask(trip: &Trip, call: &Call, plan: &Plan, scopes: &Scopes<'_>) -> Amount {
    let who = &trip.who;
    let tenant = who.tenant.map(|tenant| &plan.tenants[tenant.index()]);
    let reserve = tenant.map(|tenant| tenant.reserve).unwrap_or_default();
    let model = who.model.map(|model| &plan.models[model.index()]);
    let most = [call.max_tokens, model.and_then(|model| model.max_output)];
    let most = most.into_iter().flatten().min();
    let usual = |share: f64| {
        let history = trip.shard.history.borrow();
        let past = history.quantile(trip.done.tenant, trip.done.model, share);
        let usual = past.unwrap_or(trip.prompt + trip.prompt / 2).max(1);
        most.map_or(usual, |most| usual.min(most))
    };
    let one = match reserve {
        Reserve::None => return Amount::default(),
        _ if !trip.done.path.generates() => 0,
        Reserve::P50 => usual(0.5),
        Reserve::P95 => usual(0.95),
        Reserve::Max => most.unwrap_or_else(|| usual(1.0)),
    };
    let mut output = one.saturating_mul(call.answers);
    let room = scopes.most_tokens();
    if reserve != Reserve::Max && trip.prompt < room {
        // A guess must not make impossible what may turn out to be short.
        output = output.min(room - trip.prompt);
    }
    let nano = who.price(plan).map_or(0, |price| price.of(trip.prompt, 0, output));
    Amount { input: trip.prompt, output, nano }
}

impl Stand {
    /// Whether some of it is counted over a day or longer, which the store keeps.
    pub fn is_kept(&self) -> bool {
        self.kept
    }

    /// How many tokens of an answer are paid for, where a budget cuts one that is longer.
    pub fn paid(&self) -> Option<u64> {
        self.cut.then(|| self.grant.reserved().output)
    }

    /// Pays for some more of an answer that has used up what was paid for; how many tokens are now.
    /// `None` if a budget that cuts is spent.
    pub fn pay_on(&mut self, plan: &Plan, generated: u64, now: Instant) -> Option<u64> {
        let paid = self.grant.reserved().output.saturating_add(self.grant.extra().output);
        let output = generated.saturating_sub(paid).max(PAY_ON);
        let nano = self.who.price(plan).map_or(0, |price| price.of(0, 0, output));
        let more = Amount { input: 0, output, nano };
        let scopes = self.who.scopes(plan);
        scopes.extend(&mut self.grant, more, now).then(|| paid.saturating_add(output))
    }

    /// Charges what the request has used; called once, whichever way it ended.
    pub fn settle(self, trip: &Trip, now: Instant) {
        let plan = &trip.plan;
        let (who, done) = (&self.who, &trip.done);
        let used = match done.how {
            // Nobody knows what a panic left behind.
            Ending::Panicked => self.grant.reserved(),
            _ => Amount {
                input: done.usage.prompt,
                output: done.usage.completion,
                nano: done.usage.nano,
            },
        };
        let scopes = who.scopes(plan);
        let accounts = &mut trip.shard.accounts.borrow_mut();
        // What never reached a backend costs nothing, not even a request.
        match done.how == Ending::Refused && done.attempts == 0 {
            true => scopes.cancel(&self.grant, now, accounts),
            false => scopes.settle(&self.grant, used, now, accounts),
        }
        if let Some(tenant) = who.tenant {
            let row = &plan.tenants[tenant.index()].row;
            row.reserved_tokens.sub(self.grant.reserved().tokens());
        }
        if done.how == Ending::Whole && used.output > 0 {
            // The history is of single answers.
            let each = used.output.div_ceil(self.answers);
            trip.shard.history.borrow_mut().learn(done.tenant, done.model, each);
        }
    }
}

/// Tokens of a long answer that are paid for at a time: so many may a budget have left when it cuts.
const PAY_ON: u64 = 32;

/// What a client is told whose answer is cut.
pub fn spent() -> Refusal {
    no_quota("The budget of your account is spent: the answer ends here.".to_owned())
}

fn no_quota(text: String) -> Refusal {
    Refusal { kind: "insufficient_quota", ..Refusal::invalid(429, text).code("insufficient_quota") }
}

// ---- what clients are told

/// `x-ratelimit-*`, as OpenAI writes them.
#[derive(Default)]
pub struct QuotaFields {
    /// Values one after the other; six ends.
    text: Vec<u8>,
    ends: [u8; 6],
}

static NAMES: [Name; 6] = [
    Name::new("x-ratelimit-limit-requests"),
    Name::new("x-ratelimit-remaining-requests"),
    Name::new("x-ratelimit-reset-requests"),
    Name::new("x-ratelimit-limit-tokens"),
    Name::new("x-ratelimit-remaining-tokens"),
    Name::new("x-ratelimit-reset-tokens"),
];

impl QuotaFields {
    fn new(quotas: &Quotas) -> QuotaFields {
        let mut fields = QuotaFields { text: Vec::with_capacity(64), ends: [0; 6] };
        for (index, quota) in [quotas.requests, quotas.tokens].into_iter().enumerate() {
            let Some(Quota { limit, left, reset }) = quota else { continue };
            for (value, place) in [(Some(limit), 0), (Some(left), 1), (None, 2)] {
                match value {
                    Some(value) => push_decimal(&mut fields.text, value),
                    None => push_duration(&mut fields.text, reset),
                }
                // Six numbers of at most twenty digits or so.
                fields.ends[3 * index + place] = fields.text.len() as u8;
            }
        }
        fields
    }

    /// Says the limits that are in force.
    pub fn say<'a>(&'a self, own: &mut Own<'a>) {
        let mut start = 0;
        for (name, &end) in NAMES.iter().zip(&self.ends) {
            let end = usize::from(end);
            if end > start {
                own.say(name, &self.text[start..end]);
                start = end;
            }
        }
    }
}

/// As Go and OpenAI write them: `6m0s`, `1.5s`, `20ms`. Rounded up to milliseconds.
fn push_duration(out: &mut Vec<u8>, span: Duration) {
    // On every answer: no formatting machinery, and no 128 bits of what fits 64 for centuries.
    let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
    let millis = nanos.div_ceil(1_000_000);
    let (seconds, millis) = (millis / 1_000, millis % 1_000);
    if seconds == 0 {
        push_decimal(out, millis);
        return out.extend_from_slice(b"ms");
    }
    let (hours, minutes) = (seconds / 3_600, seconds / 60 % 60);
    if hours > 0 {
        push_decimal(out, hours);
        out.push(b'h');
    }
    if hours > 0 || minutes > 0 {
        push_decimal(out, minutes);
        out.push(b'm');
    }
    push_decimal(out, seconds % 60);
    if millis > 0 {
        out.push(b'.');
        // Three digits, less the zeros at their end.
        let mut rest = millis;
        let mut unit = 100;
        while rest > 0 {
            push_decimal(out, rest / unit);
            rest %= unit;
            unit /= 10;
        }
    }
    out.push(b's');
}

fn refusal(denied: &Denied, ask: Amount) -> Refusal {
    let whose = match denied.whose {
        ScopeKind::Key => "this key",
        ScopeKind::TenantModel => "your use of this model",
        ScopeKind::Tenant | ScopeKind::TenantTier => "your account",
        ScopeKind::Route | ScopeKind::Model => "this model",
        ScopeKind::Global => "the gateway",
    };
    let limit = denied.limit;
    if denied.what == What::Budget {
        return no_quota(format!("The budget of {whose} is spent."));
    }
    let (kind, of) = match denied.what {
        What::Requests => ("requests", "requests per minute"),
        What::Tokens => ("tokens", "tokens per minute"),
        What::Input => ("tokens", "prompt tokens per minute"),
        What::Output => ("tokens", "generated tokens per minute"),
        What::Day => ("tokens", "tokens per day"),
        What::Concurrency | What::Budget => ("requests", "requests at a time"),
    };
    match denied.dry {
        Dry::Never => {
            let text = format!(
                "This request needs about {} tokens, and the limit of {whose} is {limit} {of}: it \
                 can never fit. Shorten the prompt or lower `max_tokens`.",
                ask.tokens()
            );
            Refusal::invalid(400, text).code("request_too_large")
        }
        Dry::For(_) | Dry::Asked => {
            let wait = match denied.dry {
                Dry::For(wait) => wait,
                _ => Duration::from_secs(1),
            };
            let mut after = Vec::new();
            push_duration(&mut after, wait);
            let after = String::from_utf8_lossy(&after);
            let text = format!(
                "Rate limit of {whose} reached: {limit} {of}. Please try again in {after}."
            );
            Refusal {
                kind,
                retry_after: Some(wait),
                should_retry: true,
                ..Refusal::invalid(429, text).code("rate_limit_exceeded")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pure::fields::copy_own;

    #[test]
    fn durations_are_written_as_openai_writes_them() {
        for (millis, text) in [
            (0, "0ms"),
            (20, "20ms"),
            (1_000, "1s"),
            (1_500, "1.5s"),
            (1_050, "1.05s"),
            (1_999, "1.999s"),
            (3_600_000, "1h0m0s"),
            (59_100, "59.1s"),
            (61_001, "1m1.001s"),
            (360_000, "6m0s"),
            (10_800_000, "3h0m0s"),
        ] {
            let mut out = Vec::new();
            push_duration(&mut out, Duration::from_millis(millis));
            assert_eq!(String::from_utf8(out).expect("ASCII"), text);
        }
        let mut out = Vec::new();
        push_duration(&mut out, Duration::from_nanos(1));
        assert_eq!(out, b"1ms");
    }

    #[test]
    fn fields_are_there_for_the_limits_that_are() {
        let quota = |limit, left, reset| Quota { limit, left, reset: Duration::from_secs(reset) };
        let both = Quotas { requests: Some(quota(60, 59, 1)), tokens: Some(quota(u64::MAX, 0, 7)) };
        let said = |fields: &QuotaFields| {
            let mut own = Own::default();
            fields.say(&mut own);
            let mut out = Vec::new();
            copy_own(&mut out, &own);
            String::from_utf8(out).expect("ASCII")
        };
        let of_tokens = "x-ratelimit-limit-tokens: 18446744073709551615\r\n\
            x-ratelimit-remaining-tokens: 0\r\nx-ratelimit-reset-tokens: 7s\r\n";
        let of_requests = "x-ratelimit-limit-requests: 60\r\n\
            x-ratelimit-remaining-requests: 59\r\nx-ratelimit-reset-requests: 1s\r\n";
        assert_eq!(said(&QuotaFields::new(&both)), [of_requests, of_tokens].concat());
        let tokens = QuotaFields::new(&Quotas { requests: None, ..both });
        assert_eq!(said(&tokens), of_tokens);
        assert_eq!(said(&QuotaFields::default()), "");
    }
}
