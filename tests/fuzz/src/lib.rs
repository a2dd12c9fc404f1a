//! Fuzzing of the parts that read what strangers send: one plain function for each target, which
//! takes any bytes and panics if one of the target's claims does not hold.
//!
//! The pure modules are included as files. So this builds in a tenth of the time of the whole
//! gateway, and it shows that they need nothing outside of themselves.
//!
//! The first four bytes of an input steer: one mode, and three that seed where to cut. The rest is
//! the document. See `README.md`.

/// As in `src/lib.rs`.
#[path = "../../../src/pure"]
pub mod pure {
    pub mod units;

    pub mod answer;
    pub mod atomic;
    pub mod board;
    pub mod body;
    pub mod dialect;
    pub mod fields;
    pub mod h1;
    pub mod json;
    pub mod jwt;
    pub mod lanes;
    pub mod limit;
    pub mod multipart;
    pub mod peek;
    pub mod plan;
    pub mod relay;
    pub mod sse;
    pub mod tokens;
    pub mod usage;
}

pub mod body;
pub mod h1;
mod live;
pub mod plan;
pub mod sse;

pub use live::live_bytes;

use pure::units::Rng;

/// Makes the entry of a fuzzer under `cargo fuzz`, and otherwise a program that runs the files it
/// is given, so that a finding can be replayed without a nightly compiler.
#[macro_export]
macro_rules! target {
    ($run:path) => {
        #[cfg(fuzzing)]
        ::libfuzzer_sys::fuzz_target!(|input: &[u8]| $run(input));

        #[cfg(not(fuzzing))]
        fn main() -> ::std::io::Result<()> {
            for path in ::std::env::args_os().skip(1) {
                $run(&::std::fs::read(&path)?);
                println!("{}: ok", path.display());
            }
            Ok(())
        }
    };
}

/// Parts an input into mode, chance and document; `None` if it is too short.
fn steer(input: &[u8]) -> Option<(u8, Rng, &[u8])> {
    let (&[mode, a, b, c], document) = input.split_first_chunk::<4>()?;
    Some((mode, Rng::seeded(u64::from(u32::from_be_bytes([0, a, b, c]))), document))
}

/// Where pieces of a document of `len` bytes end, the last at `len`. Some may be empty, as reads
/// may be.
fn cuts(rng: &mut Rng, len: usize) -> Vec<usize> {
    let mut ends: Vec<usize> = match rng.below(4) {
        0 => vec![pick(rng, len + 1)],
        1 => (0..=rng.below(8)).map(|_| pick(rng, len + 1)).collect(),
        2 => {
            let step = 1 + pick(rng, 64) + len / 256;
            (step..len).step_by(step).collect()
        }
        // Byte by byte, if that is not too slow.
        _ => (1..len).step_by(1 + len / 512).collect(),
    };
    ends.push(len);
    ends.sort_unstable();
    ends
}

fn pick(rng: &mut Rng, below: usize) -> usize {
    rng.below(below as u64) as usize
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    memchr::memmem::find(text, part)
}
