// Checks the AI SDK: its models for both APIs of OpenAI, for servers of that form, and for
// Anthropic's API.
//
// The last line that it prints is as that of __main__.py beside this file.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, streamText } from "ai";
import { Output, stepCountIs, tool } from "ai";
import { z } from "zod";

const address = process.argv[2];
const baseURL = `${address}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const served = { name: "vkmoe", baseURL, supportsStructuredOutputs: true };
const models = [
  createOpenAICompatible(served)("demo"),
  openai.chat("demo"),
  openai.responses("demo"),
  createAnthropic({ baseURL, apiKey: "none" })("demo"),
];
const days = z.union([z.literal(1), z.literal(2)]);
const schema = z.object({ city: z.enum(["Paris", "Rome"]), days });
const weather = tool({
  description: "Say what the weather of a city is.",
  inputSchema: schema,
  execute: async ({ city, days }) => `sunny in ${city} for ${days} days`,
});
const tools = { weather };
const common = { prompt: "How is the weather?", temperature: 0, maxRetries: 0 };
const short = { ...common, maxOutputTokens: 16 };
const long = { ...common, maxOutputTokens: 300 };

async function all(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

function rethrow({ error }) {
  throw error;
}

const checks = {
  async chat() {
    const texts = new Set();
    for (const model of models) texts.add((await generateText({ ...short, model })).text);
    assert(texts.size === 1 && !texts.has(""), `APIs give different replies: ${[...texts]}`);
  },
  async stream() {
    for (const model of models) {
      const { text } = await generateText({ ...short, model });
      const parts = await all(streamText({ ...short, model, onError: rethrow }).textStream);
      assert(text && parts.length > 1 && parts.join("") === text);
    }
  },
  async tools() {
    const named = { type: "tool", toolName: "weather" };
    // The first round demands a call, the second has its result and may not call.
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? named : "none" });
    for (const model of models) {
      const asked = { ...long, model, tools, prepareStep, stopWhen: stepCountIs(2) };
      const { steps } = await generateText(asked);
      assert.equal(steps.length, 2);
      assert.match(steps[0].toolResults[0].output, /^sunny in (Paris|Rome) for [12] days$/);
      const streamed = await streamText({ ...asked, onError: rethrow }).steps;
      assert.deepEqual(streamed[0].toolCalls[0].input, steps[0].toolCalls[0].input);
      assert.equal(streamed[1].text, steps[1].text);
    }
  },
  async structured() {
    for (const model of models) {
      const { object } = await generateObject({ ...long, model, schema });
      schema.parse(object);
      const streamed = streamObject({ ...long, model, schema, onError: rethrow });
      assert((await all(streamed.partialObjectStream)).length > 1);
      assert.deepEqual(await streamed.object, object);
      const { output } = await generateText({ ...long, model, output: Output.object({ schema }) });
      assert.deepEqual(output, object);
    }
  },
};

const found = {};
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    found[name] = "";
  } catch (error) {
    console.error(error);
    found[name] = String(error);
  }
}
console.log(JSON.stringify(found));
