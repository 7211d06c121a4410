// OpenAI's client for JavaScript: a chat, a stream, an answer held to a schema, a tool that is run, and responses.
import { z } from "zod";
import { API_KEY, BASE_URL, MODEL, finish, part } from "./given.mjs";

// shown
import OpenAI from "openai";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY });
// end
const ask = [{ role: "user", content: "Name three colours of the rainbow." }];
let whole;

await part("chat", async () => {
  // shown
  const messages = [{ role: "user", content: "Name three colours of the rainbow." }];
  const answer = await client.chat.completions.create({ model: MODEL, messages, temperature: 0, max_tokens: 40 });
  console.log(answer.choices[0].message.content);
  // end
  whole = answer.choices[0].message.content;
  if (!whole) throw new Error("an empty answer");
});

await part("stream", async () => {
  const stream = await client.chat.completions.create({
    model: MODEL, messages: ask, temperature: 0, max_tokens: 40, stream: true,
  });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  if (text !== whole) throw new Error(`streamed ${JSON.stringify(text)}`);
});

await part("structured answer", async () => {
  const { zodResponseFormat } = await import("openai/helpers/zod");
  const Cat = z.object({ colour: z.enum(["black", "white"]) });
  const completion = await client.chat.completions.parse({
    model: MODEL,
    messages: [{ role: "user", content: "Tom is a black cat." }],
    response_format: zodResponseFormat(Cat, "cat"),
  });
  Cat.parse(completion.choices[0].message.parsed);
});

await part("tool that is called and its result read", async () => {
  const called = [];
  const city = { type: "object", properties: { city: { enum: ["Oslo", "Rome"] } }, required: ["city"] };
  const parameters = { ...city, additionalProperties: false };
  const weather = (input) => { called.push(input.city); return `Rain in ${input.city}.`; };
  const runner = client.chat.completions.runTools({
    model: MODEL,
    messages: [{ role: "user", content: "How is the weather in Oslo?" }],
    temperature: 0,
    max_tokens: 200,
    tool_choice: { type: "function", function: { name: "weather" } },
    tools: [{ type: "function", function: { name: "weather", function: weather, parse: JSON.parse, parameters } }],
  });
  await runner.done();
  if (!["Oslo", "Rome"].includes(called[0])) throw new Error(`called with ${JSON.stringify(called)}`);
});

await part("responses, streamed", async () => {
  const stream = await client.responses.create({
    model: MODEL, input: ask, temperature: 0, max_output_tokens: 40, stream: true,
  });
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  if (text !== whole) throw new Error(`streamed ${JSON.stringify(text)}`);
});

finish();
