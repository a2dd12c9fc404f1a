"""What OpenAI's Python SDK makes of the gateway.

    python clients.py BASE_URL KEY MODEL [--engine]

Each line is `ok NAME` or `FAIL NAME why`; the exit status is 1 if one failed. With --engine the
backend is a real engine with a chat model, which has no embeddings and may not call a tool.
"""
import asyncio
import json
import sys

import openai

base, key, model = sys.argv[1:4]
engine = "--engine" in sys.argv[4:]
client = openai.OpenAI(base_url=base + "/v1", api_key=key, max_retries=0, timeout=60)
messages = [{"role": "user", "content": "Say a few words, please."}]
failed = 0


def case(run):
    global failed
    try:
        run()
        print("ok  ", run.__name__)
    except Exception as error:  # every failure is a line, and the next case still runs
        failed += 1
        print("FAIL", run.__name__, f"{type(error).__name__}: {error}"[:500])


def stream(**more):
    return client.chat.completions.create(
        model=model, messages=messages, max_tokens=8, stream=True, **more)


@case
def chat():
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=8)
    assert answer.choices[0].message.content, answer
    assert answer.choices[0].finish_reason in ("stop", "length"), answer
    usage = answer.usage
    assert usage.prompt_tokens > 0 and usage.completion_tokens > 0, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage


@case
def chat_streamed_without_usage():
    chunks = list(stream())
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text, chunks
    assert all(c.choices for c in chunks), "a chunk without choices was not asked for"
    assert not any(getattr(c, "usage", None) for c in chunks), "usage was not asked for"
    assert chunks[-1].choices[0].finish_reason, chunks[-1]


@case
def chat_streamed_with_usage():
    chunks = list(stream(stream_options={"include_usage": True}))
    last = chunks[-1]
    assert last.choices == [] and last.usage.completion_tokens > 0, last
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


@case
def raw_headers():
    answer = client.chat.completions.with_raw_response.create(
        model=model, messages=messages, max_tokens=2)
    assert answer.headers["x-request-id"], answer.headers
    assert answer.headers["x-forebay-backend"], answer.headers
    assert answer.request_id == answer.headers["x-request-id"]


@case
def models():
    ids = [m.id for m in client.models.list()]
    assert model in ids, ids
    assert client.models.retrieve(model).id == model


@case
def aborted_stream():
    with stream() as chunks:
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                break
    # The connection pool of the SDK is still good.
    chat_once = client.chat.completions.create(model=model, messages=messages, max_tokens=2)
    assert chat_once.choices


@case
def unknown_model():
    try:
        client.chat.completions.create(model="no-such-model", messages=messages)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error.code
        assert error.param == "model", error.param
        assert error.request_id, "a request id to tell support"
    else:
        raise AssertionError("no error")


@case
def wrong_key():
    try:
        client.with_options(api_key="wrong").models.list()
    except openai.AuthenticationError as error:
        assert error.code == "invalid_api_key", error.code
    else:
        raise AssertionError("no error")


@case
def bad_request():
    try:
        client.chat.completions.create(
            model=model, messages=messages, extra_body={"max_tokens": "many"})
    except openai.BadRequestError as error:
        assert error.param == "max_tokens", error.param
    else:
        raise AssertionError("no error")


@case
def responses():
    answer = client.responses.create(model=model, input="hi", max_output_tokens=8)
    assert answer.output_text, answer
    assert answer.usage.output_tokens > 0, answer.usage


@case
def responses_streamed():
    kinds = [event.type for event in
             client.responses.create(model=model, input="hi", max_output_tokens=8, stream=True)]
    assert kinds[0] == "response.created", kinds
    assert "response.output_text.delta" in kinds, kinds
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds


@case
def many_at_once():
    async def main():
        async with openai.AsyncOpenAI(base_url=base + "/v1", api_key=key, max_retries=0) as many:
            async def one(number):
                if number % 2:
                    answer = await many.chat.completions.create(
                        model=model, messages=messages, max_tokens=4)
                    return bool(answer.choices)
                chunks = await many.chat.completions.create(
                    model=model, messages=messages, max_tokens=4, stream=True)
                return bool([chunk async for chunk in chunks])
            return await asyncio.gather(*[one(number) for number in range(20)])
    assert all(asyncio.run(main()))


@case
def large_prompt():
    if engine:
        return
    text = "A sentence that is long, with ünïcödé and 😀. " * 20_000
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], max_tokens=2)
    assert answer.usage.prompt_tokens > 1000, answer.usage


@case
def completions():
    answer = client.completions.create(model=model, prompt="one two", max_tokens=4)
    assert answer.choices[0].text is not None and answer.usage.completion_tokens > 0
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(
        model=model, prompt="one two", max_tokens=4, stream=True))
    assert text is not None


tool = {"type": "function", "function": {
    "name": "weather", "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}},
                   "required": ["city"]}}}


@case
def tools():
    if engine:
        return
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[tool], tool_choice="required")
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "weather", call
    json.loads(call.function.arguments)


@case
def tools_streamed():
    if engine:
        return
    name, arguments = "", ""
    for chunk in stream(tools=[tool], tool_choice="required"):
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "weather", name
    json.loads(arguments)


@case
def embeddings():
    if engine:
        return
    answer = client.embeddings.create(model=model, input=["one", "two"])
    assert len(answer.data) == 2 and len(answer.data[0].embedding) > 0
    assert answer.usage.prompt_tokens > 0
    # The SDK asks for base64 by default; here it asks for numbers.
    plain = client.embeddings.create(model=model, input="one", encoding_format="float")
    assert isinstance(plain.data[0].embedding[0], float)


sys.exit(failed > 0)
