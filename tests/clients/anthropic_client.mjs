// Anthropic's SDK for JavaScript.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import {
  ABORTED_TOKENS,
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

const client = new Anthropic({ baseURL: URL_OF_ROUTER, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const asked = { model: MODEL, messages, temperature: 0, max_tokens: MAX_TOKENS };

await run({
  async answer() {
    const whole = await client.messages.create(asked);
    assert.ok(whole.content[0].text);
    assert.equal(whole.stop_reason, "max_tokens");
    assert.equal(whole.model, MODEL);
  },

  async stream() {
    const whole = await client.messages.create(asked);
    const pieces = [];
    const events = client.messages.stream(asked).on("text", (text) => pieces.push(text));
    const last = await events.finalMessage();
    assert.ok(pieces.length > 1);
    assert.equal(pieces.join(""), whole.content[0].text);
    assert.equal(last.content[0].text, whole.content[0].text);
    assert.equal(last.stop_reason, "max_tokens");
    assert.equal(last.usage.output_tokens, MAX_TOKENS);
  },

  async usage() {
    const { usage } = await client.messages.create(asked);
    const counted = await client.messages.countTokens({ model: MODEL, messages });
    assert.equal(usage.output_tokens, MAX_TOKENS);
    assert.equal(counted.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens ?? 0));
  },

  async context_overflow() {
    const tooLong = { ...asked, messages: [{ role: "user", content: TOO_LONG }] };
    const refused = await errorOf(() => client.messages.create(tooLong));
    assert.ok(refused instanceof Anthropic.BadRequestError, refused);
    assert.equal(refused.error.error.type, "invalid_request_error");
    assert.match(refused.error.error.message, /longer than the model's context length/);
    // SGLang begins a stream before it has looked at the prompt: the error is an event.
    const broken = await errorOf(() => client.messages.stream(tooLong).finalMessage());
    assert.ok(broken instanceof Anthropic.APIError, broken);
    assert.match(broken.message, /longer than the model's context length/);
  },

  async bad_field() {
    const error = await errorOf(() => client.messages.create({ ...asked, temperature: "hot" }));
    assert.ok(error instanceof Anthropic.BadRequestError, error);
    assert.equal(error.error.error.type, "invalid_request_error");
    assert.match(error.error.error.message, /temperature/);
  },

  async unknown_model() {
    const error = await errorOf(() => client.messages.create({ ...asked, model: "another" }));
    assert.ok(error instanceof Anthropic.NotFoundError, error);
    assert.equal(error.error.error.type, "not_found_error");
  },

  async models() {
    const found = [];
    for await (const model of client.models.list()) found.push(model.id);
    assert.deepEqual(found, [MODEL]);
    assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
  },

  async abort() {
    const before = await abortedCount();
    await readSome(await client.messages.create({ ...asked, max_tokens: ABORTED_TOKENS, stream: true }), 6);
    await waitAborted(before);
  },
});
