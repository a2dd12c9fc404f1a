//! JSON Web Tokens as keys: who signed one, for whom, and until when (RFC 7519, with the advice of
//! RFC 8725).
//!
//! A token chooses nothing about how it is checked. Its issuer must be one of the file's, its key one
//! that this issuer publishes, under an algorithm that both the file and the key's own kind allow;
//! keys or addresses of keys that its header brings along are not looked at. Only when the signature
//! is good do the claims count, and each must be there and have the right form.
//!
//! Checking a signature costs 50 to 150 µs, which a shard can afford once per token and not once per
//! request: a [`Cache`] remembers who has been let in, until the token expires or any key or the plan
//! changes. A bad token is not remembered, since strangers can make any number of them.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use foldhash::fast::FixedState;
pub use jsonwebtoken::Algorithm;
use jsonwebtoken::DecodingKey;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, PublicKeyUse};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// What an issuer's tokens must say: an element of `jwt` in the file.
#[derive(Clone, Debug)]
pub struct Rules {
    /// `iss`, exactly.
    pub issuer: Box<str>,
    /// `aud` must hold one of these.
    pub audiences: Vec<Box<str>>,
    pub algorithms: Vec<Algorithm>,
    /// The claim that names the tenant.
    pub tenant: Option<Claim>,
    /// The claim that names a tier.
    pub tier: Option<Claim>,
    /// By how much the issuer's clock and ours may differ.
    pub leeway: Duration,
}

/// Where a value stands among the claims: a name, or a path of names with dots between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim(Box<str>);

impl Claim {
    pub fn new(path: &str) -> Claim {
        Claim(path.into())
    }

    /// A claim that has the whole path for its name comes first: Auth0 names its own
    /// `https://example.com/tenant`.
    fn of<'c>(&self, claims: &'c Map<String, Value>) -> Option<&'c Value> {
        if let Some(whole) = claims.get(&*self.0) {
            return Some(whole);
        }
        let (first, rest) = self.0.split_once('.')?;
        rest.split('.').try_fold(claims.get(first)?, |value, name| value.get(name))
    }

    /// The name that it holds; `None` where it is absent or null.
    fn name(&self, claims: &Map<String, Value>) -> Result<Option<Box<str>>, ()> {
        match self.of(claims) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(name)) => Ok(Some(name.as_str().into())),
            Some(_) => Err(()),
        }
    }
}

/// What a token that is good says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Which of the rules it stands under.
    pub issuer: usize,
    pub tenant: Option<Box<str>>,
    pub tier: Option<Box<str>>,
    /// The first second (since 1970, UTC) at which it is no longer good, leeway included.
    pub until: u64,
}

/// Why a token opens nothing. In general terms: who has stolen or made one learns little.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    /// Not three parts of which the first is a header with `alg`: perhaps a key that we do not know.
    NotOne,
    TooLong,
    /// Its claims are no JSON object, name one twice, or lack what is needed.
    Malformed,
    Issuer,
    /// None of those that are allowed, or not one of its key.
    Algorithm,
    /// The issuer's keys have none of this `kid`.
    Key,
    Signature,
    Expired,
    NotYet,
    Audience,
    /// The claim that should name a tenant, or a tier, holds something else.
    TenantClaim,
    TierClaim,
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Bad::NotOne => "it is not a token",
            Bad::TooLong => "it is too long",
            Bad::Malformed => "its claims cannot be used",
            Bad::Issuer => "its issuer is not known here",
            Bad::Algorithm => "it is signed by an algorithm that is not allowed here",
            Bad::Key => "its signing key is not known here",
            Bad::Signature => "its signature is wrong",
            Bad::Expired => "it has expired",
            Bad::NotYet => "it is not valid yet",
            Bad::Audience => "it is for another audience",
            Bad::TenantClaim => "it does not name a tenant",
            Bad::TierClaim => "it does not name a tier",
        })
    }
}

/// Checks `token` at `unix` (seconds since 1970, UTC) against rules of distinct issuers, each with its
/// keys as far as they are known. Allocates, and checks one signature at most, once the issuer, the
/// algorithm and the key are known to be right.
///
/// # Errors
/// The first thing that is wrong with it, the signature before any claim but `iss`.
pub fn verify<'r>(
    token: &[u8],
    rules: impl IntoIterator<Item = (&'r Rules, Option<&'r KeySet>)>,
    unix: u64,
) -> Result<Verified, Bad> {
    let token = std::str::from_utf8(token).map_err(|_| Bad::NotOne)?;
    let (message, signature) = token.rsplit_once('.').ok_or(Bad::NotOne)?;
    let (header, payload) = message.split_once('.').ok_or(Bad::NotOne)?;
    if payload.contains('.') {
        return Err(Bad::NotOne);
    }
    if token.len() > TOKEN_BYTES_MAX {
        return Err(Bad::TooLong);
    }
    let header: Header = part(header).ok_or(Bad::NotOne)?;
    // Extensions that must be understood (RFC 7515 4.1.11): there are none that we do.
    if header.crit.is_some() {
        return Err(Bad::Malformed);
    }
    let claims: Claims = part(payload).ok_or(Bad::Malformed)?;
    let claims = claims.0;
    let issuer = claims.get("iss").and_then(Value::as_str).ok_or(Bad::Malformed)?;
    let found = rules.into_iter().enumerate().find(|(_, (rules, _))| *rules.issuer == *issuer);
    let (issuer, (rules, keys)) = found.ok_or(Bad::Issuer)?;

    let algorithm = header.alg.parse::<Algorithm>().map_err(|_| Bad::Algorithm)?;
    if !rules.algorithms.contains(&algorithm) {
        return Err(Bad::Algorithm);
    }
    let key = keys.ok_or(Bad::Key)?.key(header.kid.as_deref(), algorithm)?;
    match jsonwebtoken::crypto::verify(signature, message.as_bytes(), key, algorithm) {
        Ok(true) => {}
        Ok(false) | Err(_) => return Err(Bad::Signature),
    }

    let leeway = rules.leeway.as_secs();
    let until = moment(&claims, "exp")?.ok_or(Bad::Malformed)?.saturating_add(leeway);
    if unix >= until {
        return Err(Bad::Expired);
    }
    if moment(&claims, "nbf")?.is_some_and(|begins| begins > unix.saturating_add(leeway)) {
        return Err(Bad::NotYet);
    }
    let ours = |audience: &str| rules.audiences.iter().any(|own| **own == *audience);
    let for_us = match claims.get("aud") {
        Some(Value::String(one)) => ours(one),
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).any(ours),
        _ => false,
    };
    if !for_us {
        return Err(Bad::Audience);
    }
    let name = |claim: &Option<Claim>| claim.as_ref().map_or(Ok(None), |of| of.name(&claims));
    Ok(Verified {
        issuer,
        tenant: name(&rules.tenant).map_err(|()| Bad::TenantClaim)?,
        tier: name(&rules.tier).map_err(|()| Bad::TierClaim)?,
        until,
    })
}

/// Larger than any that issuers give out (Entra's with many groups have 4 KB or so).
const TOKEN_BYTES_MAX: usize = 8 * 1024;

/// What of a token's header is looked at.
#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    crit: Option<Value>,
}

fn part<T: serde::de::DeserializeOwned>(text: &str) -> Option<T> {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(text).ok()?).ok()
}

/// A `NumericDate` in whole seconds.
fn moment(claims: &Map<String, Value>, name: &str) -> Result<Option<u64>, Bad> {
    let Some(value) = claims.get(name) else { return Ok(None) };
    let seconds = value.as_f64().filter(|seconds| *seconds >= 0.0).ok_or(Bad::Malformed)?;
    // Saturates, and drops the part of a second that RFC 7519 allows.
    Ok(Some(seconds as u64))
}

/// An object none of whose names comes twice, at any depth: who reads the first and who reads the last
/// would let in two different people (RFC 7519 4).
struct Claims(Map<String, Value>);

impl<'de> Deserialize<'de> for Claims {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Claims, D::Error> {
        match Unique::deserialize(deserializer)?.0 {
            Value::Object(claims) => Ok(Claims(claims)),
            _ => Err(D::Error::custom("claims are an object")),
        }
    }
}

struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Unique, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Unique)
    }
}

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut out = Vec::new();
        while let Some(Unique(value)) = list.next_element()? {
            out.push(value);
        }
        Ok(Value::Array(out))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut out = Map::new();
        while let Some((name, Unique(value))) = map.next_entry::<String, Unique>()? {
            if out.insert(name, value).is_some() {
                return Err(A::Error::custom("a name comes twice"));
            }
        }
        Ok(Value::Object(out))
    }
}

/// The public keys of one issuer that can check signatures.
#[derive(Debug)]
pub struct KeySet(Vec<SigningKey>);

#[derive(Debug)]
struct SigningKey {
    jwk: Jwk,
    kid: Box<str>,
    algorithms: Vec<Algorithm>,
    key: DecodingKey,
}

impl PartialEq for KeySet {
    fn eq(&self, other: &KeySet) -> bool {
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(|(a, b)| a.jwk == b.jwk)
    }
}

/// A text that is no set of keys, or one of which no key can check a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoKeys {
    NotASet,
    NoneUsable,
    TooMany,
}

impl fmt::Display for NoKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoKeys::NotASet => f.write_str("not a JSON object with a list of `keys` (RFC 7517)"),
            NoKeys::NoneUsable => f.write_str(
                "no key in it can check signatures: an RSA, P-256, P-384 or Ed25519 key with a `kid` \
                 is needed",
            ),
            NoKeys::TooMany => write!(f, "more than {KEYS_MAX} keys"),
        }
    }
}

/// An issuer that turns its keys has two or three.
const KEYS_MAX: usize = 64;

impl KeySet {
    /// A JWK Set (RFC 7517 5). Keys for other uses, of other kinds, of no name, and secret ones are
    /// passed over, as the RFC asks.
    ///
    /// # Errors
    /// Nothing is left, or it is not a set.
    pub fn parse(text: &str) -> Result<KeySet, NoKeys> {
        let set: Value = serde_json::from_str(text).map_err(|_| NoKeys::NotASet)?;
        let list = set.get("keys").and_then(Value::as_array).ok_or(NoKeys::NotASet)?;
        if list.len() > KEYS_MAX {
            return Err(NoKeys::TooMany);
        }
        let keys: Vec<SigningKey> = list.iter().filter_map(SigningKey::of).collect();
        if keys.is_empty() { Err(NoKeys::NoneUsable) } else { Ok(KeySet(keys)) }
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Never: a set without keys is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn key(&self, kid: Option<&str>, algorithm: Algorithm) -> Result<&DecodingKey, Bad> {
        let mut named = self.0.iter().filter(|key| Some(&*key.kid) == kid).peekable();
        named.peek().ok_or(Bad::Key)?;
        let fits = named.find(|key| key.algorithms.contains(&algorithm));
        fits.map(|key| &key.key).ok_or(Bad::Algorithm)
    }
}

impl SigningKey {
    fn of(value: &Value) -> Option<SigningKey> {
        let mut jwk = Jwk::deserialize(value).ok()?;
        let common = &mut jwk.common;
        // Chains of certificates change while the key stays.
        (common.x509_chain, common.x509_url) = (None, None);
        if common.public_key_use.as_ref().is_some_and(|use_| *use_ != PublicKeyUse::Signature) {
            return None;
        }
        let of_kind: &[Algorithm] = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => RSA,
            AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => {
                &[Algorithm::ES256]
            }
            AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P384 => {
                &[Algorithm::ES384]
            }
            AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => {
                &[Algorithm::EdDSA]
            }
            _ => return None,
        };
        let own = |algorithm: &Algorithm| {
            jwk.common.key_algorithm.is_none_or(|own| own == KeyAlgorithm::from(*algorithm))
        };
        let algorithms: Vec<Algorithm> = of_kind.iter().copied().filter(own).collect();
        if algorithms.is_empty() {
            return None;
        }
        let kid = jwk.common.key_id.as_deref().filter(|kid| !kid.is_empty())?;
        let (kid, key) = (kid.into(), DecodingKey::from_jwk(&jwk).ok()?);
        Some(SigningKey { kid, algorithms, key, jwk })
    }
}

const RSA: &[Algorithm] = &[
    Algorithm::RS256,
    Algorithm::RS384,
    Algorithm::RS512,
    Algorithm::PS256,
    Algorithm::PS384,
    Algorithm::PS512,
];

/// The keys of all issuers, by where they come from. Replaced whole.
#[derive(Clone, Debug, Default)]
pub struct KeySets {
    /// Another one with each change of any key.
    pub generation: u64,
    pub of: BTreeMap<Box<str>, Known>,
}

/// What is known of one source of keys.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// The last good one.
    pub set: Option<Arc<KeySet>>,
    pub refreshed: u64,
    pub failed: u64,
}

impl KeySets {
    pub fn set(&self, source: &str) -> Option<&KeySet> {
        self.of.get(source)?.set.as_deref()
    }
}

/// Who was let in, by the SHA-256 of the token: a bounded memory of the last thousand or so.
#[derive(Debug)]
pub struct Cache<T> {
    /// Those seen since the last turn, and those of before it.
    young: Remembered<T>,
    old: Remembered<T>,
}

type Remembered<T> = HashMap<[u8; 32], (T, u64), FixedState>;

impl<T> Default for Cache<T> {
    fn default() -> Cache<T> {
        Cache { young: Remembered::default(), old: Remembered::default() }
    }
}

impl<T: Copy> Cache<T> {
    /// Of two halves, the one that was not asked for lately is forgotten when the other is full.
    const HALF: usize = 512;

    /// Who it is, if the token was seen and is good until after `unix`. Two hash lookups at most.
    pub fn get(&mut self, digest: &[u8; 32], unix: u64) -> Option<T> {
        let (who, until) = match self.young.get(digest) {
            Some(found) => *found,
            None => {
                let found = self.old.remove(digest)?;
                self.insert(*digest, found.0, found.1);
                found
            }
        };
        (unix < until).then_some(who)
    }

    pub fn insert(&mut self, digest: [u8; 32], who: T, until: u64) {
        if self.young.len() >= Self::HALF {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(digest, (who, until));
    }

    pub fn clear(&mut self) {
        self.young.clear();
        self.old.clear();
    }
}

#[cfg(test)]
mod tests;
