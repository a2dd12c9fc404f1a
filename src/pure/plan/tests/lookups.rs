//! Goal: lookups on the path of a request agree with the plain reading of the rules, and a reload
//! keeps rows and numbers. Method: oracles that walk the file.

use std::sync::Arc;

use super::*;
use crate::pure::board::{Kind, Slot};

fn names_of(plan: &Plan, tenant: Option<TenantId>) -> Vec<&str> {
    let may = |name: &str| tenant.is_none_or(|tenant| plan.may_use(tenant, name));
    plan.visible_models(may).map(|(name, _)| name).collect()
}

const NONE: &dyn Fn(&str) -> Option<&'static [u8]> = &|_| None;

/// The list is of names that clients use: the alias may be allowed and the model behind it not.
#[test]
fn a_tenant_may_use_the_names_on_its_list_and_no_others() {
    let text = SMALL
        .replace("  acme: {}", "  acme: { models: [small, \"gpt-*\"] }\n  free: ~")
        .replace("match: { model: big }", "match: { model: [big, gpt-4, other] }");
    let plan = good(&text);
    let (acme, free) = (TenantId(0), TenantId(1));
    assert_eq!(plan.model("small"), plan.model("big"));
    assert!(plan.may_use(acme, "small") && plan.may_use(acme, "gpt-4"));
    assert!(!plan.may_use(acme, "big") && !plan.may_use(acme, "other"));
    assert!(!plan.may_use(acme, "") && !plan.may_use(acme, "Small"));
    assert!(plan.may_use(free, "big"));
    assert_eq!(names_of(&plan, Some(acme)), ["small", "gpt-4"]);
    assert_eq!(names_of(&plan, Some(free)), ["big", "small", "gpt-4", "other"]);
    assert_eq!(names_of(&plan, None), ["big", "small", "gpt-4", "other"]);
}

#[test]
fn names_that_no_route_serves_are_not_shown() {
    // Only the alias is routed, as where clients must not use the upstream's name.
    let plan = good(&small("match: { model: big }", "match: { model: small }"));
    assert_eq!(names_of(&plan, None), ["small"]);
    assert_eq!(plan.route(Some("big"), Some("small"), "/", NONE), Some(RouteId(0)));
    assert_eq!(plan.route(Some("big"), Some("big"), "/", NONE), None);
    let plan = good(&small("big: { aliases: [small] }", "big: { aliases: [small] }\n  spare: ~"));
    assert_eq!(names_of(&plan, None), ["big", "small"]);
}

#[test]
fn keys_are_found_by_their_whole_digest() {
    let key = |last: u8, first: u8| {
        let mut digest = [0; 32];
        (digest[0], digest[31]) = (first, last);
        digest
    };
    let hex =
        |digest: &[u8; 32]| digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let mut text = SMALL.to_owned();
    let all: Vec<[u8; 32]> = (0..40).map(|n| key(n + 1, if n % 4 == 0 { 0 } else { n })).collect();
    for (n, digest) in all.iter().enumerate() {
        text.push_str(&format!("  - {{ id: x{n}, tenant: acme, sha256: {} }}\n", hex(digest)));
    }
    let plan = good(&text);
    for (n, digest) in all.iter().enumerate() {
        let found = plan.key(digest).unwrap();
        assert_eq!(&*plan.keys[found.index()].id, format!("x{n}"));
    }
    assert_eq!(plan.key(&key(0xaa, 0)), Some(KeyId(0)));
    assert_eq!(
        (plan.key(&key(99, 0)), plan.key(&[0xff; 32]), plan.key(&[0; 32])),
        (None, None, None)
    );
    assert!(!plan.open() && good(&SMALL[..SMALL.find("keys:").unwrap()]).open());
}

/// Random tables of routes against the rule read off the page: first match in file order, then
/// `default`.
#[test]
fn routes_agree_with_a_walk_through_the_file() {
    let models = ["a", "b", "ab", "a*", "?", "*"];
    let paths = ["/x", "/x/*", "*"];
    let mut rng = Rng::seeded(11);
    let mut hits = [0_u32; 3];
    for _ in 0..150 {
        let count = 1 + rng.below(7);
        let default_at = rng.below(count + 3);
        let mut text = SMALL[..SMALL.find("routes:").unwrap()].to_owned();
        text.push_str("routes:\n");
        for route in 0..count {
            let mut conditions = Vec::new();
            if rng.below(4) != 0 {
                let list: Vec<String> = (0..=rng.below(2))
                    .map(|_| format!("\"{}\"", models[rng.below(6) as usize]))
                    .collect();
                conditions.push(format!("model: [{}]", list.join(", ")));
            }
            if rng.below(3) == 0 {
                conditions.push(format!("path: \"{}\"", paths[rng.below(3) as usize]));
            }
            if rng.below(3) == 0 {
                conditions
                    .push(format!("header: {{ X-T: \"{}\" }}", models[rng.below(6) as usize]));
            }
            let name = if route == default_at { "default".to_owned() } else { format!("r{route}") };
            text.push_str(&format!(
                "  - {{ name: {name}, pool: main, match: {{ {} }} }}\n",
                conditions.join(", ")
            ));
        }
        let plan = good(&text);
        for (canonical, asked) in [
            (None, None),
            (Some("a"), Some("a")),
            (Some("b"), Some("a")),
            (Some("b"), Some("ab")),
            (None, Some("zz")),
        ] {
            for path in ["/x", "/x/y", "/"] {
                for value in [None, Some("a"), Some("ab")] {
                    let header = |name: &str| value.filter(|_| name == "x-t").map(str::as_bytes);
                    let walk = |wanted_default: bool| {
                        plan.routes.iter().position(|route| {
                            let one = |patterns: &[Pattern], text: &str| {
                                patterns.iter().any(|pattern| {
                                    naive(pattern.as_str().as_bytes(), text.as_bytes())
                                })
                            };
                            let matches = &route.matches;
                            let model = matches.models.is_empty()
                                || [canonical, asked]
                                    .iter()
                                    .flatten()
                                    .any(|name| one(&matches.models, name));
                            let path = matches.paths.is_empty() || one(&matches.paths, path);
                            let header = matches.headers.is_empty()
                                || value.is_some_and(|value| one(&matches.headers[0].1, value));
                            (&*route.name == "default") == wanted_default && model && path && header
                        })
                    };
                    let expected =
                        walk(false).or_else(|| walk(true)).map(|index| RouteId(index as u32));
                    let got = plan.route(canonical, asked, path, &header);
                    assert_eq!(got, expected, "{canonical:?} {asked:?} {path} {value:?}\n{text}");
                    match got {
                        None => hits[0] += 1,
                        Some(id) if &*plan.routes[id.index()].name == "default" => hits[1] += 1,
                        Some(_) => hits[2] += 1,
                    }
                }
            }
        }
    }
    assert!(hits.iter().all(|&hits| hits > 100), "the table is lopsided: {hits:?}");
}

/// Globs by their definition, exponentially.
fn naive(glob: &[u8], text: &[u8]) -> bool {
    match glob {
        [] => text.is_empty(),
        [b'*', rest @ ..] => (0..=text.len()).any(|skip| naive(rest, &text[skip..])),
        [b'?', rest @ ..] => !text.is_empty() && naive(rest, &text[1..]),
        [byte, rest @ ..] => text.first() == Some(byte) && naive(rest, &text[1..]),
    }
}

#[test]
fn globs_agree_with_their_definition_on_all_short_words() {
    fn words(alphabet: &[u8], longest: usize) -> Vec<Vec<u8>> {
        let mut all = vec![Vec::new()];
        let mut from = 0;
        for _ in 0..longest {
            let to = all.len();
            for index in from..to {
                for &byte in alphabet {
                    let mut longer: Vec<u8> = all[index].clone();
                    longer.push(byte);
                    all.push(longer);
                }
            }
            from = to;
        }
        all
    }
    let texts = words(b"ab", 6);
    for glob in words(b"ab*?", 5) {
        for text in &texts {
            assert_eq!(fits(&glob, text), naive(&glob, text), "{glob:?} {text:?}");
        }
    }
    // `?` is a character, not a byte, and a byte where the text is no UTF-8.
    assert!(
        fits("a?c".as_bytes(), "aéc".as_bytes()) && fits("?".as_bytes(), "\u{1f600}".as_bytes())
    );
    assert!(fits(b"a?c", b"a\xffc") && !fits("a?c".as_bytes(), "aééc".as_bytes()));
    // Linear where a recursive matcher is exponential.
    let text = vec![b'a'; 20_000];
    assert!(!fits(&b"a*".repeat(60).iter().copied().chain(*b"b").collect::<Vec<_>>(), &text));
}

#[test]
fn address_ranges_hold_their_addresses_and_no_others() {
    let net = |text: &str| value::net(text).unwrap();
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    assert!(net("10.0.0.0/8").contains(ip("10.255.0.1")));
    assert!(net("10.0.0.0/8").contains(ip("::ffff:10.1.2.3")));
    assert!(!net("10.0.0.0/8").contains(ip("11.0.0.0")));
    assert!(net("0.0.0.0/0").contains(ip("1.2.3.4")) && !net("0.0.0.0/0").contains(ip("::1")));
    assert!(net("fd00::/7").contains(ip("fc00::1")) && !net("fd00::/8").contains(ip("fc00::1")));
    assert!(net("10.1.2.3").contains(ip("10.1.2.3")) && !net("10.1.2.3").contains(ip("10.1.2.2")));
    assert!(net("::/0").contains(ip("::1")));
}

#[test]
fn a_reload_keeps_rows_and_numbers_and_a_refused_one_changes_nothing() {
    let mut registry = Registry::new();
    let mut load = |text: &str| Plan::build(text, &env, &files, &mut registry);
    let first = load(SMALL).unwrap();
    let slot = Slot::take(&first.backends[0].row, None).unwrap();
    let without_b1 = small("      - { name: b1, url: \"http://10.0.0.1:8000\" }\n", "");
    let second = load(&without_b1).unwrap();
    assert_eq!(&*second.backends[0].name, "b2");
    assert_eq!(second.backends[0].series, first.backends[1].series);
    load(&small("name: b1,", "name: new-name, slots: 0,")).unwrap_err();
    let third = load(SMALL).unwrap();
    assert!(Arc::ptr_eq(&third.backends[0].row, &first.backends[0].row));
    assert_eq!(third.backends[0].row.in_flight(), 1);
    drop(slot);
    assert_eq!(third.backends[0].row.in_flight(), 0);
    assert_eq!(third.digest, first.digest);
    assert_ne!(third.digest, second.digest);
    let names: Vec<&str> = registry.names(Kind::Backend).iter().map(AsRef::as_ref).collect();
    assert_eq!(names, ["other", "b1", "b2"]);
}

#[test]
fn more_names_than_a_process_has_numbers_for_are_refused_whole() {
    let mut registry = Registry::new();
    for name in 0..crate::pure::board::NAMES_MAX - 2 {
        registry.series(Kind::Backend, &format!("n{name}")).unwrap();
    }
    let refused = Plan::build(SMALL, &env, &files, &mut registry).unwrap_err();
    assert!(lines(&refused).contains("different Backend names since start"), "{}", lines(&refused));
    assert_eq!(registry.names(Kind::Pool).len(), 1, "the pool took no number");
}

/// Thousands of routes stay cheap: the exact ones are found by hash.
#[test]
fn five_thousand_routes_build_and_route() {
    let mut text = SMALL[..SMALL.find("routes:").unwrap()].to_owned();
    text.push_str("routes:\n");
    for route in 0..5_000 {
        text.push_str(&format!(
            "  - name: r{route}\n    match: {{ model: m{route} }}\n    pool: main\n    strategy: least-requests\n"
        ));
    }
    let plan = good(&text);
    for route in [0, 1, 2_500, 4_999] {
        let name = format!("m{route}");
        assert_eq!(plan.route(Some(&name), Some(&name), "/", NONE), Some(RouteId(route)));
    }
    assert_eq!(plan.models.len(), 5_001);
}

#[test]
fn a_route_counts_by_its_own_vocabulary_and_a_reload_makes_none_again() {
    let mut registry = Registry::new();
    let mut load = |text: &str| Plan::build(text, &env, &files, &mut registry).expect("a plan");
    let text = SMALL.replace("[small] }", "[small], tokenizer: cl100k_base }");
    let (chat, big) = (RouteId(0), Some(ModelId(0)));
    let plan = load(&text);
    let again = load(&text);
    assert!(plan.notices.is_empty(), "{:?}", plan.notices);
    let vocabulary = |plan: &Plan| plan.vocabulary(big, chat).map(std::ptr::from_ref);
    assert!(vocabulary(&plan).is_some() && vocabulary(&plan) == vocabulary(&again));
    assert!(plan.vocabulary(None, chat).is_none());
    let route = |tokenizer: &str| format!("    pool: main\n    tokenizer: {tokenizer}");
    let plan = load(&text.replace("    pool: main", &route("auto")));
    assert_eq!(vocabulary(&plan), None);
    let plan = load(&text.replace("    pool: main", &route("llama3")));
    let other = plan.vocabulary(None, chat).map(std::ptr::from_ref);
    assert!(other.is_some() && other == vocabulary(&plan) && other != vocabulary(&again));
    let plan = load(SMALL);
    assert_eq!(vocabulary(&plan), None);
}
