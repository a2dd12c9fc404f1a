# `just` lists these; each is one command that works without just as well.

default:
    @just --list

# What a change must pass: format, lints, every test.
check:
    .ci/run

# Unit tests and the integration suite, nothing to download.
test:
    tests/run quick

# Every test: 1 shard, 2 shards, epoll, SDKs, corpus, wire cases, real engine.
test-all:
    tests/run

# One test of the integration suite, or all whose name holds the word.
it WORD *ARGS:
    cargo test --test it {{WORD}} {{ARGS}}

fmt:
    cargo fmt --all

lint:
    cargo clippy --workspace --all-targets -- -D warnings

# A gateway and a demo backend on loopback ports.
demo:
    cargo run --release -- demo
