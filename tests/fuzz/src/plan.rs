//! Configurations: whatever a text says, the answer is a plan or a list of problems with places, no
//! value of a variable or a secret is among them, and a refused text leaves the registry as it was.

use std::cell::RefCell;

use crate::pure::board::{Kind, NAMES_MAX, Registry};
use crate::pure::plan::{Plan, Problem, summary};
use crate::pure::units::{Rng, Series, TenantId};
use crate::{pick, steer};

/// Mode: 0 an empty registry, 1 one with the names of an earlier plan, 2 one with room for two more
/// names of some kind, 3 a text that is cut off (modulo 4, but 2 is 1 mostly, because it takes long).
pub fn run(input: &[u8]) {
    let Some((mode, mut rng, bytes)) = steer(input) else { return };
    let text = String::from_utf8_lossy(bytes);
    match mode % 4 {
        0 => check(&text, &mut Registry::new()),
        2 if mode % 16 == 2 => nearly_full(&mut rng, &text),
        1 | 2 => check(&text, &mut used()),
        _ => {
            let mut end = pick(&mut rng, text.len() + 1);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            check(&text[..end], &mut Registry::new());
        }
    }
}

/// A registry that has seen an earlier plan.
fn used() -> Registry {
    let mut registry = Registry::new();
    for (kind, names) in [
        (Kind::Backend, &["b1", "b2", "gone"][..]),
        (Kind::Pool, &["main", "llama-next"]),
        (Kind::Model, &["big", "llama-3-8b"]),
        (Kind::Route, &["chat", "default"]),
        (Kind::Tenant, &["acme"]),
        (Kind::Key, &["k1"]),
    ] {
        for name in names {
            registry.series(kind, name).expect("there is room");
        }
    }
    registry
}

/// Values that no text says by chance.
const VARIABLE: &str = "qVariableQ";
const SECRET: &str = "qSecretQ";

fn env(name: &str) -> Option<String> {
    match name {
        "UPSTREAM_KEY" => Some(VARIABLE.to_owned()),
        "PORT" => Some("9000".to_owned()),
        "EMPTY" => Some(String::new()),
        "ODD" => Some(format!("a b\n: {VARIABLE} {{[\"'\u{0}\u{1f600}")),
        _ => None,
    }
}

fn files(path: &str) -> Result<String, String> {
    match path {
        "admin.token" | "upstream.key" => Ok(format!("{SECRET}\n")),
        "two.key" => Ok(format!("{SECRET}\n{SECRET}\n")),
        _ => Err("no such file".to_owned()),
    }
}

const KINDS: [Kind; 6] =
    [Kind::Backend, Kind::Pool, Kind::Model, Kind::Route, Kind::Tenant, Kind::Key];

/// How many names of each kind there are, and how many rows.
fn sizes(registry: &Registry) -> ([usize; 6], usize, usize) {
    let names = KINDS.map(|kind| registry.names(kind).len());
    (names, registry.backends().len(), registry.tenants().len())
}

/// Builds a plan of `text`, and now and then once more.
fn check(text: &str, registry: &mut Registry) {
    let again = text.len().is_multiple_of(4);
    let before = sizes(registry);
    match Plan::build(text, &env, &files, registry) {
        Ok(plan) => {
            check_plan(text, &plan, registry);
            if again {
                let after = sizes(registry);
                let again = Plan::build(text, &env, &files, registry).expect("it was sound before");
                assert_eq!(sizes(registry), after, "known names get no new numbers");
                assert_eq!(again.digest, plan.digest);
                let series =
                    |plan: &Plan| -> Vec<_> { plan.routes.iter().map(|r| r.series).collect() };
                assert_eq!(series(&again), series(&plan));
            }
        }
        Err(problems) => {
            assert_eq!(sizes(registry), before, "a refused text leaves the registry as it was");
            check_problems(text, &problems);
            if again {
                let again = Plan::build(text, &env, &files, registry);
                assert_eq!(again.expect_err("it was refused before"), problems);
            }
        }
    }
}

fn check_problems(text: &str, problems: &[Problem]) {
    assert!(!problems.is_empty());
    assert!(problems.is_sorted_by_key(|problem| (problem.line, problem.column)));
    let rows = text.split(['\n', '\r']).count();
    let mut said = summary(problems);
    assert!(!said.contains('\n'));
    for problem in problems {
        assert!((1..=rows + 1).contains(&(problem.line as usize)), "{problem} of {rows} rows");
        assert!((1..=text.len() + 2).contains(&(problem.column as usize)), "{problem}");
        assert!(!problem.message.is_empty() && !problem.to_string().contains('\n'), "{problem:?}");
        assert!(
            !problem.message.contains(VARIABLE) || text.contains(VARIABLE),
            "a variable is said: {problem}"
        );
        said.push_str(&problem.in_file("forebay.yaml"));
    }
    assert!(!said.contains(SECRET) || text.contains(SECRET), "a secret is said: {said}");
}

/// A plan answers any question, and its ids lead somewhere.
fn check_plan(text: &str, plan: &Plan, registry: &Registry) {
    let debug = format!("{plan:?}");
    assert!(!debug.contains(SECRET) || text.contains(SECRET), "a secret is said");
    assert!(!plan.pools.is_empty() && !plan.routes.is_empty() && !plan.server.listen.is_empty());
    let named = |kind, series: Series| &*registry.names(kind)[series.index()];
    for pool in &plan.pools {
        assert_eq!(named(Kind::Pool, pool.series), &*pool.name);
        assert!(!pool.backends.is_empty());
        for id in &pool.backends {
            assert!(plan.pools[plan.backends[id.index()].pool.index()].name == pool.name);
        }
    }
    for backend in &plan.backends {
        assert_eq!(named(Kind::Backend, backend.series), &*backend.name);
        assert_eq!(backend.row.name, backend.name);
    }
    for model in &plan.models {
        assert_eq!(named(Kind::Model, model.series), &*model.name);
        let names = [&*model.name].into_iter().chain(model.aliases.iter().map(AsRef::as_ref));
        for name in names {
            let id = plan.model(name).expect("a model is found by each of its names");
            assert_eq!(plan.models[id.index()].name, model.name);
        }
        assert!(model.fallback.iter().all(|next| next.model.index() < plan.models.len()));
    }
    for tenant in &plan.tenants {
        assert_eq!(named(Kind::Tenant, tenant.series), &*tenant.name);
        assert!(tenant.tier.is_none_or(|tier| tier < plan.tiers.len()));
    }
    assert_eq!(plan.open(), plan.keys.is_empty());
    for key in &plan.keys {
        let id = plan.key(&key.sha256).expect("a key is found by its digest");
        assert_eq!(plan.keys[id.index()].sha256, key.sha256);
        assert!(key.tenant.index() < plan.tenants.len());
    }
    assert!(
        plan.keys.iter().any(|key| key.sha256 == [0x5A; 32]) || plan.key(&[0x5A; 32]).is_none()
    );

    let header = |_: &str| -> Option<&[u8]> { Some(b"free") };
    for (name, id) in plan.visible_models(|_| true) {
        assert_eq!(plan.model(name), Some(id));
    }
    for tenant in 0..plan.tenants.len() {
        let tenant = TenantId(u32::try_from(tenant).expect("few tenants"));
        for (name, _) in plan.visible_models(|name| plan.may_use(tenant, name)) {
            assert!(plan.may_use(tenant, name));
        }
    }
    for asked in [None, Some("big"), Some("small"), Some("llama-3-8b"), Some("\u{0}"), Some("")] {
        let id = asked.and_then(|name| plan.model(name));
        let canonical = id.map(|id| &*plan.models[id.index()].name);
        for path in ["/v1/chat/completions", "/", ""] {
            let route = plan.route(canonical, asked, path, &header);
            assert!(route.is_none_or(|route| route.index() < plan.routes.len()));
        }
    }
}

/// With a registry that has room for two more names of one kind. It is made once, and again when
/// that room was used.
fn nearly_full(rng: &mut Rng, text: &str) {
    thread_local! {
        static FULL: RefCell<[Option<Registry>; 6]> = const { RefCell::new([const { None }; 6]) };
    }
    let place = pick(rng, KINDS.len());
    FULL.with_borrow_mut(|full| {
        let registry = full[place].get_or_insert_with(|| {
            let mut registry = used();
            let kind = KINDS[place];
            for n in registry.names(kind).len()..NAMES_MAX - 2 {
                registry.series(kind, &format!("n{n}")).expect("there is room");
            }
            registry
        });
        let before = sizes(registry);
        check(text, registry);
        if sizes(registry) != before {
            full[place] = None;
        }
    });
}
