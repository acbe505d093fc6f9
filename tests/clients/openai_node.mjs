// openai-node: chat, stream, zod's .parse, runTools, errors.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import assert from "node:assert";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0, timeout: 300000 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Say hello in one short sentence." }];
const whole = await client.chat.completions.create({ model, messages, max_completion_tokens: 12, temperature: 0 });
assert.equal(whole.usage.completion_tokens, 12);

let said = "";
for await (const chunk of await client.chat.completions.create({ model, messages, max_completion_tokens: 12, temperature: 0, stream: true }))
  said += chunk.choices[0]?.delta?.content ?? "";
assert.equal(said, whole.choices[0].message.content);

const City = z.object({ name: z.string(), size: z.enum(["small", "large"]) });
const parsed = await client.chat.completions.parse({ model, messages, response_format: zodResponseFormat(City, "city"), max_completion_tokens: 200, temperature: 0 });
if (parsed.choices[0].finish_reason === "stop") assert.ok(["small", "large"].includes(parsed.choices[0].message.parsed.size));

let called = 0;
const runner = client.chat.completions.runTools(
  {
    model, messages: [{ role: "user", content: "What is the weather in Oslo?" }], max_completion_tokens: 60, temperature: 0,
    tool_choice: { type: "function", function: { name: "weather" } },
    tools: [{ type: "function", function: {
      name: "weather", description: "The weather of a city.", parse: JSON.parse,
      parameters: { type: "object", properties: { city: { enum: ["Oslo", "Lima"] } }, required: ["city"], additionalProperties: false },
      function: (args) => { called += 1; assert.ok(["Oslo", "Lima"].includes(args.city)); return "3 degrees"; } } }],
  },
  { maxChatCompletions: 1 },
);
await runner.done().catch(() => {});
assert.ok(called >= 1);

await assert.rejects(client.chat.completions.create({ model: "no such model", messages }), (error) => error.status === 404 && error.code === "model_not_found");
