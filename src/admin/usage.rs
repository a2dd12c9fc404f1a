//! `GET /usage`: what tenants have used since the start, and what was used on each day.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};

use super::{Desk, json_text, refuse};
use crate::meter::text::{usage_csv, usage_csv_head, usage_json};
use crate::meter::usage::{By, Question, Sums, day_of};

#[derive(serde::Deserialize)]
pub struct Whose {
    tenant: Option<String>,
    key: Option<String>,
    model: Option<String>,
    route: Option<String>,
    /// What to tell usage apart by, with commas: asks for usage by day, which is kept.
    by: Option<String>,
    /// Days, both included; without them, all.
    from: Option<String>,
    to: Option<String>,
    #[serde(default)]
    format: Format,
}

#[derive(Clone, Copy, Default, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
enum Format {
    #[default]
    Json,
    Csv,
}

/// Tenants' usage since the start, or, with `by`, usage of each day.
pub async fn usage(State(desk): State<Arc<Desk>>, Query(whose): Query<Whose>) -> Response {
    if let Some(by) = &whose.by {
        return match question(&whose, by) {
            Ok(question) => usage_by_day(desk, question, whose.format).await,
            Err(why) => refuse(StatusCode::BAD_REQUEST, &why),
        };
    }
    let more = [&whose.key, &whose.model, &whose.route, &whose.from, &whose.to];
    if more.iter().any(|more| more.is_some()) {
        return refuse(StatusCode::BAD_REQUEST, "without `by`, only `tenant` and `format` count");
    }
    let catalog = desk.catalog.load();
    let mut body = String::new();
    if matches!(whose.format, Format::Csv) {
        body.push_str(&usage_csv_head());
        desk.books.read(|ledger| {
            for tenant in &catalog.tenants {
                if whose.tenant.as_deref().is_none_or(|name| *name == *tenant.name) {
                    usage_csv(&mut body, &tenant.name, ledger.tenants.of(tenant.series));
                }
            }
        });
        return ([(header::CONTENT_TYPE, "text/csv; charset=utf-8")], body).into_response();
    }
    match whose.tenant {
        Some(name) => {
            let Some(series) = catalog.tenant(&name) else {
                return refuse(StatusCode::NOT_FOUND, "no such tenant");
            };
            desk.books.read(|ledger| usage_json(&mut body, &name, ledger.tenants.of(series)));
        }
        None => desk.books.read(|ledger| {
            body.push_str("{\"tenants\":[");
            for (index, tenant) in catalog.tenants.iter().enumerate() {
                if index > 0 {
                    body.push(',');
                }
                usage_json(&mut body, &tenant.name, ledger.tenants.of(tenant.series));
            }
            body.push_str("]}");
        }),
    }
    body.push('\n');
    json_text(StatusCode::OK, body)
}

fn question(whose: &Whose, by: &str) -> Result<Question, String> {
    let by = by.split(',').map(|name| {
        let by = By::ALL.into_iter().find(|by| by.name() == name);
        by.ok_or_else(|| format!("`by` takes day, tenant, key, model and route, not `{name}`"))
    });
    let day = |text: &Option<String>, default| match text {
        None => Ok(default),
        Some(text) => day_of(text).ok_or_else(|| format!("`{text}` is no date like 2026-12-31")),
    };
    Ok(Question {
        by: by.collect::<Result<_, _>>()?,
        from: day(&whose.from, 0)?,
        to: day(&whose.to, u32::MAX)?,
        only: [&whose.tenant, &whose.key, &whose.model, &whose.route].map(Clone::clone),
    })
}

/// Usage of each day, as the store keeps it, up to this moment.
async fn usage_by_day(desk: Arc<Desk>, question: Question, format: Format) -> Response {
    desk.books.name_usage(&desk.usage, &desk.catalog.load());
    let work = move || {
        let mut sums = Sums::new(question);
        let read = match &desk.store {
            Some(store) => {
                let days = sums.days();
                store.usage(days, &desk.usage, |entry, spend| sums.add(entry, spend))
            }
            None => {
                desk.usage.each(|entry, spend| sums.add(entry, spend));
                Ok(())
            }
        };
        read.map(|()| match format {
            Format::Csv => sums.csv(),
            Format::Json => sums.json(),
        })
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(body)) if matches!(format, Format::Csv) => {
            ([(header::CONTENT_TYPE, "text/csv; charset=utf-8")], body).into_response()
        }
        Ok(Ok(body)) => json_text(StatusCode::OK, body),
        Ok(Err(why)) => refuse(StatusCode::INTERNAL_SERVER_ERROR, &why.to_string()),
        Err(_) => refuse(StatusCode::INTERNAL_SERVER_ERROR, "the answer could not be made"),
    }
}
