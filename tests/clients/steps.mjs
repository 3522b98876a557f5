// The steps of a client's script in JavaScript, as steps.py is for Python:
//   node tests/clients/openai_client.mjs http://127.0.0.1:30000 MODEL
import assert from "node:assert/strict";

export const [URL_OF_ROUTER, MODEL] = process.argv.slice(2);
export const QUESTION = "What is a parser?";
export const MAX_TOKENS = 12;
export const TOO_LONG = "What is a parser? ".repeat(2000);
export const ABORTED_TOKENS = 1500;
export const CITY_SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] }, is_capital: { type: "boolean" } },
  required: ["city", "is_capital"],
  additionalProperties: false,
};

// Run all steps and print how each ended.
export async function run(steps) {
  const results = {};
  for (const [name, step] of Object.entries(steps)) {
    try {
      await step();
      results[name] = null;
    } catch (error) {
      results[name] = String(error.stack ?? error).slice(0, 3000);
    }
  }
  console.log(JSON.stringify(results));
}

// Return the error with which a call ends.
export async function errorOf(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  return assert.fail("not refused");
}

// Read a few items, then close.
export async function readSome(iterable, count = 3) {
  for await (const _item of iterable) {
    count -= 1;
    if (count === 0) break;
  }
  assert.equal(count, 0);
}

// Return how many requests the router has aborted because their clients had left.
export async function abortedCount() {
  const metrics = await (await fetch(`${URL_OF_ROUTER}/metrics`)).text();
  return Number(/aborts_total\{reason="client_gone"\} (\d+)/.exec(metrics)?.[1] ?? 0);
}

// Return when the router has aborted a request, more than the `before` that it had aborted when asked first.
export async function waitAborted(before) {
  const deadline = Date.now() + 20_000;
  while ((await abortedCount()) <= before) {
    assert.ok(Date.now() < deadline, "the router did not notice that the client had left");
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}
