// Vercel's AI SDK with its provider for servers of OpenAI's API.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, jsonSchema, streamText } from "ai";
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

globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = createOpenAICompatible({
  name: "router",
  baseURL: `${URL_OF_ROUTER}/v1`,
  apiKey: "any",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = { model: provider(MODEL), prompt: QUESTION, temperature: 0, maxOutputTokens: MAX_TOKENS, maxRetries: 0 };

await run({
  async answer() {
    const whole = await generateText(asked);
    assert.ok(whole.text);
    assert.equal(whole.finishReason, "length");
    assert.equal(whole.response.modelId, MODEL);
  },

  async completion() {
    const whole = await generateText({ ...asked, model: provider.completionModel(MODEL) });
    assert.ok(whole.text);
  },

  async stream() {
    const whole = await generateText(asked);
    const result = streamText(asked);
    const pieces = [];
    for await (const piece of result.textStream) pieces.push(piece);
    assert.ok(pieces.length > 1);
    assert.equal(pieces.join(""), whole.text);
    assert.equal(await result.finishReason, "length");
  },

  async usage() {
    const { usage } = await generateText(asked);
    assert.equal(usage.outputTokens, MAX_TOKENS);
    assert.equal(usage.totalTokens, usage.inputTokens + MAX_TOKENS);
    const result = streamText(asked);
    await result.consumeStream();
    const streamed = await result.usage;
    assert.equal(streamed.inputTokens, usage.inputTokens);
    assert.equal(streamed.outputTokens, MAX_TOKENS);
  },

  async context_overflow() {
    const tooLong = { ...asked, prompt: TOO_LONG };
    const seen = [];
    const result = streamText({ ...tooLong, onError: ({ error }) => seen.push(error) });
    await result.consumeStream();
    for (const error of [await errorOf(() => generateText(tooLong)), seen[0]]) {
      assert.ok(APICallError.isInstance(error), error);
      assert.equal(error.statusCode, 400);
      assert.match(error.message, /longer than the model's context length/);
      assert.equal(JSON.parse(error.responseBody).error.code, "context_length_exceeded");
      assert.equal(error.isRetryable, false);
    }
  },

  async bad_field() {
    const error = await errorOf(() => generateText({ ...asked, providerOptions: { router: { min_p: "high" } } }));
    assert.ok(APICallError.isInstance(error), error);
    assert.match(error.message, /min_p/);
    assert.equal(JSON.parse(error.responseBody).error.param, "min_p");
  },

  // The SDK has no list of models; its provider's address has.
  async models() {
    const listed = await (await fetch(`${URL_OF_ROUTER}/v1/models`)).json();
    assert.deepEqual(listed.data.map((model) => model.id), [MODEL]);
  },

  async structured_output() {
    const { object } = await generateObject({ ...asked, maxOutputTokens: 100, schema: jsonSchema(CITY_SCHEMA) });
    assert.ok(["Oslo", "Rome"].includes(object.city));
  },

  async abort() {
    const before = await abortedCount();
    const leaving = new AbortController();
    const result = streamText({
      ...asked,
      maxOutputTokens: ABORTED_TOKENS,
      providerOptions: { router: { ignore_eos: true } },
      abortSignal: leaving.signal,
    });
    await readSome(result.textStream);
    leaving.abort();
    await waitAborted(before);
  },
});
