//! Forebay's bench: a load generator that checks every answer, a lean scripted backend, a plain
//! hyper proxy as a peer, and one command that compares them all side by side.

mod answer;
mod cli;
mod compare;
mod floor;
mod http;
mod load;
mod mock;
mod net;
mod process;
mod proxy;
mod wire;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    cli::main()
}
