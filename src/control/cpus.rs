//! Which CPU carries which shard.
//!
//! `shards: auto` takes every CPU this process may run on, less one for control. With four or
//! fewer, every CPU carries a shard and control floats, because a thread that mostly sleeps would
//! waste a quarter of the machine. Under a CPU quota (cgroup `cpu.max`) there are as many shards
//! as the quota pays for, and none is pinned: the quota does not say which CPUs are ours, and
//! every container beside us would choose the same ones.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::pure::plan::Shards;

/// What the kernel lets us use.
#[derive(Clone, Debug, PartialEq)]
pub struct Allowed {
    /// Ascending; never empty.
    pub cpus: Vec<usize>,
    /// CPUs' worth of time; `None` without a quota.
    pub quota: Option<f64>,
}

impl Allowed {
    /// Of this process: its affinity mask (which the cpuset bounds) and its cgroup's quota.
    pub fn here() -> Allowed {
        let mut cpus = Vec::new();
        if let Ok(set) = rustix::thread::sched_getaffinity(None) {
            cpus.extend((0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)));
        }
        if cpus.is_empty() {
            // More CPUs than a fixed-size mask holds, or no permission to ask: count them.
            cpus.extend(0..std::thread::available_parallelism().map_or(1, usize::from));
        }
        let quota = quota(Path::new("/sys/fs/cgroup"), Path::new("/proc/self/cgroup"));
        Allowed { cpus, quota }
    }

    fn bound_by_quota(&self) -> bool {
        self.quota.is_some_and(|quota| quota < self.cpus.len() as f64)
    }
}

/// The CPU of each shard, in order; `None` floats.
///
/// # Errors
/// The file names a CPU that this process may not use.
pub fn layout(
    shards: &Shards,
    gpu_cpu: Option<usize>,
    allowed: &Allowed,
    pin: bool,
) -> Result<Vec<Option<usize>>, NotAllowed> {
    let free: Vec<usize> =
        allowed.cpus.iter().copied().filter(|&cpu| Some(cpu) != gpu_cpu).collect();
    let count = match shards {
        Shards::Cpus(list) => {
            if let Some(&cpu) = list.iter().find(|cpu| !allowed.cpus.contains(cpu)) {
                return Err(NotAllowed { cpu, allowed: allowed.cpus.clone() });
            }
            return Ok(list.iter().map(|&cpu| pin.then_some(cpu)).collect());
        }
        Shards::Count(count) => (*count).max(1) as usize,
        Shards::Auto if allowed.bound_by_quota() => {
            let quota = allowed.quota.unwrap_or(1.0);
            // Between 1 and the number of CPUs, which fits.
            beside_control(quota.ceil().max(1.0) as usize)
        }
        Shards::Auto => beside_control(free.len()),
    };
    if !pin || allowed.bound_by_quota() || count > free.len() {
        return Ok(vec![None; count]);
    }
    // The last ones: the kernel and its interrupts like the first.
    Ok(free[free.len() - count..].iter().map(|&cpu| Some(cpu)).collect())
}

fn beside_control(cpus: usize) -> usize {
    if cpus <= 4 { cpus.max(1) } else { cpus - 1 }
}

/// `server.shards` names a CPU outside our set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotAllowed {
    pub cpu: usize,
    pub allowed: Vec<usize>,
}

impl fmt::Display for NotAllowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotAllowed { cpu, allowed } = self;
        write!(f, "server.shards names CPU {cpu}, but this process may only run on {allowed:?}")
    }
}

/// The least `cpu.max` between our cgroup and the root (cgroup v2), as CPUs. A missing file says
/// nothing, as on cgroup v1.
fn quota(root: &Path, of_process: &Path) -> Option<f64> {
    let list = std::fs::read_to_string(of_process).ok()?;
    let ours = list.lines().find_map(|line| line.strip_prefix("0::"))?;
    let mut folder: PathBuf = root.join(ours.trim_start_matches('/'));
    let mut least: Option<f64> = None;
    loop {
        if let Ok(text) = std::fs::read_to_string(folder.join("cpu.max"))
            && let Some(here) = cpu_max(&text)
        {
            least = Some(least.map_or(here, |least| least.min(here)));
        }
        if folder == root || !folder.pop() || !folder.starts_with(root) {
            return least;
        }
    }
}

/// `150000 100000` is one and a half CPUs; `max 100000` is no bound.
fn cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (quota > 0.0 && period > 0.0).then_some(quota / period)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auto(cpus: usize, quota: Option<f64>) -> Vec<Option<usize>> {
        let allowed = Allowed { cpus: (0..cpus).collect(), quota };
        layout(&Shards::Auto, None, &allowed, true).expect("auto never names a CPU")
    }

    #[test]
    fn small_machines_use_every_cpu_and_large_ones_keep_one_for_control() {
        assert_eq!(auto(1, None), [Some(0)]);
        assert_eq!(auto(4, None), [Some(0), Some(1), Some(2), Some(3)]);
        assert_eq!(auto(5, None), [Some(1), Some(2), Some(3), Some(4)]);
        assert_eq!(auto(64, None).len(), 63);
    }

    #[test]
    fn a_quota_says_how_many_and_not_which() {
        assert_eq!(auto(64, Some(2.0)), [None, None]);
        assert_eq!(auto(64, Some(0.5)), [None]);
        assert_eq!(auto(64, Some(8.0)).len(), 7);
        // A quota that pays for all of them binds nothing.
        assert_eq!(auto(2, Some(2.0)), [Some(0), Some(1)]);
    }

    #[test]
    fn a_number_is_taken_as_it_is() {
        let allowed = Allowed { cpus: vec![2, 3, 7], quota: None };
        let layout = |count, gpu, pin| {
            layout(&Shards::Count(count), gpu, &allowed, pin).expect("no CPU is named")
        };
        assert_eq!(layout(2, None, true), [Some(3), Some(7)]);
        assert_eq!(layout(2, Some(3), true), [Some(2), Some(7)]);
        assert_eq!(layout(2, None, false), [None, None]);
        // More shards than CPUs share them as the kernel likes.
        assert_eq!(layout(5, None, true), [None; 5]);
    }

    #[test]
    fn named_cpus_must_be_ours() {
        let allowed = Allowed { cpus: vec![0, 1], quota: Some(1.0) };
        let named = |list: &[usize], pin| layout(&Shards::Cpus(list.to_vec()), None, &allowed, pin);
        assert_eq!(named(&[1], true), Ok(vec![Some(1)]));
        assert_eq!(named(&[1, 0], false), Ok(vec![None, None]));
        let refused = named(&[1, 9], true).expect_err("CPU 9 is not ours");
        assert!(refused.to_string().contains("CPU 9"));
    }

    #[test]
    fn the_tightest_quota_up_to_the_root_counts() {
        let root = std::env::temp_dir().join(format!("forebay-cgroup-{}", std::process::id()));
        let leaf = root.join("a/b");
        std::fs::create_dir_all(&leaf).expect("folders");
        std::fs::write(root.join("a/cpu.max"), "150000 100000\n").expect("written");
        std::fs::write(leaf.join("cpu.max"), "max 100000\n").expect("written");
        let of_process = root.join("cgroup");
        std::fs::write(&of_process, "0::/a/b\n").expect("written");
        assert_eq!(quota(&root, &of_process), Some(1.5));
        std::fs::write(&of_process, "12:cpu:/a\n").expect("written");
        assert_eq!(quota(&root, &of_process), None);
        std::fs::remove_dir_all(root).expect("removed");
        for nonsense in ["", "max", "0 100000", "-1 100000", "x y"] {
            assert_eq!(cpu_max(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn this_machine_has_a_cpu() {
        assert!(!Allowed::here().cpus.is_empty());
    }
}
