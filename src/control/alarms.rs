//! Budgets that are nearly spent, said once each.

use std::collections::HashMap;
use std::fmt;

use crate::meter::events::{Level, say};
use crate::pure::limit::Windows;
use crate::pure::plan::Plan;
use crate::pure::units::Series;

/// Shares of a budget at which its spending is said.
const ALARMS: [f64; 3] = [0.5, 0.8, 1.0];

/// Which alarms were raised, by tenant and the budget's window.
pub struct Alarms {
    raised: HashMap<(Series, u64), usize>,
    quiet: bool,
}

impl Alarms {
    /// Before anybody is served: what has been passed by now was said by the process that passed it.
    pub fn new(plan: &Plan, windows: &Windows) -> Alarms {
        let mut alarms = Alarms { raised: HashMap::new(), quiet: true };
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
            }
        }
    }
}
