// What OpenAI's SDK for Node makes of the gateway.
//
//   node clients.mjs BASE_URL KEY MODEL
//
// Each line is `ok NAME` or `FAIL NAME why`; the exit status is 1 if one failed.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [base, key, model] = process.argv.slice(2);
const options = { baseURL: `${base}/v1`, maxRetries: 0, timeout: 60_000 };
const client = new OpenAI({ ...options, apiKey: key });
const messages = [{ role: "user", content: "Say a few words, please." }];
let failed = 0;

async function run(name, body) {
  try {
    await body();
    console.log("ok  ", name);
  } catch (error) {
    failed += 1;
    console.log("FAIL", name, String(error).slice(0, 500));
  }
}

const stream = (more = {}) =>
  client.chat.completions.create({ model, messages, max_tokens: 8, stream: true, ...more });

async function collect(chunks) {
  const all = [];
  for await (const chunk of chunks) all.push(chunk);
  return all;
}

await run("chat", async () => {
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 8 });
  assert.ok(answer.choices[0].message.content);
  assert.equal(
    answer.usage.total_tokens,
    answer.usage.prompt_tokens + answer.usage.completion_tokens,
  );
});

await run("chat streamed without usage", async () => {
  const chunks = await collect(await stream());
  assert.ok(chunks.every((chunk) => chunk.choices.length === 1 && !chunk.usage));
  assert.ok(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""));
  assert.ok(chunks.at(-1).choices[0].finish_reason);
});

await run("chat streamed with usage", async () => {
  const chunks = await collect(await stream({ stream_options: { include_usage: true } }));
  assert.equal(chunks.at(-1).choices.length, 0);
  assert.ok(chunks.at(-1).usage.completion_tokens > 0);
});

await run("tools", async () => {
  const tool = {
    type: "function",
    function: {
      name: "weather",
      parameters: { type: "object", properties: { city: { type: "string" } } },
    },
  };
  const more = { tools: [tool], tool_choice: "required" };
  const answer = await client.chat.completions.create({ model, messages, ...more });
  const call = answer.choices[0].message.tool_calls[0];
  assert.equal(call.function.name, "weather");
  JSON.parse(call.function.arguments);
  let streamed = "";
  for await (const chunk of await stream(more)) {
    for (const part of chunk.choices[0].delta.tool_calls ?? []) {
      streamed += part.function.arguments ?? "";
    }
  }
  JSON.parse(streamed);
});

await run("embeddings", async () => {
  const answer = await client.embeddings.create({ model, input: ["one", "two"] });
  assert.equal(answer.data.length, 2);
  assert.ok(answer.data[0].embedding.length > 0);
});

await run("models", async () => {
  const ids = (await collect(client.models.list())).map((one) => one.id);
  assert.ok(ids.includes(model), ids.join());
  assert.equal((await client.models.retrieve(model)).id, model);
});

await run("aborted stream", async () => {
  const chunks = await stream();
  for await (const chunk of chunks) {
    if (chunk.choices[0]?.delta.content) break;
  }
  const controller = new AbortController();
  const second = await client.chat.completions.create(
    { model, messages, stream: true },
    { signal: controller.signal },
  );
  for await (const chunk of second) {
    if (chunk.choices[0]?.delta.content) controller.abort();
  }
  const after = await client.chat.completions.create({ model, messages, max_tokens: 2 });
  assert.ok(after.choices.length);
});

await run("errors", async () => {
  await assert.rejects(
    client.chat.completions.create({ model: "no-such-model", messages }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
  );
  const stranger = new OpenAI({ ...options, apiKey: "wrong" });
  await assert.rejects(
    collect(stranger.models.list()),
    (error) => error instanceof OpenAI.AuthenticationError && error.code === "invalid_api_key",
  );
  await assert.rejects(
    client.chat.completions.create({ model, messages, max_tokens: "many" }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "max_tokens",
  );
});

await run("responses", async () => {
  const answer = await client.responses.create({ model, input: "hi", max_output_tokens: 8 });
  assert.ok(answer.output_text);
  const events = await collect(
    await client.responses.create({ model, input: "hi", max_output_tokens: 8, stream: true }),
  );
  assert.equal(events[0].type, "response.created");
  assert.ok(events.some((event) => event.type === "response.output_text.delta"));
});

process.exit(failed > 0 ? 1 : 0);
