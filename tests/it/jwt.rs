//! Goal: a token that an issuer signed opens what it names, for as long as its key is published.
//! Method: an issuer played by the test, which turns its keys, answers rubbish, and is away.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_RSA_SHA256};
use serde_json::{Value, json};

use crate::harness::*;

const ISSUER: &str = "https://sso.example.com";

struct Signer {
    key: EncodingKey,
    algorithm: Algorithm,
    kid: &'static str,
}

impl Signer {
    fn ec(kid: &'static str) -> Signer {
        let pem = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("a key").serialize_pem();
        let key = EncodingKey::from_ec_pem(pem.as_bytes()).expect("PEM");
        Signer { key, algorithm: Algorithm::ES256, kid }
    }

    fn rsa(kid: &'static str) -> Signer {
        let pem = KeyPair::generate_for(&PKCS_RSA_SHA256).expect("a key").serialize_pem();
        let key = EncodingKey::from_rsa_pem(pem.as_bytes()).expect("PEM");
        Signer { key, algorithm: Algorithm::RS256, kid }
    }

    fn token(&self, claims: &Value) -> String {
        let header = Header { kid: Some(self.kid.into()), ..Header::new(self.algorithm) };
        encode(&header, claims, &self.key).expect("signed")
    }

    /// A good one for this tenant.
    fn of(&self, tenant: &str) -> String {
        self.token(&claims(tenant))
    }
}

/// What an issuer publishes.
fn set(signers: &[&Signer]) -> String {
    let jwk = |signer: &&Signer| {
        let jwk = Jwk::from_encoding_key(&signer.key, signer.algorithm).expect("a public half");
        let mut jwk = serde_json::to_value(jwk).expect("JSON");
        jwk["kid"] = signer.kid.into();
        jwk
    };
    json!({ "keys": signers.iter().map(jwk).collect::<Vec<_>>() }).to_string()
}

fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs()
}

fn claims(tenant: &str) -> Value {
    json!({ "iss": ISSUER, "aud": ["forebay"], "exp": unix() + 600, "realm": { "team": tenant } })
}

/// The issuer's side: answers every request with what it was told last; a status if not 200.
struct Sso {
    url: String,
    says: Arc<Mutex<(u16, String)>>,
}

impl Sso {
    fn start(says: &str) -> Sso {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/keys?token=hunter2", listener.local_addr().expect("bound"));
        let says = Arc::new(Mutex::new((200, says.to_owned())));
        let said = Arc::clone(&says);
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut request = Vec::new();
                let mut piece = [0; 1024];
                while !request.ends_with(b"\r\n\r\n") {
                    match stream.read(&mut piece) {
                        Ok(count @ 1..) => request.extend_from_slice(&piece[..count]),
                        _ => break,
                    }
                }
                let (status, body) = said.lock().expect("no panic").clone();
                let head = format!(
                    "HTTP/1.1 {status} Status\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                    body.len()
                );
                let _ = stream.write_all((head + &body).as_bytes());
            }
        });
        Sso { url, says }
    }

    fn says(&self, status: u16, body: &str) {
        *self.says.lock().expect("no panic") = (status, body.to_owned());
    }

    fn jwks(&self) -> String {
        format!("{{ url: '{}', every: 1s }}", self.url)
    }
}

/// A configuration with static keys and one issuer.
fn config(backend: &Backend, jwks: &str, more: &str) -> String {
    format!(
        "{}jwt: {{ issuer: '{ISSUER}', audience: forebay, tenant: realm.team, jwks: {jwks}, {more} }}\n",
        Setup::to(backend.url()).text()
    )
}

fn with(token: &str) -> String {
    let body = r#"{"model":"m","messages":[]}"#;
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Asks until the answer has this status.
#[track_caller]
fn until(gateway: &Gateway, token: &str, status: u16) {
    wait_for("another status", || (gateway.ask(with(token)).status() == status).then_some(()));
}

#[test]
fn a_token_is_its_tenants_key() {
    let backend = Backend::kind();
    let (ec, rsa) = (Signer::ec("ec"), Signer::rsa("rsa"));
    let sso = Sso::start(&set(&[&ec, &rsa]));
    let text = config(&backend, &sso.jwks(), "default_tenant: b");
    let gateway = Gateway::run(
        &text.replace("a: { }, b: { }", "a: { models: [m] }, b: { deny_models: [m] }"),
    );
    for token in [ec.of("a"), rsa.of("a")] {
        for _ in 0..3 {
            let answer = gateway.ask(with(&token));
            assert_eq!(answer.status(), 200, "{}", answer.text());
        }
    }
    assert_eq!(backend.last().field("authorization"), None, "a token is not passed on");
    assert_eq!(gateway.ask(chat()).status(), 200, "static keys go on");
    gateway.booked("a", 49, 35);
    let mut nobody = claims("a");
    nobody.as_object_mut().expect("a map").remove("realm");
    let answer = gateway.ask(with(&ec.token(&nobody)));
    assert_eq!((answer.status(), answer.code().as_str()), (403, "model_not_allowed"));
    let list = format!(
        "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\r\n",
        ec.of("a")
    );
    assert_eq!(gateway.ask(list).json()["data"][0]["id"], "m");

    let log = gateway.log.count("\"key\":\"jwt\"", 8).join("\n");
    assert!(log.contains("\"tenant\":\"a\""), "{log}");
    assert!(!log.contains("eyJ"), "no token is in the log: {log}");
    let errors = gateway.errors().join("\n");
    assert!(!errors.contains("OPEN:") && !errors.contains("hunter2"), "{errors}");
}

#[test]
fn a_bad_token_is_refused_with_a_reason_and_never_repeated() {
    let backend = Backend::kind();
    let (ec, thief) = (Signer::ec("ec"), Signer::ec("ec"));
    let sso = Sso::start(&set(&[&ec]));
    // Without keys, so that a gateway with an issuer alone is seen not to be open.
    let text = config(&backend, &sso.jwks(), "");
    let (before, keys) = text.split_once("keys:\n").expect("keys");
    let gateway = Gateway::run(&format!("{before}{}", &keys[keys.find("jwt:").expect("jwt")..]));
    let with_claim = |name: &str, value: Value| {
        let mut claims = claims("a");
        claims[name] = value;
        ec.token(&claims)
    };
    for (token, why) in [
        (with_claim("exp", json!(unix() - 60)), "has expired"),
        (with_claim("nbf", json!(unix() + 60)), "not valid yet"),
        (with_claim("aud", json!("other")), "another audience"),
        (with_claim("iss", json!("https://evil")), "issuer is not known"),
        (with_claim("groups", json!("g".repeat(9_000))), "too long"),
        (thief.of("a"), "signature is wrong"),
        (Signer::ec("new").of("a"), "signing key is not known"),
        (Signer::rsa("ec").of("a"), "algorithm"),
    ] {
        let answer = gateway.ask(with(&token));
        assert_eq!((answer.status(), answer.code().as_str()), (401, "invalid_token"), "{why}");
        assert!(answer.text().contains(why), "{why}: {}", answer.text());
        assert_eq!(answer.head.field("www-authenticate"), Some("Bearer error=\"invalid_token\""));
        assert!(!answer.text().contains(&token[..20]), "a token is never repeated");
    }
    for (token, code) in [
        (ec.of("nobody"), "tenant_unknown"),
        (with_claim("realm", json!({ "team": ["a"] })), "tenant_unknown"),
        (with_claim("realm", json!({})), "tenant_unknown"),
    ] {
        let answer = gateway.ask(with(&token));
        assert_eq!((answer.status(), answer.code().as_str()), (403, code));
    }
    for key in ["sk-x", "a.b.c", "", "eyJhbGciOiJub25lIn0..x", KEY_A] {
        let answer = gateway.ask(with(key));
        assert_eq!(answer.status(), 401, "{key}");
    }
    assert_eq!(backend.count(), 0);
    assert_eq!(gateway.ask(with(&ec.of("a"))).status(), 200);
}

#[test]
fn keys_turn_and_the_last_good_set_stays_while_the_issuer_is_away() {
    let backend = Backend::kind();
    let (first, second) = (Signer::ec("first"), Signer::rsa("second"));
    let sso = Sso::start("<html>not yet</html>");
    let gateway = Gateway::run(&config(&backend, &sso.jwks(), ""));
    assert_eq!(gateway.ask(with(&first.of("a"))).status(), 401);
    gateway.said("issuer_without_keys");
    assert_eq!(gateway.ask(chat()).status(), 200, "static keys do not wait for an issuer");

    let (old, new) = (first.of("a"), second.of("b"));
    sso.says(200, &set(&[&first]));
    until(&gateway, &old, 200);
    assert_eq!(gateway.ask(with(&new)).status(), 401);
    sso.says(200, &set(&[&first, &second]));
    until(&gateway, &new, 200);
    assert_eq!(gateway.ask(with(&old)).status(), 200);
    assert_eq!(gateway.metric("forebay_jwks_keys", &["issuer=\"jwt\""]), 2.0);

    // A key that is gone opens nothing, whoever remembers its tokens.
    sso.says(200, &set(&[&second]));
    until(&gateway, &old, 401);
    assert!(gateway.ask(with(&old)).text().contains("signing key is not known"));
    assert_eq!(gateway.ask(with(&new)).status(), 200);

    let failed = || gateway.metric("forebay_jwks_refreshes_total", &["result=\"failed\""]);
    for (status, body) in [(503, String::new()), (200, "{}".into()), (200, "x".repeat(300_000))] {
        let before = failed();
        sso.says(status, &body);
        wait_for("two failures", || (failed() >= before + 2.0).then_some(()));
        assert_eq!(gateway.ask(with(&new)).status(), 200, "the last good set stays");
        assert_eq!(gateway.ask(with(&second.of("a"))).status(), 200, "also for new tokens");
    }
    let errors = gateway.errors().join("\n");
    assert!(errors.contains("jwks_refresh_failed") && errors.contains("answered 503"), "{errors}");
    assert!(!errors.contains("hunter2"), "{errors}");

    // A plan without its tenant does not know its token any more, although its key is there.
    sso.says(200, &set(&[&second]));
    let text = config(&backend, &sso.jwks(), "");
    let (before, rest) = text.split_once("  - { id: key-b").expect("key-b");
    let rest = &rest[rest.find('\n').expect("a line") + 1..];
    gateway.configure(&format!("{before}{rest}").replace("a: { }, b: { }", "a: { }"));
    assert_eq!(gateway.admin_post("/reload", "").0, 200);
    assert_eq!(gateway.ask(with(&new)).code(), "tenant_unknown");
    assert_eq!(gateway.ask(with(&second.of("a"))).status(), 200);
}

#[test]
fn a_file_of_keys_is_followed() {
    let backend = Backend::kind();
    let (first, second) = (Signer::ec("first"), Signer::ec("second"));
    let folder = Folder::new();
    let file = folder.0.join("jwks.json");
    let publish = |text: &str| {
        let fresh = folder.0.join("fresh");
        std::fs::write(&fresh, text).expect("written");
        std::fs::rename(fresh, &file).expect("renamed");
    };
    publish(&set(&[&first]));
    let jwks = format!("{{ file: '{}' }}", file.display());
    let gateway = Gateway::run(&config(&backend, &jwks, ""));
    let (old, new) = (first.of("a"), second.of("a"));
    assert_eq!(gateway.ask(with(&old)).status(), 200);
    publish(&set(&[&first, &second]));
    until(&gateway, &new, 200);
    publish(&set(&[&second]));
    until(&gateway, &old, 401);
    publish("broken");
    gateway.said("jwks_refresh_failed");
    assert_eq!(gateway.ask(with(&new)).status(), 200);
    // As with every file that a configuration names, a reload takes it whole or not at all.
    assert_ne!(gateway.admin_post("/reload", "").0, 200);
    publish(&set(&[&first]));
    assert_eq!(gateway.admin_post("/reload", "").0, 200);
    assert_eq!(gateway.ask(with(&old)).status(), 200);
    assert_eq!(gateway.ask(with(&new)).status(), 401);
}

#[test]
fn a_token_names_the_tier_whose_limits_count_for_it() {
    let backend = Backend::kind();
    let ec = Signer::ec("ec");
    let sso = Sso::start(&set(&[&ec]));
    let text = config(&backend, &sso.jwks(), "tier: plan")
        .replace("a: { }, b: { }", "a: { }, b: { tier: two }");
    let text = format!("{text}tiers: {{ one: {{ rpm: 1 }}, two: {{ rpm: 2 }} }}\n");
    let gateway = Gateway::run(&text);
    let ask = |tenant: &str, tier: &str| {
        let mut claims = claims(tenant);
        claims["plan"] = tier.into();
        gateway.ask(with(&ec.token(&claims)))
    };
    assert_eq!(ask("a", "one").head.field("x-ratelimit-limit-requests"), Some("1"));
    assert_eq!(ask("a", "one").status(), 429);
    assert_eq!(ask("a", "two").status(), 200, "tiers are counted apart");
    assert_eq!(ask("a", "two").status(), 200);
    assert_eq!(ask("a", "two").status(), 429);
    assert_eq!(
        ask("b", "one").head.field("x-ratelimit-limit-requests"),
        Some("2"),
        "the file's word"
    );
    let answer = ask("a", "gold");
    assert_eq!((answer.status(), answer.code().as_str()), (403, "tier_unknown"));
    assert_eq!(
        gateway.ask(with(&ec.of("a"))).status(),
        200,
        "no tier is named, and none is needed"
    );
}
