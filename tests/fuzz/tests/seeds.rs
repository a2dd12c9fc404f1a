//! Goal: the targets hold for their seeds without a fuzzer. Method: each seed as it is, then with
//! other ways of steering, then with seeded changes.

use std::fs;
use std::path::Path;

use forebay_fuzz::pure::units::Rng;

fn run_seeds(target: &str, run: fn(&[u8]), changes: usize) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(target);
    let mut paths: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty());
    let mut rng = Rng::seeded(0xf0eb);
    for path in paths {
        let seed = fs::read(&path).unwrap();
        let tell = Tell(&seed, &path);
        run(tell.0);
        for round in 0..changes {
            let mut input = seed.clone();
            for byte in &mut input[1..4] {
                *byte = rng.next_u64() as u8;
            }
            if round % 2 == 1 {
                input[0] ^= rng.below(16) as u8;
                for _ in 0..rng.below(4) {
                    change(&mut input, &mut rng);
                }
            }
            let tell = Tell(&input, &path);
            run(tell.0);
        }
    }
}

/// Says which input fails.
struct Tell<'a>(&'a [u8], &'a Path);

impl Drop for Tell<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}: {}", self.1.display(), self.0.escape_ascii());
        }
    }
}

/// Changes one byte of the document, cuts some out or puts some in twice.
fn change(input: &mut Vec<u8>, rng: &mut Rng) {
    if input.len() < 6 {
        return;
    }
    let at = 4 + rng.below(input.len() as u64 - 4) as usize;
    let end = input.len().min(at + 1 + rng.below(8) as usize);
    match rng.below(4) {
        0 => input[at] = rng.next_u64() as u8,
        1 => input[at] = b"\r\n\t \"\\{}[]:,;-0Z"[rng.below(16) as usize],
        2 => drop(input.drain(at..end)),
        _ => {
            let part = input[at..end].to_vec();
            input.splice(at..at, part);
        }
    }
}

#[test]
fn h1() {
    run_seeds("h1", forebay_fuzz::h1::run, 400);
}

#[test]
fn sse() {
    run_seeds("sse", forebay_fuzz::sse::run, 200);
}

#[test]
fn body() {
    run_seeds("body", forebay_fuzz::body::run, 400);
}

#[test]
fn plan() {
    run_seeds("plan", forebay_fuzz::plan::run, 40);
}
