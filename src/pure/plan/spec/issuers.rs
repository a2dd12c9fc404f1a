//! Whose tokens are taken as keys: `jwt`.

use std::sync::Arc;
use std::time::Duration;

use super::{by_member, certificates};
use crate::pure::jwt::{Algorithm, Claim, KeySet, Rules};
use crate::pure::plan::Secret;
use crate::pure::plan::problem::{Severity, suggest};
use crate::pure::plan::read::{Item, Named, Reader, shown};
use crate::pure::plan::terms::KeySource;
use crate::pure::plan::value;

pub(in crate::pure::plan) struct IssuerSpec {
    /// What it is called here.
    pub at: Named,
    /// `iss`, as the file has it.
    pub issuer: Named,
    pub rules: Rules,
    pub keys: KeySource,
    pub default_tenant: Option<Named>,
}

pub(super) fn issuer<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<IssuerSpec> {
    by_member(r, "issuer", "issuer", item, |r, item| {
        r.fields(item, |r, f| {
            let name = f.get(r, "name", Reader::reference);
            let issuer = f.need(r, "issuer", "what its tokens have for `iss`", |r, item| {
                let name = r.text(item)?;
                Some(Named { name, pos: item.pos(), path: item.path.clone() })
            });
            let hint = "what its tokens have for `aud`, as in `audience: forebay`";
            let audiences = f.need(r, "audience", hint, |r, item| {
                let audiences = r.all(item, Reader::text);
                if audiences.is_empty() && item.node.scalar().is_none() {
                    let message = "an empty list would let no token in".to_owned();
                    r.wrong(item, message, None);
                }
                Some(audiences)
            });
            let hint = "`{ url: \"https://...\" }` or `{ file: jwks.json }`";
            let keys = f.need(r, "jwks", hint, key_source);
            let algorithms = f.get(r, "algorithms", |r, item| {
                let algorithms = r.all(item, algorithm);
                if algorithms.is_empty() && item.node.scalar().is_none() {
                    let hint = "leave `algorithms` out for RS256, ES256 and EdDSA".to_owned();
                    r.wrong(item, "an empty list would let no token in".to_owned(), Some(hint));
                }
                Some(algorithms)
            });
            let tenant = f.get(r, "tenant", claim);
            let tier = f.get(r, "tier", claim);
            let default_tenant = f.get(r, "default_tenant", Reader::reference);
            if !f.has("tenant") && !f.has("default_tenant") {
                let item = f.item().clone();
                let hint = "write `tenant: CLAIM`, or `default_tenant: NAME` for all of its tokens";
                let message = "nothing says which tenant a token belongs to".to_owned();
                r.wrong(&item, message, Some(hint.to_owned()));
            }
            let leeway = f.get(r, "leeway", |r, item| {
                let leeway = r.duration_or_zero(item)?;
                if leeway > LEEWAY_MAX {
                    let message = format!("{} is more than clocks differ by", shown(item));
                    let hint = "at most `10m`; `exp` says how long a token is good".to_owned();
                    r.wrong(item, message, Some(hint));
                }
                Some(leeway)
            });
            let issuer = issuer?;
            let at = name.unwrap_or_else(|| Named { name: "jwt".to_owned(), ..issuer.clone() });
            let text = |list: Vec<String>| list.into_iter().map(String::into_boxed_str).collect();
            let rules = Rules {
                issuer: issuer.name.as_str().into(),
                audiences: text(audiences?),
                algorithms: algorithms.unwrap_or_else(|| ALGORITHMS.to_vec()),
                tenant,
                tier,
                leeway: leeway.unwrap_or(LEEWAY),
            };
            Some(IssuerSpec { at, issuer, rules, keys: keys?, default_tenant })
        })
    })
}

const LEEWAY: Duration = Duration::from_secs(30);
const LEEWAY_MAX: Duration = Duration::from_mins(10);
/// What issuers sign with unless told otherwise.
const ALGORITHMS: &[Algorithm] = &[Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA];
const EVERY: Duration = Duration::from_mins(5);

fn algorithm<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Algorithm> {
    const KNOWN: &[&str] =
        &["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA"];
    let text = r.text(item)?;
    if KNOWN.contains(&text.as_str()) {
        return text.parse().ok();
    }
    let (message, hint) = match text.as_str() {
        "none" => (
            "a token that nobody signed opens nothing".to_owned(),
            Some("leave `algorithms` out for RS256, ES256 and EdDSA".to_owned()),
        ),
        "HS256" | "HS384" | "HS512" => (
            format!("{} checks with the secret that signs", shown(item)),
            Some("the published keys of `jwks` go with RS256, ES256 or EdDSA".to_owned()),
        ),
        _ => (
            format!("{} is no known algorithm", shown(item)),
            suggest(&text, KNOWN.iter().copied()),
        ),
    };
    r.wrong(item, message, hint);
    None
}

fn claim<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Claim> {
    let path = r.name(item)?;
    if path.starts_with('$') || path.split('.').any(str::is_empty) {
        let hint = "write the claim's name, or its path, as in `realm.team`".to_owned();
        r.wrong(item, format!("{} names no claim", shown(item)), Some(hint));
        return None;
    }
    Some(Claim::new(&path))
}

fn key_source<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<KeySource> {
    r.fields(item, |r, f| {
        let both = f.has("url") && f.has("file");
        if both || !(f.has("url") || f.has("file")) {
            let message = match both {
                true => "keys come from a `url` or from a `file`, not from both",
                false => "`url` or `file` is missing",
            };
            let hint = "`{ url: \"https://...\" }` or `{ file: jwks.json }`".to_owned();
            let item = f.item().clone();
            r.wrong(&item, message.to_owned(), Some(hint));
        }
        let url = f.get(r, "url", |r, item| {
            let text = r.parsed(item, value::web_url)?;
            if text.starts_with("http://") && !value::is_loopback(&text) {
                let message = "keys that come over `http://` can be replaced on their way";
                r.notice(item.pos(), &item.path, message.to_owned(), Severity::Advice);
            }
            Some(text)
        });
        let file = f.get(r, "file", |r, item| {
            let path = r.text(item)?;
            let set = r
                .file(&path)
                .and_then(|text| KeySet::parse(&text).map_err(|why| format!("{path}: {why}")));
            match set {
                Ok(set) => Some(KeySource::File { path: path.into(), set: Arc::new(set) }),
                Err(why) => {
                    r.wrong(item, format!("the keys cannot be read: {why}"), None);
                    None
                }
            }
        });
        let of_url = |r: &mut Reader<'a>, item: &Item<'a>| {
            if file.is_some() {
                let message = "this goes with `url` only".to_owned();
                r.wrong(item, message, None);
            }
        };
        let every = f.get(r, "every", |r, item| {
            of_url(r, item);
            let every = r.duration(item)?;
            if every < Duration::from_secs(1) {
                let message = format!("{} is too often", shown(item));
                r.wrong(item, message, Some("at least `1s`".to_owned()));
            }
            Some(every)
        });
        let ca = f.get(r, "ca", |r, item| {
            of_url(r, item);
            certificates(r, item)
        });
        match (url, file) {
            (Some(url), None) => {
                Some(KeySource::Url { url: Secret::new(url), ca, every: every.unwrap_or(EVERY) })
            }
            (None, file) => file,
            _ => None,
        }
    })
}
