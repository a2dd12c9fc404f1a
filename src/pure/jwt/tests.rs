//! Goal: a token opens what its issuer said, or nothing.
//! Method: one good token, and every way of spoiling it; then bytes at random.

use jsonwebtoken::{EncodingKey, Header as Written, encode};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, PKCS_RSA_SHA256};
use serde_json::json;

use super::*;
use crate::pure::units::Rng;

const NOW: u64 = 1_800_000_000;

/// A key that signs, and its public half as an issuer publishes it.
struct Signer {
    key: EncodingKey,
    public: Vec<u8>,
    algorithm: Algorithm,
    kid: &'static str,
}

impl Signer {
    fn new(algorithm: Algorithm, kid: &'static str) -> Signer {
        let kind = match algorithm {
            Algorithm::ES256 => &PKCS_ECDSA_P256_SHA256,
            Algorithm::EdDSA => &PKCS_ED25519,
            _ => &PKCS_RSA_SHA256,
        };
        let pair = KeyPair::generate_for(kind).expect("a key");
        let (pem, public) = (pair.serialize_pem(), pair.public_key_raw().to_vec());
        let key = match algorithm {
            Algorithm::ES256 => EncodingKey::from_ec_pem(pem.as_bytes()),
            Algorithm::EdDSA => EncodingKey::from_ed_pem(pem.as_bytes()),
            _ => EncodingKey::from_rsa_pem(pem.as_bytes()),
        };
        Signer { key: key.expect("PEM"), public, algorithm, kid }
    }

    fn jwk(&self) -> Value {
        let mut jwk = match self.algorithm {
            Algorithm::EdDSA => {
                let x = URL_SAFE_NO_PAD.encode(&self.public);
                json!({ "kty": "OKP", "crv": "Ed25519", "x": x })
            }
            algorithm => {
                let jwk = Jwk::from_encoding_key(&self.key, algorithm).expect("a public half");
                serde_json::to_value(jwk).expect("JSON")
            }
        };
        jwk["kid"] = self.kid.into();
        jwk["use"] = "sig".into();
        jwk
    }

    fn sign(&self, claims: &Value) -> String {
        let header = Written { kid: Some(self.kid.into()), ..Written::new(self.algorithm) };
        encode(&header, claims, &self.key).expect("signed")
    }

    /// Header and claims as they are, signed truly.
    fn sign_raw(&self, header: &str, claims: &str) -> String {
        let message =
            format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(claims));
        let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &self.key, self.algorithm);
        format!("{message}.{}", signature.expect("signed"))
    }
}

fn set(keys: &[Value]) -> KeySet {
    KeySet::parse(&json!({ "keys": keys }).to_string()).expect("keys")
}

fn rules(issuer: &str) -> Rules {
    Rules {
        issuer: issuer.into(),
        audiences: vec!["forebay".into(), "api://gateway".into()],
        algorithms: vec![Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA],
        tenant: Some(Claim::new("realm.team")),
        tier: Some(Claim::new("plan")),
        leeway: Duration::from_secs(30),
    }
}

fn claims() -> Value {
    json!({
        "iss": "https://sso", "aud": "forebay", "exp": NOW + 60, "nbf": NOW - 60, "sub": "u",
        "realm": { "team": "a" }, "plan": "pro",
    })
}

fn with(name: &str, value: Value) -> Value {
    let mut claims = claims();
    claims[name] = value;
    claims
}

#[test]
fn a_token_opens_what_it_says_only_if_all_of_it_is_right() {
    let ec = Signer::new(Algorithm::ES256, "ec");
    let other = Signer::new(Algorithm::ES256, "other");
    let impostor = Signer::new(Algorithm::ES256, "ec");
    let (ours, theirs) = (rules("https://sso"), rules("https://elsewhere"));
    let (our_keys, their_keys) = (set(&[ec.jwk()]), set(&[other.jwk()]));
    let check = |token: &str| {
        verify(token.as_bytes(), [(&theirs, Some(&their_keys)), (&ours, Some(&our_keys))], NOW)
    };
    let good = ec.sign(&claims());
    let said = check(&good).expect("good");
    let name = |name: &str| Some(Box::<str>::from(name));
    assert_eq!(said, Verified { issuer: 1, tenant: name("a"), tier: name("pro"), until: NOW + 90 });

    let cases = [
        ("expired", with("exp", json!(NOW - 31)), Err(Bad::Expired)),
        ("expired to the second", with("exp", json!(NOW - 30)), Err(Bad::Expired)),
        ("within the leeway", with("exp", json!(NOW - 29)), Ok(())),
        ("parts of a second", with("exp", json!(NOW as f64 + 0.5)), Ok(())),
        ("no end", with("exp", Value::Null), Err(Bad::Malformed)),
        ("an end in words", with("exp", json!("never")), Err(Bad::Malformed)),
        ("an end before 1970", with("exp", json!(-1)), Err(Bad::Malformed)),
        ("not yet", with("nbf", json!(NOW + 31)), Err(Bad::NotYet)),
        ("soon", with("nbf", json!(NOW + 30)), Ok(())),
        ("nbf in words", with("nbf", json!("now")), Err(Bad::Malformed)),
        ("another issuer", with("iss", json!("https://evil")), Err(Bad::Issuer)),
        ("an issuer with a slash", with("iss", json!("https://sso/")), Err(Bad::Issuer)),
        ("two issuers", with("iss", json!(["https://sso"])), Err(Bad::Malformed)),
        ("signed by one for another", with("iss", json!("https://elsewhere")), Err(Bad::Key)),
        ("another audience", with("aud", json!("other")), Err(Bad::Audience)),
        ("no audience", with("aud", Value::Null), Err(Bad::Audience)),
        ("no audiences", with("aud", json!([])), Err(Bad::Audience)),
        ("one of two audiences", with("aud", json!(["x", "api://gateway"])), Ok(())),
        ("an audience that is a map", with("aud", json!({"forebay": 1})), Err(Bad::Audience)),
        ("a tenant that is a number", with("realm", json!({"team": 7})), Err(Bad::TenantClaim)),
        ("a tenant that is a list", with("realm", json!({"team": ["a"]})), Err(Bad::TenantClaim)),
        ("a tier that is a list", with("plan", json!(["pro"])), Err(Bad::TierClaim)),
    ];
    for (what, claims, expected) in cases {
        assert_eq!(check(&ec.sign(&claims)).map(drop), expected, "{what}");
    }
    let said = check(&ec.sign(&with("realm", json!("flat")))).expect("good");
    assert_eq!(said.tenant, None);
    // A claim's whole name comes before a path.
    let said = check(&ec.sign(&with("realm.team", json!("b")))).expect("good");
    assert_eq!(said.tenant, name("b"));

    assert_eq!(check(&impostor.sign(&claims())), Err(Bad::Signature), "another's key, our kid");
    assert_eq!(check(&other.sign(&claims())), Err(Bad::Key), "the kid of another issuer");
    assert_eq!(verify(good.as_bytes(), [(&ours, None)], NOW), Err(Bad::Key), "no keys yet");
    assert_eq!(verify(good.as_bytes(), [], NOW), Err(Bad::Issuer));
    let text = claims().to_string();
    for (what, header, expected) in [
        ("no kid", r#"{"alg":"ES256"}"#, Bad::Key),
        ("kid null", r#"{"alg":"ES256","kid":null}"#, Bad::Key),
        ("kid unknown", r#"{"alg":"ES256","kid":"../../ec"}"#, Bad::Key),
        ("alg of another kind", r#"{"alg":"RS256","kid":"ec"}"#, Bad::Algorithm),
        ("alg not allowed", r#"{"alg":"ES384","kid":"ec"}"#, Bad::Algorithm),
        ("alg unknown", r#"{"alg":"XS256","kid":"ec"}"#, Bad::Algorithm),
        ("alg none", r#"{"alg":"none","kid":"ec"}"#, Bad::Algorithm),
        ("alg nOnE", r#"{"alg":"nOnE","kid":"ec"}"#, Bad::Algorithm),
        ("alg missing", r#"{"kid":"ec"}"#, Bad::NotOne),
        ("alg twice", r#"{"alg":"none","alg":"ES256","kid":"ec"}"#, Bad::NotOne),
        ("extension", r#"{"alg":"ES256","kid":"ec","crit":["b64"],"b64":false}"#, Bad::Malformed),
    ] {
        assert_eq!(check(&ec.sign_raw(header, &text)), Err(expected), "{what}");
    }
    // A key or its address in the header is not looked at.
    let brought =
        json!({ "alg": "ES256", "kid": "ec", "jwk": impostor.jwk(), "jku": "http://evil" });
    assert_eq!(check(&impostor.sign_raw(&brought.to_string(), &text)), Err(Bad::Signature));

    let header = r#"{"alg":"ES256","kid":"ec"}"#;
    for claims in [
        text.replace("\"sub\":\"u\"", "\"aud\":\"forebay\",\"aud\":\"forebay\""),
        text.replace("{\"team\":\"a\"}", "{\"team\":\"a\",\"team\":\"b\"}"),
        text.replace("\"sub\":\"u\"", "\"exp\":99999999999"),
        "[]".to_owned(),
        "\"x\"".to_owned(),
        String::new(),
        format!("{text} x"),
        format!("{}1{}", "[".repeat(500), "]".repeat(500)),
    ] {
        assert_eq!(check(&ec.sign_raw(header, &claims)), Err(Bad::Malformed), "{claims}");
    }
    let huge = ec.sign(&with("groups", json!("g".repeat(8_000))));
    assert_eq!(check(&huge), Err(Bad::TooLong));
    let (message, _) = good.rsplit_once('.').expect("three parts");
    for token in ["", ".", "..", "...", "a.b.c", "sk-live-1.2.3", message, &format!("{good}.x")] {
        assert_eq!(check(token), Err(Bad::NotOne), "{token}");
    }
    assert_eq!(check(&format!("{message}.")), Err(Bad::Signature));
    assert_eq!(check(&format!("{good}=")), Err(Bad::Signature));
}

#[test]
fn the_public_key_is_no_secret_that_signs() {
    // The confusion of RFC 8725 2.1: signed by HMAC with what everybody can read.
    let rsa = Signer::new(Algorithm::RS256, "rsa");
    let keys = set(&[rsa.jwk()]);
    let jwk = rsa.jwk();
    let text = claims().to_string();
    let mut generous = rules("https://sso");
    generous.algorithms.push(Algorithm::HS256);
    let secrets = [jwk.to_string(), jwk["n"].as_str().expect("a modulus").to_owned()];
    for secret in secrets {
        let hmac = Signer {
            key: EncodingKey::from_secret(secret.as_bytes()).expect("a secret"),
            public: Vec::new(),
            algorithm: Algorithm::HS256,
            kid: "rsa",
        };
        for header in [r#"{"alg":"HS256","kid":"rsa"}"#, r#"{"alg":"RS256","kid":"rsa"}"#] {
            let token = hmac.sign_raw(header, &text);
            for rules in [&rules("https://sso"), &generous] {
                let got = verify(token.as_bytes(), [(rules, Some(&keys))], NOW);
                assert!(matches!(got, Err(Bad::Algorithm | Bad::Signature)), "{header}: {got:?}");
            }
        }
    }
    let good = rsa.sign(&claims());
    assert!(verify(good.as_bytes(), [(&rules("https://sso"), Some(&keys))], NOW).is_ok());
}

#[test]
fn a_set_keeps_what_can_check_signatures_and_nothing_else() {
    let rsa = Signer::new(Algorithm::RS256, "rsa");
    let ed = Signer::new(Algorithm::EdDSA, "ed");
    let ec = Signer::new(Algorithm::ES256, "ec");
    let but = |jwk: &Value, name: &str, value: Value| {
        let mut jwk = jwk.clone();
        jwk[name] = value;
        jwk
    };
    let odd = [
        but(&rsa.jwk(), "use", json!("enc")),
        but(&rsa.jwk(), "kid", Value::Null),
        but(&rsa.jwk(), "kid", json!("")),
        but(&rsa.jwk(), "alg", json!("RSA-OAEP")),
        but(&rsa.jwk(), "alg", json!("ES256")),
        but(&ec.jwk(), "crv", json!("secp256k1")),
        but(&ec.jwk(), "x", json!("!!")),
        json!({ "kty": "oct", "kid": "oct", "k": "c2VjcmV0", "alg": "HS256" }),
        json!({ "kty": "new", "kid": "new" }),
        json!(7),
        Value::Null,
    ];
    let parse = |keys: &[Value]| KeySet::parse(&json!({ "keys": keys }).to_string());
    for jwk in &odd {
        assert_eq!(parse(std::slice::from_ref(jwk)).err(), Some(NoKeys::NoneUsable), "{jwk}");
    }
    let mut all = odd.to_vec();
    all.extend([rsa.jwk(), ed.jwk(), ec.jwk()]);
    let keys = set(&all);
    assert_eq!(keys.len(), 3);
    for signer in [&rsa, &ed, &ec] {
        let token = signer.sign(&claims());
        let got = verify(token.as_bytes(), [(&rules("https://sso"), Some(&keys))], NOW);
        assert!(got.is_ok(), "{got:?}");
    }
    // Chains of certificates are renewed while the key stays.
    let chained = but(&rsa.jwk(), "x5c", json!(["AAAA"]));
    assert_eq!(set(&[rsa.jwk()]), set(&[chained]));
    assert_ne!(set(&[rsa.jwk()]), set(&[ec.jwk()]));
    for text in ["", "{}", "[]", "{\"keys\":7}", "<html>", "{\"keys\":[]"] {
        assert_eq!(KeySet::parse(text).err(), Some(NoKeys::NotASet), "{text}");
    }
    assert_eq!(parse(&[]).err(), Some(NoKeys::NoneUsable));
    assert_eq!(parse(&vec![rsa.jwk(); 65]).err(), Some(NoKeys::TooMany));
}

#[test]
fn what_strangers_send_never_panics_and_opens_nothing() {
    let ec = Signer::new(Algorithm::ES256, "ec");
    let (rules, keys) = (rules("https://sso"), set(&[ec.jwk()]));
    let good = ec.sign(&claims());
    let mut rng = Rng::seeded(7);
    let mut below = |most: usize| (rng.next_u64() % most as u64) as usize;
    for _ in 0..20_000 {
        let mut token = good.clone().into_bytes();
        match below(4) {
            0 => token.truncate(below(token.len())),
            1 => {
                for _ in 0..=below(3) {
                    let at = below(token.len());
                    token[at] = below(256) as u8;
                }
            }
            2 => {
                let at = below(token.len());
                token.insert(at, b'.');
            }
            _ => token = (0..below(200)).map(|_| below(256) as u8).collect(),
        }
        if token != good.as_bytes() {
            assert!(verify(&token, [(&rules, Some(&keys))], NOW).is_err(), "{token:?}");
        }
        // The same as the claims of a good signature would be read.
        let _ = part::<Claims>(&String::from_utf8_lossy(&token));
    }
}

#[test]
fn the_cache_is_bounded_and_forgets_what_is_over() {
    let digest = |number: u64| {
        let mut digest = [0; 32];
        digest[..8].copy_from_slice(&number.to_be_bytes());
        digest
    };
    let mut cache = Cache::default();
    cache.insert(digest(0), 0_u64, 100);
    assert_eq!((cache.get(&digest(0), 99), cache.get(&digest(0), 100)), (Some(0), None));
    assert_eq!(cache.get(&digest(1), 0), None);
    for number in 1..10_000 {
        cache.insert(digest(number), number, 100);
        // Who keeps asking stays.
        assert_eq!(cache.get(&digest(0), 1), Some(0));
        assert!(cache.young.len() + cache.old.len() <= 1_024);
    }
    assert_eq!(cache.get(&digest(9_999), 1), Some(9_999));
    assert_eq!(cache.get(&digest(5), 1), None);
    cache.clear();
    assert_eq!(cache.get(&digest(0), 1), None);
}
