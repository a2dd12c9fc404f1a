//! Keys at run time: made, rotated, revoked and listed. A key is said once, when it is made; what is
//! kept is its SHA-256. Each change is on disk before it is in force, and in force, for every shard
//! and the next request, before it is answered.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::oneshot;

use super::{Desk, Order, Reloaded, answer, problem, refuse};
use crate::meter::unix_ns;
use crate::pure::plan::MadeKeys;
use crate::store::Store;

/// Keys that were made at run time, as the plan takes them.
///
/// # Errors
/// The store cannot be read.
pub fn made(store: Option<&Store>) -> Result<MadeKeys, String> {
    let Some(store) = store else { return Ok(MadeKeys::default()) };
    let kept = store.keys().map_err(|error| error.to_string())?;
    let ever = !kept.is_empty();
    let keys = kept.iter().filter_map(|text| {
        let kept: Kept = serde_json::from_str(text).ok()?;
        (!kept.revoked).then(|| Value::Object(kept.key).to_string())
    });
    Ok(MadeKeys { keys: keys.collect(), ever })
}

/// A key as the store keeps it.
#[derive(serde::Serialize, serde::Deserialize)]
struct Kept {
    /// As an element of `keys` in the file.
    key: Map<String, Value>,
    /// Unix seconds.
    made: u64,
    revoked: bool,
}

impl Kept {
    fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Why a change is refused.
type No = (StatusCode, Value);

fn no(status: StatusCode, why: &str) -> No {
    (status, json!({ "error": { "message": why } }))
}

pub async fn list(State(desk): State<Arc<Desk>>) -> Response {
    let Some(kept) = with_store(&desk, |store| store.keys()).await else {
        let plan = desk.shared.plan.load();
        let keys = plan.keys.iter().map(|key| {
            let tenant = &plan.tenants[key.tenant.index()].name;
            json!({ "id": &*key.id, "tenant": &**tenant, "from": "file" })
        });
        return answer(StatusCode::OK, &json!({ "keys": keys.collect::<Vec<_>>() }));
    };
    let kept = match kept {
        Ok(kept) => kept,
        Err(error) => return refuse(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    };
    let kept: Vec<Kept> = kept.iter().filter_map(|text| serde_json::from_str(text).ok()).collect();
    let id = |kept: &Kept| kept.key.get("id").and_then(Value::as_str).map(str::to_owned);
    let plan = desk.shared.plan.load();
    let of_file = plan.keys.iter().filter(|key| {
        !kept.iter().any(|kept| !kept.revoked && id(kept).as_deref() == Some(&key.id))
    });
    let mut keys: Vec<Value> = of_file
        .map(|key| {
            let tenant = &plan.tenants[key.tenant.index()].name;
            json!({ "id": &*key.id, "tenant": &**tenant, "from": "file" })
        })
        .collect();
    for kept in kept {
        let mut shown = kept.key.clone();
        shown.remove("sha256");
        shown.insert("from".into(), json!("run time"));
        shown.insert("made".into(), json!(kept.made));
        shown.insert("revoked".into(), json!(kept.revoked));
        keys.push(Value::Object(shown));
    }
    answer(StatusCode::OK, &json!({ "keys": keys }))
}

pub async fn make(
    State(desk): State<Arc<Desk>>,
    body: Result<Json<Map<String, Value>>, JsonRejection>,
) -> Response {
    let mut key = match body {
        Ok(Json(key)) => key,
        Err(wrong) => return refuse(StatusCode::BAD_REQUEST, &wrong.body_text()),
    };
    let Some(id) = key.get("id").and_then(Value::as_str).map(str::to_owned) else {
        return refuse(StatusCode::UNPROCESSABLE_ENTITY, "`id` is missing");
    };
    if key.contains_key("sha256") {
        return refuse(
            StatusCode::UNPROCESSABLE_ENTITY,
            "the key is made here: leave out `sha256`",
        );
    }
    let secret = match secret() {
        Ok(secret) => secret,
        Err(why) => return refuse(StatusCode::INTERNAL_SERVER_ERROR, &why),
    };
    key.insert("sha256".into(), json!(digest(&secret)));
    if let Err(problems) = MadeKeys::check(&Value::Object(key.clone()).to_string()) {
        let problems: Vec<Value> = problems.iter().map(problem).collect();
        return answer(StatusCode::UNPROCESSABLE_ENTITY, &json!({ "problems": problems }));
    }
    let plan = desk.shared.plan.load_full();
    let tenant = key.get("tenant").and_then(Value::as_str).unwrap_or_default();
    if !plan.tenants.iter().any(|known| &*known.name == tenant) {
        let why = format!("the file has no tenant `{tenant}`");
        return refuse(StatusCode::UNPROCESSABLE_ENTITY, &why);
    }
    if plan.keys.iter().any(|known| *known.id == *id) {
        return refuse(StatusCode::CONFLICT, "there is a key with this id");
    }
    let kept = Kept { key, made: unix_ns() / 1_000_000_000, revoked: false };
    let change = move |known: Option<Kept>| match known {
        Some(known) if !known.revoked => {
            Err(no(StatusCode::CONFLICT, "there is a key with this id"))
        }
        _ => Ok(kept),
    };
    change_key(&desk, id.clone(), change, StatusCode::CREATED, json!({ "id": id, "key": secret }))
        .await
}

pub async fn rotate(State(desk): State<Arc<Desk>>, Path(id): Path<String>) -> Response {
    let secret = match secret() {
        Ok(secret) => secret,
        Err(why) => return refuse(StatusCode::INTERNAL_SERVER_ERROR, &why),
    };
    let fresh = digest(&secret);
    let change = move |known: Option<Kept>| {
        let mut kept = living(known)?;
        kept.key.insert("sha256".into(), json!(fresh));
        Ok(kept)
    };
    change_key(&desk, id.clone(), change, StatusCode::OK, json!({ "id": id, "key": secret })).await
}

pub async fn revoke(State(desk): State<Arc<Desk>>, Path(id): Path<String>) -> Response {
    let change = |known: Option<Kept>| Ok(Kept { revoked: true, ..living(known)? });
    change_key(&desk, id.clone(), change, StatusCode::OK, json!({ "id": id, "revoked": true }))
        .await
}

fn living(known: Option<Kept>) -> Result<Kept, No> {
    let why = "no key with this id was made at run time; keys of the file are changed there";
    known.filter(|known| !known.revoked).ok_or_else(|| no(StatusCode::NOT_FOUND, why))
}

/// Writes the change, puts it in force, and answers.
async fn change_key(
    desk: &Arc<Desk>,
    id: String,
    change: impl FnOnce(Option<Kept>) -> Result<Kept, No> + Send + 'static,
    status: StatusCode,
    said: Value,
) -> Response {
    let written = with_store(desk, move |store| {
        store.put_key(&id, |known| {
            let known = known.and_then(|known| serde_json::from_str(known).ok());
            change(known).map(|kept| kept.text())
        })
    });
    match written.await {
        None => {
            let why = "keys are made at run time only where they can be kept: set state.dir";
            return refuse(StatusCode::CONFLICT, why);
        }
        Some(Err(error)) => {
            let why = format!("the change was not made: {error}");
            return refuse(StatusCode::INTERNAL_SERVER_ERROR, &why);
        }
        Some(Ok(Err((status, why)))) => return answer(status, &why),
        Some(Ok(Ok(()))) => {}
    }
    let (order, answered) = oneshot::channel();
    let ordered = desk.reload.send(Order::Keys(order)).await.is_ok();
    match (ordered, answered.await) {
        (true, Ok(Reloaded::InForce { .. })) => answer(status, &said),
        _ => refuse(
            StatusCode::SERVICE_UNAVAILABLE,
            "the change is written and not in force: the gateway is stopping or its secrets cannot \
             be read; it will be with the next start",
        ),
    }
}

/// On a thread that may block; `None` without a store.
async fn with_store<T: Send + 'static>(
    desk: &Arc<Desk>,
    work: impl FnOnce(&Store) -> Result<T, redb::Error> + Send + 'static,
) -> Option<Result<T, redb::Error>> {
    let store = Arc::clone(desk.store.as_ref()?);
    let work = tokio::task::spawn_blocking(move || work(&store));
    Some(work.await.unwrap_or_else(|_| Err(redb::Error::PreviousIo)))
}

/// 192 random bits, as OpenAI's SDKs and people expect a key to look.
fn secret() -> Result<String, String> {
    let mut random = [0u8; 24];
    let got = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    match got {
        Ok(24) => Ok(format!("sk-fb-{}", hex(&random))),
        Ok(_) => Err("the kernel has no randomness to give".to_owned()),
        Err(error) => Err(format!("the kernel gives no randomness: {error}")),
    }
}

fn digest(secret: &str) -> String {
    hex(&Sha256::digest(secret))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
