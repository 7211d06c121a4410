// Vercel's AI SDK: a text, a stream, an object held to a schema, and a tool that is run in a loop of two steps.
import { API_KEY, BASE_URL, MODEL, finish, part } from "./given.mjs";

// shown
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

const where = { baseURL: BASE_URL, apiKey: API_KEY };
const here = createOpenAICompatible({ name: "here", supportsStructuredOutputs: true, ...where });
// end
import { Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const prompt = "Name three colours of the rainbow.";
let whole;

await part("text", async () => {
  // shown
  const { text } = await generateText({ model: here(MODEL), prompt: "Why is the sky blue?", maxOutputTokens: 40 });
  console.log(text);
  // end
  whole = (await generateText({ model: here(MODEL), prompt, temperature: 0, maxOutputTokens: 40 })).text;
  if (!text || !whole) throw new Error("an empty answer");
});

await part("stream", async () => {
  let streamed = "";
  const { textStream } = streamText({ model: here(MODEL), prompt, temperature: 0, maxOutputTokens: 40 });
  for await (const piece of textStream) streamed += piece;
  if (streamed !== whole) throw new Error(`streamed ${JSON.stringify(streamed)}`);
});

await part("structured answer", async () => {
  const schema = z.object({ colour: z.enum(["black", "white"]) });
  const output = Output.object({ schema });
  schema.parse((await generateText({ model: here(MODEL), output, prompt: "Tom is a black cat." })).output);
});

await part("tool that is called and its result read", async () => {
  const called = [];
  const weather = tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.enum(["Oslo", "Rome"]) }),
    execute: async ({ city }) => { called.push(city); return `Rain in ${city}.`; },
  });
  const { steps } = await generateText({
    model: here(MODEL),
    prompt: "How is the weather in Oslo?",
    tools: { weather },
    toolChoice: "required",
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => (stepNumber > 0 ? { toolChoice: "none" } : {}),
    temperature: 0,
    maxOutputTokens: 200,
  });
  if (steps.length !== 2 || called.length < 1) throw new Error(`${steps.length} steps, called ${called}`);
});

finish();
