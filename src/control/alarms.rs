//! Budgets that are nearly spent, said once each, to the log and to the operator's webhook.

use std::collections::HashMap;
use std::fmt;

use crate::export::webhook::{Alert, Webhook};
use crate::meter::events::{Level, say};
use crate::pure::limit::{Cap, Per, Windows};
use crate::pure::plan::{Alerts, Plan};
use crate::pure::units::Series;

/// Shares of a budget at which its spending is said.
const ALARMS: [f64; 3] = [0.5, 0.8, 1.0];

/// Which alarms were raised, by tenant and the budget's window.
pub struct Alarms {
    raised: HashMap<(Series, u64), usize>,
    quiet: bool,
    webhook: Option<Webhook>,
}

impl Alarms {
    /// Before anybody is served: what has been passed by now was said by the process that passed it.
    pub fn new(plan: &Plan, windows: &Windows) -> Alarms {
        let mut alarms = Alarms { raised: HashMap::new(), quiet: true, webhook: None };
        alarms.look(plan, windows);
        alarms.quiet = false;
        alarms
    }

    /// Says what has been passed since the last look.
    pub fn look(&mut self, plan: &Plan, windows: &Windows) {
        for tenant in &plan.tenants {
            let Some(scope) = &tenant.limits else { continue };
            let Some((spent, cap)) = scope.spent(windows).zip(scope.budget) else { continue };
            let passed = ALARMS.iter().filter(|&&share| spent >= share).count();
            let window = (tenant.series, windows.number(cap.per));
            // What is reserved and comes back may pass a mark again and again.
            if passed <= self.raised.get(&window).copied().unwrap_or(0) {
                continue;
            }
            // Windows that are over are forgotten with the first alarm of the next.
            self.raised.retain(|&(series, number), _| series != window.0 || number == window.1);
            self.raised.insert(window, passed);
            if !self.quiet {
                let share = (spent * 100.0).floor();
                let fields: [(&str, &dyn fmt::Display); 2] =
                    [("tenant", &tenant.name), ("per_cent", &share)];
                say(Level::Warn, "budget", &fields);
                if let Some(alerts) = &plan.alerts {
                    self.alert(alerts, &tenant.name, share, cap);
                }
            }
        }
    }

    fn alert(&mut self, to: &Alerts, tenant: &str, per_cent: f64, cap: Cap) {
        // A file that is reloaded may be the first that wants it.
        let webhook = match &self.webhook {
            Some(webhook) => webhook,
            None => match Webhook::start() {
                Ok(webhook) => self.webhook.insert(webhook),
                Err(error) => {
                    say(Level::Error, "alert_dropped", &[("reason", &error)]);
                    return;
                }
            },
        };
        let per = match cap.per {
            Per::Day => "day",
            Per::Week => "week",
            Per::Month => "month",
            Per::Total => "total",
        };
        let text = match per_cent >= 100.0 {
            true => format!("Forebay: tenant {tenant} has spent its budget ({per})."),
            false => {
                format!("Forebay: tenant {tenant} has spent {per_cent} % of its budget ({per}).")
            }
        };
        // `text` is what chats show; the rest is for programs.
        let body = serde_json::json!({
            "text": text,
            "event": "budget",
            "tenant": tenant,
            "per_cent": per_cent,
            "per": per,
            "limit_usd": cap.nano.map(|nano| nano as f64 / 1e9),
            "limit_tokens": cap.tokens,
        });
        let url = to.webhook.expose().to_owned();
        webhook.send(Alert { url, ca: to.ca.clone(), body: body.to_string() });
    }
}
