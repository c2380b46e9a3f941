// What Node's clients do first, each cell on its own: run by `run.py`, beside its packages.
//
//     node node_clients.mjs CLIENT DEMO_URL STAND_IN_URL VECTORS_URL
//
// prints a JSON line for each cell: what it is, and how it ended on the demo model and on the stand-in.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import path from "node:path";

const packages = createRequire(path.join(process.cwd(), "package.json"));
const load = (name) => import(pathToFileURL(packages.resolve(name)).href);
const version = (name) => JSON.parse(readFileSync(path.join(process.cwd(), "node_modules", name, "package.json"))).version;

const PICTURE = readFileSync(path.join(import.meta.dirname, "../../examples/shapes.png"));
const URL = `data:image/png;base64,${PICTURE.toString("base64")}`;
const ASK = "What is in the picture?";
const SHOWN = [{ role: "user", content: [{ type: "image_url", image_url: { url: URL } }, { type: "text", text: ASK }] }];
const { z } = await load("zod");
const Place = z.object({ place: z.enum(["left", "right"]) });
const SCHEMA = {
  type: "object",
  properties: { place: { type: "string", enum: ["left", "right"] } },
  required: ["place"],
  additionalProperties: false,
};

function check(found, why) {
  if (!found) throw new Error(why);
}
const says = (text) => check(typeof text === "string" && text.trim(), `nothing said: ${JSON.stringify(text)}`);

async function openai(url) {
  const { default: OpenAI } = await load("openai");
  return new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
}

const OPENAI = {
  async image(url, model) {
    const client = await openai(url);
    says((await client.chat.completions.create({ model, messages: SHOWN })).choices[0].message.content);
  },
  async stream(url, model) {
    const client = await openai(url);
    const stream = await client.chat.completions.create({ model, messages: SHOWN, stream: true });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
    says(text);
    const left = await client.chat.completions.create({ model, messages: SHOWN, stream: true });
    left.controller.abort();
  },
  async structured(url, model) {
    const client = await openai(url);
    const { zodResponseFormat } = await load("openai/helpers/zod");
    const found = await client.chat.completions.parse({ model, messages: SHOWN, response_format: zodResponseFormat(Place, "place") });
    check(found.choices[0].message.parsed.place, "nothing parsed");
  },
  async tools(url, model) {
    const client = await openai(url);
    let called = false;
    const look = async () => {
      called = true;
      return "a circle";
    };
    const tool = { type: "function", function: { name: "look", description: "Looks closer", parameters: SCHEMA, parse: JSON.parse, function: look } };
    const runner = client.chat.completions.runTools({ model, messages: SHOWN, tools: [tool], max_tokens: 300 }, { maxChatCompletions: 3 });
    says(await runner.finalContent());
    check(called, "the model did not call the tool, and nothing makes it");
  },
  async responses(url, model) {
    const client = await openai(url);
    const first = await client.responses.create({ model, input: ASK });
    says(first.output_text);
    const stream = client.responses.stream({ model, input: "And?", previous_response_id: first.id });
    says((await stream.finalResponse()).output_text);
    const tools = [{ type: "function", name: "look", strict: true, parameters: SCHEMA }];
    const called = await client.responses.create({ model, input: ASK, tools, tool_choice: "required", max_output_tokens: 300 });
    Place.parse(JSON.parse(called.output.find((item) => item.type === "function_call").arguments));
  },
  async embeddings() {
    const client = await openai(process.argv[5]);
    const found = await client.embeddings.create({ model: "tiny clip", input: "a" });
    check(found.data[0].embedding.length === 24, "of another width");
  },
};

function cells(make, own = {}) {
  const shown = [{ role: "user", content: [{ type: "image", image: PICTURE }, { type: "text", text: ASK }] }];
  return {
    async image(url, model) {
      const { generateText } = await load("ai");
      says((await generateText({ model: await make(url, model), messages: shown, maxRetries: 0 })).text);
    },
    async stream(url, model) {
      const { streamText } = await load("ai");
      let text = "";
      for await (const part of streamText({ model: await make(url, model), messages: shown, maxRetries: 0 }).textStream) text += part;
      says(text);
    },
    async structured(url, model) {
      const { generateObject } = await load("ai");
      const found = await generateObject({ model: await make(url, model), schema: Place, messages: shown, maxRetries: 0, maxOutputTokens: 300 });
      Place.parse(found.object);
    },
    async tools(url, model) {
      const { generateText, tool } = await load("ai");
      const look = tool({ description: "Looks closer", inputSchema: Place, execute: async () => "a circle" });
      const found = await generateText({ model: await make(url, model), messages: shown, tools: { look }, toolChoice: "required", maxRetries: 0, maxOutputTokens: 300 });
      Place.parse(found.toolCalls[0].input);
      check(found.toolResults[0].output === "a circle", "no result");
    },
    ...own,
  };
}

const CLIENTS = {
  openai: OPENAI,
  "@ai-sdk/openai-compatible": cells(async (url, model) => {
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    return createOpenAICompatible({ name: "mtmd", baseURL: `${url}/v1`, supportsStructuredOutputs: true })(model);
  }),
  "@ai-sdk/openai": cells(async (url, model) => {
    const { createOpenAI } = await load("@ai-sdk/openai");
    return createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })(model); // the Responses API, its default
  }),
  "@ai-sdk/anthropic": cells(async (url, model) => {
    const { createAnthropic } = await load("@ai-sdk/anthropic");
    return createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model);
  }),
};

async function attempt(cell, url, model) {
  try {
    await cell(url, model);
    return "";
  } catch (error) {
    return `${error.name}: ${error.message}`.slice(0, 300).replaceAll("\n", " ") || "failed";
  }
}

if (process.argv[2] === "--list") {
  console.log(Object.keys(CLIENTS).join("\n"));
} else {
  const [, , client, demo, standIn] = process.argv;
  for (const [what, cell] of Object.entries(CLIENTS[client])) {
    const found = { client: `${client} ${version(client)} (Node)`, cell: what, demo: await attempt(cell, demo, "demo model") };
    if (found.demo) found.stand_in = await attempt(cell, standIn, "stand-in");
    console.log(JSON.stringify(found));
  }
}
