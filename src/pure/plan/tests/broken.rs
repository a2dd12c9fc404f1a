//! Goal: each way to write a broken file gives exactly the lines that help its writer.
//! Method: changes of one good file, one or few words at a time, with all they must give.

use super::*;

/// Changes of `SMALL` (from, to) and every line they must give.
const BROKEN: &[(&str, &str, &[&str])] = &[
    // ---- names of fields
    (
        "    pool: main",
        "    pool: main\n    strateggy: cost",
        &[
            "13:5: routes[0].strateggy: unknown field `strateggy` (route chat); help: did you mean `strategy`?",
        ],
    ),
    (
        "tenants:\n",
        "tenant:\n",
        &[
            "13:1: tenant: unknown field `tenant`; help: did you mean `tenants`?",
            "16:23: keys[0].tenant: there is no tenant `acme` (key k1); help: the file defines no tenant at all",
        ],
    ),
    (
        "listen: \"127.0.0.1:8080\"",
        "Listen: \"127.0.0.1:8080\"",
        &[
            "1:9: server.listen: `listen` is missing; help: as in `listen: \"0.0.0.0:8080\"`",
            "1:11: server.Listen: unknown field `Listen`; help: did you mean `listen`?",
        ],
    ),
    (
        "    pool: main\n",
        "",
        &[
            "10:5: routes[0].pool: `pool` is missing (route chat); help: the pool that serves this route",
        ],
    ),
    (
        "name: chat",
        "name: chat\n    name: chat",
        &["11:5: `name` is here twice; the first is on line 10; help: keep one of them"],
    ),
    (
        "  acme: {}",
        "  acme: {}\n  acme: {}",
        &["15:3: `acme` is here twice; the first is on line 14; help: keep one of them"],
    ),
    (
        "tenants:\n",
        "state: { sync: always }\ntenants:\n",
        &[
            "13:8: state: `sync: always` needs a `dir` to write to; help: as in `dir: /var/lib/forebay`",
        ],
    ),
    (
        "  acme: {}",
        "  acme: { budget: { usd: 1, per: day, over: downgrade, to: small, cut: true } }",
        &[
            "14:72: tenants.acme.budget.cut: a budget that turns to a cheaper model does not cut (tenant acme); help: leave `cut` out, or `refuse` over it",
        ],
    ),
    (
        "tenants:\n",
        "usage: { clickhouse: { url: \"http://ch:8123/?user=x\", table: \"a; DROP\" } }\ntenants:\n",
        &[
            "13:29: usage.clickhouse.url: this is the URL of a server, without a path; help: database and table go to `table`, names to `user` and `password`",
            "13:62: usage.clickhouse.table: `a; DROP` is no name of a table; help: `table` or `database.table`, of letters, digits and `_`",
        ],
    ),
    (
        "tenants:\n",
        "alerts: { webhook: \"hooks.example.com/T0/secret\" }\ntenants:\n",
        &[
            "13:20: alerts.webhook: this is not a URL that can be asked; help: as in `{ file: webhook.url }`, with `https://...` in that file",
        ],
    ),
    (
        "tenants:\n",
        "usage: { file: { size: 1KiB } }\ntenants:\n",
        &[
            "13:16: usage.file.path: `path` is missing; help: as in `/var/log/forebay/usage.jsonl`",
            "13:24: usage.file.size: `1KiB` is out of range: it must be at least 65536 bytes",
        ],
    ),
    // ---- shapes
    (
        "  acme: {}",
        "  acme: [a]",
        &["14:9: tenants.acme: a map of fields is expected here, not a list (tenant acme)"],
    ),
    (
        "    pool: main",
        "    pool: [main]",
        &["12:11: routes[0].pool: a single value is expected here, not a list (route chat)"],
    ),
    (
        "routes:\n  - name: chat\n    match: { model: big }\n    pool: main\n",
        "routes: chat\n",
        &[
            "9:9: routes: a list is expected here, not a single value",
            "9:9: routes: there is no route here, so nothing would be served",
        ],
    ),
    (
        "    backends:\n      - { name: b1, url: \"http://10.0.0.1:8000\" }\n      - { name: b2, url: \"http://10.0.0.2:8000\", version: v2 }\n",
        "    backends: []\n",
        &["4:15: pools.main.backends: a pool needs at least one backend (pool main)"],
    ),
    // ---- values
    (
        "127.0.0.1:8080",
        ":8080",
        &[
            "1:19: server.listen: `:8080` is not an address with a port; help: write `0.0.0.0:8080` for every address",
        ],
    ),
    (
        "\"127.0.0.1:8080\"",
        "[\"127.0.0.1:80\", \"0.0.0.0:80\"]",
        &["1:36: server.listen[1]: `0.0.0.0:80` is taken by a listener above"],
    ),
    (
        "server: {",
        "admin: { listen: \"127.0.0.1:8080\" }\nserver: {",
        &[
            "1:18: admin.listen: `127.0.0.1:8080` is taken by `server.listen`; help: the admin port is a port of its own",
        ],
    ),
    (
        "8080\" }",
        "8080\", tls: { cert: a, key: b } }",
        &[
            "1:42: server.tls: TLS is not built into this version; help: leave `tls` out, and end TLS before Forebay",
        ],
    ),
    (
        "8080\" }",
        "8080\", grace: 600 }",
        &[
            "1:44: server.grace: `600` is a number without a unit, not a duration; help: write `600s` for seconds or `600ms` for milliseconds",
        ],
    ),
    (
        "8080\" }",
        "8080\", shards: 0 }",
        &["1:45: server.shards: `0` is out of range: it must be at least 1"],
    ),
    (
        "8080\" }",
        "8080\", shards: 4-2 }",
        &[
            "1:45: server.shards: `4-2` is not a list of CPUs; help: write it as `2-15` or `0,2,4-7`",
        ],
    ),
    (
        "8080\" }",
        "8080\", bounds: { body: 64M } }",
        &[
            "1:53: server.bounds.body: `64M` is not a size; help: write bytes as a number, or `64KiB`, `8MB`, `2GiB`",
        ],
    ),
    (
        "8080\" }",
        "8080\", timeouts: { idle: 0s } }",
        &[
            "1:55: server.timeouts.idle: this must be longer than zero; help: leave it out, or write `null`, to turn it off",
        ],
    ),
    (
        "8080\" }",
        "8080\", half_close: server }",
        &[
            "1:49: server.half_close: `server` is no known meaning of half-close; help: did you mean `serve`?",
        ],
    ),
    (
        "http://10.0.0.1:8000",
        "https://10.0.0.1",
        &[
            "5:26: pools.main.backends[0].url: TLS to backends is not built into this version (pool main); help: use `http://` within the rack, or a TLS proxy before the backend",
        ],
    ),
    (
        "http://10.0.0.1:8000",
        "10.0.0.1:8000",
        &[
            "5:26: pools.main.backends[0].url: `10.0.0.1:8000` has no scheme such as `http://` (pool main); help: write it as `http://10.0.0.12:8000` or `http://host:8000/base/v1`",
        ],
    ),
    (
        "name: b1,",
        "name: b1, slots: 0,",
        &[
            "5:28: pools.main.backends[0].slots: `0` is out of range: it must be at least 1 (pool main)",
        ],
    ),
    (
        "name: b1,",
        "name: b1, weight: -1,",
        &[
            "5:29: pools.main.backends[0].weight: `-1` is not a whole number (pool main); help: write digits only, as in `100_000`",
        ],
    ),
    (
        "name: b1,",
        "name: b1, weight: 1.5,",
        &[
            "5:29: pools.main.backends[0].weight: `1.5` is not a whole number (pool main); help: write digits only, as in `100_000`",
        ],
    ),
    (
        "name: b1,",
        "name: b2,",
        &[
            "6:17: pools.main.backends[1].name: backend `b2` is here twice; the first is on line 5 (backend b2)",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    strategy: random",
        &[
            "13:15: routes[0].strategy: `random` is no known strategy (route chat); help: known: `weighted-round-robin`, `least-requests`, `weighted-split`, `consistent-hash`, `prefix`, `adaptive`, `least-queued`, `least-latency`, `most-available`, `cost`, `cost-optimized`",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    retry: { attempts: 1, budget: 20 }",
        &[
            "13:35: routes[0].retry.budget: `20` is out of range (route chat); help: write `20%` for per cent",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    retry: { attempts: 99 }",
        &[
            "13:24: routes[0].retry.attempts: `99` is out of range: it must be at most 10 (route chat)",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    sticky: { header: \"X Y\" }",
        &[
            "13:23: routes[0].sticky.header: `X Y` is not the name of a header (route chat); help: letters, digits and `-`, as in `X-Session-ID`",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    units: [ { redactt: {} } ]",
        &[
            "13:16: routes[0].units[0].redactt: unknown field `redactt` (route chat); help: did you mean `redact`?",
        ],
    ),
    (
        "match: { model: big }",
        "match: { model: \"b[ij]*\" }",
        &[
            "11:21: routes[0].match.model: `b[ij]*` is not a pattern that is understood (route chat); help: only `*` (anything) and `?` (one character) are special; list alternatives apart",
        ],
    ),
    (
        "match: { model: big }",
        "match: { model: \"\" }",
        &["11:21: routes[0].match.model: this must not be empty (route chat)"],
    ),
    (
        "match: { model: big }",
        "match: { path: v1/files }",
        &[
            "11:20: routes[0].match.path: `v1/files` can match no path (route chat); help: as in `/v1/files*`",
        ],
    ),
    (
        "match: { model: big }",
        "match: { header: { \"X:Y\": a } }",
        &[
            "11:24: routes[0].match.header.X:Y: `X:Y` is not the name of a header (route chat); help: letters, digits and `-`, as in `X-Session-ID`",
        ],
    ),
    (
        "  acme: {}",
        "  acme: { budget: { usd: -5, per: year } }",
        &[
            "14:26: tenants.acme.budget.usd: `-5` is negative (tenant acme); help: write dollars as `0.50`, with at most nine decimals",
            "14:35: tenants.acme.budget.per: `year` is no known window (tenant acme); help: known: `day`, `week`, `month`, `total`",
        ],
    ),
    (
        "  acme: {}",
        "  acme: { models: [] }",
        &[
            "14:19: tenants.acme.models: an empty list would allow no model (tenant acme); help: leave `models` out to allow every model",
        ],
    ),
    (
        "00aa\"",
        "00a\"",
        &[
            "16:37: keys[0].sha256: a SHA-256 has 64 hex digits, this has 63 (key k1); help: write the 64 hex digits that `printf %s \"$KEY\" | sha256sum` prints",
        ],
    ),
    (
        "main:\n",
        "main:\n    forward: [X-Ok, Authorization]\n",
        &[
            "4:21: pools.main.forward[1]: `Authorization` is made by the gateway and is never forwarded (pool main)",
        ],
    ),
    // ---- references
    (
        "    pool: main",
        "    pool: mian",
        &[
            "12:11: routes[0].pool: there is no pool `mian` (route chat of model big); help: did you mean `main`?",
        ],
    ),
    (
        "tenant: acme",
        "tenant: amce",
        &["16:23: keys[0].tenant: there is no tenant `amce` (key k1); help: did you mean `acme`?"],
    ),
    (
        "  acme: {}",
        "  acme: { tier: gold }",
        &[
            "14:17: tenants.acme.tier: there is no tier `gold` (tenant acme); help: the file defines no tier at all",
        ],
    ),
    (
        "aliases: [small]",
        "fallback: [ { model: huge } ]",
        &[
            "8:31: models.big.fallback[0].model: there is no model `huge` (model big); help: known: `big`",
        ],
    ),
    (
        "aliases: [small]",
        "fallback: [ { model: big } ]",
        &[
            "8:31: models.big.fallback[0].model: the fallback of model `big` leads back to itself (model big); help: break the ring big -> big",
        ],
    ),
    (
        "aliases: [small]",
        "aliases: [big]",
        &["8:20: models.big.aliases[0]: alias `big` is the model's own name (model big)"],
    ),
    (
        "aliases: [small] }",
        "aliases: [small] }\n  small: ~",
        &["8:20: models.big.aliases[0]: alias `small` is a model of its own (model big)"],
    ),
    (
        "aliases: [small] }",
        "aliases: [small] }\n  other: { aliases: [small] }",
        &[
            "9:22: models.other.aliases[0]: alias `small` is an alias of model `big` already (model other)",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    weights: { v2: 1, v3: 1 }",
        &[
            "13:23: routes[0].weights.v3: no backend of pool `main` has version `v3` (route chat of model big); help: did you mean `v2`?",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    weights: { v2: 1 }\n    strategy: least-requests",
        &[
            "14:15: routes[0].strategy: `weights` by version go with strategy `weighted-split` (route chat of model big)",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    weights: { v2: 0 }",
        &[
            "12:11: routes[0].pool: the weights leave no backend of pool `main` that could be sent anything (route chat of model big); help: give at least one backend a weight above 0, or remove the route",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n  - { name: chat, pool: main }",
        &[
            "13:13: routes[1].name: route `chat` is here twice; the first is on line 10 (route chat)",
        ],
    ),
    (
        "keys:\n",
        "keys:\n  - { id: k0, tenant: acme, sha256: \"00000000000000000000000000000000000000000000000000000000000000AA\" }\n",
        &["17:11: keys[1].id: key `k1` has the same SHA-256 as key `k0` (key k1)"],
    ),
    // ---- variables and secrets
    (
        "http://10.0.0.1:8000",
        "http://${HOST}:8000",
        &[
            "5:26: pools.main.backends[0].url: the environment has no variable `HOST` (pool main); help: set it, or write `${HOST:-default}`",
        ],
    ),
    (
        "http://10.0.0.1:8000",
        "http://${HOST",
        &[
            "5:26: pools.main.backends[0].url: `${` without a closing `}` (pool main); help: write `$${` for a plain `${`",
        ],
    ),
    (
        "http://10.0.0.1:8000",
        "${1X}",
        &[
            "5:26: pools.main.backends[0].url: `${1X}` names no variable (pool main); help: write `${NAME}` or `${NAME:-default}`",
        ],
    ),
    (
        "http://10.0.0.1:8000",
        "${UPSTREAM_KEY}",
        &[
            "5:26: pools.main.backends[0].url: `${UPSTREAM_KEY}` has no scheme such as `http://` (pool main)",
        ],
    ),
    (
        "name: b1,",
        "name: b1, api_key: { file: gone.key },",
        &[
            "5:30: pools.main.backends[0].api_key: the secret cannot be read: no such file (pool main)",
        ],
    ),
    (
        "name: b1,",
        "name: b1, api_key: { file: two.key },",
        &[
            "5:30: pools.main.backends[0].api_key: a secret is one line of 1 to 8192 visible ASCII characters without blanks; this is not (pool main)",
        ],
    ),
    (
        "name: b1,",
        "name: b1, api_key: { path: two.key },",
        &[
            "5:30: pools.main.backends[0].api_key.file: `file` is missing (pool main); help: a secret is text or `{ file: path }`",
            "5:32: pools.main.backends[0].api_key.path: unknown field `path` (pool main); help: known: `file`",
        ],
    ),
    // ---- what is missing does not hide what is wrong
    (
        "server: { listen: \"127.0.0.1:8080\" }\npools:\n",
        "pool:\n",
        &[
            "1:1: server: `server` is missing; help: at least `server: { listen: \"0.0.0.0:8080\" }`",
            "1:1: pools: `pools` is missing; help: name at least one pool of backends",
            "1:1: pool: unknown field `pool`; help: did you mean `pools`?",
        ],
    ),
    (
        "tenants:\n  acme: {}",
        "tenants: acme",
        &["13:10: tenants: a map from names is expected here, not a single value"],
    ),
    // ---- YAML itself
    (
        "\npools:",
        "\n\tpools:",
        &[
            "2:2: this is not valid YAML: while parsing a block mapping, did not find expected key; help: YAML is indented with spaces; replace the tab",
        ],
    ),
    (
        "00aa\" }",
        "00aa\"",
        &[
            "16:5: this is not valid YAML: unclosed bracket '{'; help: the file may be cut off; write it whole, then rename it into place",
        ],
    ),
    (
        "  acme: {}",
        "  acme: !!map {}",
        &["14:9: a tag means nothing here; help: remove the `!...`"],
    ),
    (
        "  acme: {}",
        "  acme: {}\n---\nserver: {}",
        &["15:1: a second document begins here; a configuration is one document"],
    ),
    ("  acme: {}", "  ? [a]\n  : {}", &["14:5: a key must be a plain word, not a list or a map"]),
    // ---- tokenizers
    (
        "big: { aliases: [small] }",
        "big: { aliases: [small], tokenizer: o200k-bse }",
        &[
            "8:39: models.big.tokenizer: `o200k-bse` is no known tokenizer (model big); help: did you mean `o200k_base`?",
        ],
    ),
    (
        "big: { aliases: [small] }",
        "big: { aliases: [small], tokenizer: sentencepiece }",
        &[
            "8:39: models.big.tokenizer: `sentencepiece` is no known tokenizer (model big); help: `auto`, `o200k_base`, `cl100k_base`, `qwen`, `llama3`, or the path of a tokenizer.json",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    tokenizer: /gone/tokenizer.json",
        &["13:16: routes[0].tokenizer: the tokenizer cannot be read: no such file (route chat)"],
    ),
    (
        "    pool: main",
        "    pool: main\n    tokenizer: bad.json",
        &[
            "13:16: routes[0].tokenizer: the tokenizer cannot be used: its model is Unigram; only byte-level BPE is counted here (route chat)",
        ],
    ),
    ("  acme: {}", "  acme: &a [*a]", &["14:13: this alias stands inside what it names"]),
];

#[test]
fn each_broken_file_gives_exactly_its_lines() {
    each_gives_exactly(BROKEN, small);
}
