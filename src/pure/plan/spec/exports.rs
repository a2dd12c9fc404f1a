//! What leaves the gateway by itself: `usage`, `alerts`.

use super::certificates;
use crate::pure::plan::Secret;
use crate::pure::plan::read::{Item, Reader, shown};
use crate::pure::plan::terms::{Alerts, ClickHouse, Usage, UsageFile};
use crate::pure::plan::value;

pub(super) fn usage<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Usage> {
    r.fields(item, |r, f| {
        let file = f.get(r, "file", |r, item| {
            r.fields(item, |r, f| {
                let path = f.need(r, "path", "as in `/var/log/forebay/usage.jsonl`", Reader::text);
                let size = f.get(r, "size", |r, item| r.size(item, SIZE_MIN, u64::MAX >> 1));
                let keep = f.get(r, "keep", |r, item| r.small(item, 0, KEEP_MAX));
                Some(UsageFile {
                    path: path?.into(),
                    bytes_max: size.unwrap_or(SIZE),
                    keep: keep.unwrap_or(KEEP),
                })
            })
        });
        Some(Usage { file, clickhouse: f.get(r, "clickhouse", clickhouse) })
    })
}

const SIZE: u64 = 64 << 20;
const SIZE_MIN: u64 = 64 << 10;
const KEEP: u32 = 10;
const KEEP_MAX: u32 = 10_000;

fn clickhouse<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<ClickHouse> {
    r.fields(item, |r, f| {
        let url = f.need(r, "url", "as in `https://ch.example:8443`", |r, item| {
            let url = r.parsed(item, value::web_url)?;
            // What follows the authority is ours to write; who we are has fields of its own.
            let rest = url.split_once("://").map_or("", |(_, rest)| rest);
            if rest.trim_end_matches('/').contains(['/', '?', '#', '@']) {
                let hint = "database and table go to `table`, names to `user` and `password`";
                let message = "this is the URL of a server, without a path".to_owned();
                r.wrong(item, message, Some(hint.to_owned()));
            }
            Some(url)
        });
        let table = f.need(r, "table", "as in `llm.usage`", |r, item| {
            let table = r.text(item)?;
            let plain = |part: &str| {
                !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
            };
            if table.split('.').count() > 2 || !table.split('.').all(plain) {
                let message = format!("{} is no name of a table", shown(item));
                let hint = "`table` or `database.table`, of letters, digits and `_`".to_owned();
                r.wrong(item, message, Some(hint));
            }
            Some(table)
        });
        let user = f.get(r, "user", Reader::name);
        let password = f.get(r, "password", Reader::secret).map(Secret::new);
        let ca = f.get(r, "ca", certificates);
        Some(ClickHouse {
            url: url?,
            table: table?.into(),
            user: user.map(Into::into),
            password,
            ca,
        })
    })
}

pub(super) fn alerts<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Alerts> {
    r.fields(item, |r, f| {
        let hint = "the URL that takes alerts as JSON";
        let webhook = f.need(r, "webhook", hint, |r, item| {
            let url = r.secret(item)?;
            if value::web_url(&url).is_err() {
                // Its path is a password: it is not said.
                let hint = "as in `{ file: webhook.url }`, with `https://...` in that file";
                let message = "this is not a URL that can be asked".to_owned();
                r.wrong(item, message, Some(hint.to_owned()));
            }
            Some(url)
        });
        let ca = f.get(r, "ca", certificates);
        Some(Alerts { webhook: Secret::new(webhook?), ca })
    })
}
