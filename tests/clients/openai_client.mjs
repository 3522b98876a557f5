// openai's SDK for JavaScript.
import assert from "node:assert/strict";
import OpenAI from "openai";
import {
  ABORTED_TOKENS,
  CITY_SCHEMA,
  MAX_TOKENS,
  MODEL,
  QUESTION,
  TOO_LONG,
  URL_OF_ROUTER,
  abortedCount,
  errorOf,
  readSome,
  run,
  waitAborted,
} from "./steps.mjs";

const client = new OpenAI({ baseURL: `${URL_OF_ROUTER}/v1`, apiKey: "any", maxRetries: 0 });
const asked = { model: MODEL, messages: [{ role: "user", content: QUESTION }], temperature: 0, max_tokens: MAX_TOKENS };

await run({
  async answer() {
    const whole = await client.chat.completions.create(asked);
    assert.ok(whole.choices[0].message.content);
    assert.equal(whole.choices[0].finish_reason, "length");
    assert.equal(whole.model, MODEL);
  },

  async stream() {
    const whole = await client.chat.completions.create(asked);
    const pieces = [];
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
      pieces.push(chunk.choices[0]?.delta.content ?? "");
    assert.ok(pieces.length > 2);
    assert.equal(pieces.join(""), whole.choices[0].message.content);
    assert.equal(await client.chat.completions.stream(asked).finalContent(), whole.choices[0].message.content);
  },

  async usage() {
    const { usage } = await client.chat.completions.create(asked);
    assert.equal(usage.completion_tokens, MAX_TOKENS);
    assert.equal(usage.total_tokens, usage.prompt_tokens + MAX_TOKENS);
    const runner = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
    const streamed = await runner.totalUsage();
    assert.equal(streamed.completion_tokens, MAX_TOKENS);
    assert.equal(streamed.prompt_tokens, usage.prompt_tokens);
  },

  async responses() {
    const body = { model: MODEL, input: QUESTION, max_output_tokens: MAX_TOKENS, temperature: 0 };
    const whole = await client.responses.create(body);
    assert.ok(whole.output_text);
    let text = "";
    for await (const event of await client.responses.create({ ...body, stream: true }))
      if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, whole.output_text);
  },

  async context_overflow() {
    for (const call of [
      () => client.chat.completions.create({ ...asked, messages: [{ role: "user", content: TOO_LONG }] }),
      () => client.chat.completions.create({ ...asked, messages: [{ role: "user", content: TOO_LONG }], stream: true }),
      () => client.completions.create({ model: MODEL, prompt: QUESTION.repeat(100), max_tokens: 1800 }),
      () => client.responses.create({ model: MODEL, input: TOO_LONG }),
    ]) {
      const error = await errorOf(call);
      assert.ok(error instanceof OpenAI.BadRequestError, error);
      assert.equal(error.code, "context_length_exceeded");
      assert.match(error.message, /context length/);
    }
  },

  async bad_field() {
    const error = await errorOf(() => client.chat.completions.create({ ...asked, temperature: "hot" }));
    assert.ok(error instanceof OpenAI.BadRequestError, error);
    assert.equal(error.param, "temperature");
    assert.match(error.message, /temperature/);
  },

  // A field that an instance refuses, not the router.
  async refusal_of_an_instance() {
    const error = await errorOf(() => client.chat.completions.create({ ...asked, response_format: { type: "yaml" } }));
    assert.ok(error instanceof OpenAI.BadRequestError, error);
    assert.doesNotMatch(error.message, /no body/);
    assert.ok(error.type);
  },

  async models() {
    const found = [];
    for await (const model of client.models.list()) found.push(model.id);
    assert.deepEqual(found, [MODEL]);
    assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
  },

  async unknown_model() {
    const error = await errorOf(() => client.chat.completions.create({ ...asked, model: "another" }));
    assert.ok(error instanceof OpenAI.NotFoundError, error);
    assert.equal(error.code, "model_not_found");
  },

  async structured_output() {
    const format = { type: "json_schema", json_schema: { name: "city", schema: CITY_SCHEMA, strict: true } };
    const whole = await client.chat.completions.parse({ ...asked, max_tokens: 100, response_format: format });
    assert.ok(["Oslo", "Rome"].includes(JSON.parse(whole.choices[0].message.content).city));
  },

  async abort() {
    const before = await abortedCount();
    const body = { ...asked, max_tokens: ABORTED_TOKENS, ignore_eos: true, stream: true };
    await readSome(await client.chat.completions.create(body));
    await waitAborted(before);
  },
});
