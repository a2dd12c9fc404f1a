//! Goal: `jwt` is read as operators write it, and a wrong one gives the lines that help its writer.
//! Method: one good issuer, changed; then what a good token opens under it.

use super::*;
use crate::pure::jwt::{Algorithm, Verified};

const ISSUER: &str = r#"tiers:
  default: { rpm: 10 }
  pro: { rpm: 600, tpm: 1000 }
tenants:
  acme: { rate_limit: { tpm: 50 }, budget: { usd: 1, per: day } }
  fixed: { tier: pro }
jwt:
  - issuer: https://sso.example.com
    audience: forebay
    tenant: realm.team
    tier: plan
    default_tenant: acme
    jwks: { url: "https://sso.example.com/keys" }
keys:
"#;

fn with_issuer(from: &str, to: &str) -> String {
    assert_eq!(ISSUER.matches(from).count(), 1, "{from:?} must be there once");
    small("tenants:\n  acme: {}\nkeys:\n", &ISSUER.replace(from, to))
}

#[test]
fn an_issuer_has_few_fields_and_sound_defaults() {
    let plan = good(&with_issuer("keys:\n", "keys:\n"));
    let [issuer] = &plan.issuers[..] else { panic!("one") };
    assert_eq!((&*issuer.name, &*issuer.rules.issuer), ("jwt", "https://sso.example.com"));
    assert_eq!(issuer.rules.leeway, Duration::from_secs(30));
    assert_eq!(issuer.rules.algorithms, [Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA]);
    let KeySource::Url { every, ca: None, .. } = &issuer.keys else { panic!("a URL") };
    assert_eq!(*every, Duration::from_mins(5));
    assert!(!format!("{plan:?}").contains("sso.example.com/keys"), "a URL may hold a token");
    // One map is a list of one; without keys the gateway is not open.
    let alone = "tenants:\n  acme: {}\njwt: { issuer: i, audience: [a, b], default_tenant: acme, jwks: { url: 'http://localhost:1/k?x=1' } }\n";
    let text = SMALL.split_once("tenants:\n").expect("tenants").0.to_owned() + alone;
    let plan = good(&text);
    assert!(!plan.open() && plan.keys.is_empty());
    assert_eq!(plan.issuers[0].rules.audiences.len(), 2);
    assert!(plan.notices.is_empty(), "{:?}", plan.notices);
}

#[test]
fn each_broken_issuer_gives_exactly_its_lines() {
    let url = "{ url: \"https://sso.example.com/keys\" }";
    let cases: &[(&str, &str, &[&str])] = &[
        (
            "  - issuer: https://sso.example.com\n    audience: forebay\n",
            "  - {}\n  - audience: forebay\n",
            &[
                "20:5: jwt[0].issuer: `issuer` is missing; help: what its tokens have for `iss`",
                "20:5: jwt[0].audience: `audience` is missing; help: what its tokens have for `aud`, as in `audience: forebay`",
                "20:5: jwt[0].jwks: `jwks` is missing; help: `{ url: \"https://...\" }` or `{ file: jwks.json }`",
                "20:5: jwt[0]: nothing says which tenant a token belongs to; help: write `tenant: CLAIM`, or `default_tenant: NAME` for all of its tokens",
                "21:5: jwt[1].issuer: `issuer` is missing; help: what its tokens have for `iss`",
            ],
        ),
        (
            "    audience: forebay",
            "    audience: []\n    algorithms: [RS265, HS256, none, ES256]\n    leeway: 1h\n    audiences: x",
            &[
                "21:15: jwt[0].audience: an empty list would let no token in (issuer https://sso.example.com)",
                "22:18: jwt[0].algorithms[0]: `RS265` is no known algorithm (issuer https://sso.example.com); help: did you mean `RS256`?",
                "22:25: jwt[0].algorithms[1]: `HS256` checks with the secret that signs (issuer https://sso.example.com); help: the published keys of `jwks` go with RS256, ES256 or EdDSA",
                "22:32: jwt[0].algorithms[2]: a token that nobody signed opens nothing (issuer https://sso.example.com); help: leave `algorithms` out for RS256, ES256 and EdDSA",
                "23:13: jwt[0].leeway: `1h` is more than clocks differ by (issuer https://sso.example.com); help: at most `10m`; `exp` says how long a token is good",
                "24:5: jwt[0].audiences: unknown field `audiences` (issuer https://sso.example.com); help: did you mean `audience`?",
            ],
        ),
        (
            url,
            "{ url: \"https://sso.example.com/keys\", file: jwks.json, every: 10ms }",
            &[
                "25:11: jwt[0].jwks: keys come from a `url` or from a `file`, not from both (issuer https://sso.example.com); help: `{ url: \"https://...\" }` or `{ file: jwks.json }`",
                "25:56: jwt[0].jwks.file: the keys cannot be read: no such file (issuer https://sso.example.com)",
                "25:74: jwt[0].jwks.every: `10ms` is too often (issuer https://sso.example.com); help: at least `1s`",
            ],
        ),
        (
            url,
            "{}",
            &[
                "25:11: jwt[0].jwks: `url` or `file` is missing (issuer https://sso.example.com); help: `{ url: \"https://...\" }` or `{ file: jwks.json }`",
            ],
        ),
        (
            url,
            "{ url: \"https://me:hunter2@sso.example.com/keys\" }",
            &[
                "25:18: jwt[0].jwks.url: this URL holds a user or a password (issuer https://sso.example.com); help: write it as `https://sso.example.com/keys`",
            ],
        ),
        (
            url,
            "{ url: \"sso.example.com/keys\", ca: two.key }",
            &[
                "25:18: jwt[0].jwks.url: `sso.example.com/keys` is not a URL that can be asked (issuer https://sso.example.com); help: write it as `https://sso.example.com/keys`",
                "25:46: jwt[0].jwks.ca: `two.key` holds no certificate in PEM form (issuer https://sso.example.com)",
            ],
        ),
        (
            url,
            "{ file: two.key }",
            &[
                "25:19: jwt[0].jwks.file: the keys cannot be read: two.key: not a JSON object with a list of `keys` (RFC 7517) (issuer https://sso.example.com)",
            ],
        ),
        (
            "tenant: realm.team",
            "tenant: $.team",
            &[
                "22:13: jwt[0].tenant: `$.team` names no claim (issuer https://sso.example.com); help: write the claim's name, or its path, as in `realm.team`",
            ],
        ),
        (
            "default_tenant: acme",
            "default_tenant: acne",
            &[
                "24:21: jwt[0].default_tenant: there is no tenant `acne` (issuer https://sso.example.com); help: did you mean `acme`?",
            ],
        ),
        (
            "keys:\n",
            "  - { issuer: https://sso.example.com, audience: x, tenant: t, jwks: { url: 'https://x' } }\n  - { name: k1, issuer: other, audience: x, tenant: t, jwks: { url: 'https://x' } }\nkeys:\n",
            &[
                "26:15: jwt[1].issuer: key `jwt` is here twice; the first is on line 20 (key jwt)",
                "26:15: jwt[1].issuer: issuer `https://sso.example.com` is here twice; the first is on line 20 (issuer https://sso.example.com)",
                "27:13: jwt[2].name: key `k1` is here twice; the first is on line 29 (key k1)",
            ],
        ),
    ];
    each_gives_exactly(cases, with_issuer);
    let plan = good(&with_issuer("https://sso.example.com/keys", "http://sso.example.com/keys"));
    assert!(plan.notices.iter().any(|notice| notice.message.contains("can be replaced")));
}

#[test]
fn a_token_names_a_tenant_of_the_file_and_a_tier_where_the_file_gives_none() {
    let plan = good(&with_issuer("keys:\n", "keys:\n"));
    let said = |tenant: Option<&str>, tier: Option<&str>| {
        let name = |name: Option<&str>| name.map(Box::from);
        plan.bearer(&Verified { issuer: 0, tenant: name(tenant), tier: name(tier), until: 0 })
    };
    let (acme, fixed) = (TenantId(0), TenantId(1));
    assert_eq!(said(Some("acme"), None), Ok((acme, None)));
    assert_eq!(said(None, None), Ok((acme, None)));
    assert_eq!(said(Some("acme"), Some("pro")), Ok((acme, Some(1))));
    assert_eq!(said(Some("fixed"), Some("default")), Ok((fixed, None)), "the file's word stands");
    assert_eq!(said(Some("fixed"), Some("gold")), Ok((fixed, None)));
    assert_eq!(said(Some("acme"), Some("gold")), Err(Unknown::Tier));
    assert_eq!(said(Some("nobody"), Some("pro")), Err(Unknown::Tenant));

    let by_token = plan.tenants[0].by_token.as_ref().expect("it has no tier of its own");
    assert!(plan.tenants[1].by_token.is_none());
    let (own, pro) = (by_token.own.as_ref(), by_token.tiers[1].as_ref());
    let (own, pro) = (own.expect("a budget"), pro.expect("limits"));
    let limits = plan.tenants[0].limits.as_ref().expect("limits");
    assert!(Arc::ptr_eq(&own.row, &limits.row), "the budget counts every tier");
    assert_eq!(limits.requests.map(|rate| rate.limit()), Some(10), "of the tier `default`");
    assert!(own.requests.is_none() && own.budget.is_some());
    assert_eq!(own.tokens.map(|rate| rate.limit()), Some(50));
    assert_eq!(pro.requests.map(|rate| rate.limit()), Some(600));
    assert!(pro.tokens.is_none(), "the tenant's own is in its place");
    assert_eq!(&*pro.row.name, "acme\0pro");
}
