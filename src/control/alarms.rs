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
#[derive(Default)]
pub struct Alarms(HashMap<(Series, u64), usize>);

impl Alarms {
    /// Says what has been passed since the last look.
    pub fn look(&mut self, plan: &Plan, windows: &Windows) {
        for tenant in &plan.tenants {
            let Some(scope) = &tenant.limits else { continue };
            let Some((spent, cap)) = scope.spent(windows).zip(scope.budget) else { continue };
            let passed = ALARMS.iter().filter(|&&share| spent >= share).count();
            let window = (tenant.series, windows.number(cap.per));
            if passed == self.0.get(&window).copied().unwrap_or(0) {
                continue;
            }
            // Windows that are over are forgotten with the first alarm of the next.
            self.0.retain(|&(series, number), _| series != window.0 || number == window.1);
            let before = self.0.insert(window, passed).unwrap_or(0);
            if passed > before {
                let share = (spent * 100.0).floor();
                let fields: [(&str, &dyn fmt::Display); 2] =
                    [("tenant", &tenant.name), ("per_cent", &share)];
                say(Level::Warn, "budget", &fields);
            }
        }
    }
}
