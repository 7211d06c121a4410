// What the page asks of the server beside its stream of events: an answer, a plan, a held engine.

import { askForKey, authorised } from "./key.js";

class ApiError extends Error {}

async function post(path, body, options = {}) {
  const response = await fetch(path, {
    method: "POST",
    headers: authorised({ "Content-Type": "application/json", ...options.headers }),
    body: JSON.stringify(body),
    signal: options.signal,
  });
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  if (response.status === 401) askForKey();
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    // Not ours: a proxy's page, say. The status has to do.
  }
  return new ApiError(message);
}

async function get(path) {
  const response = await fetch(path, { headers: authorised() });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

async function control(order) {
  return (await post("/watch/control", order)).json();
}

const planOptions = () => get("/watch/plan/options");

async function plan(question, signal) {
  return (await post("/watch/plan", question, { signal })).json();
}

/** A conversation's token ids, as the model's chat template writes it. */
async function chatTokens(model, messages, signal) {
  return (await (await post("/tokenize", { model, messages }, { signal })).json()).tokens;
}

/** Streams an answer, or several of one call: `onChunk` gets each chunk as it comes. */
async function stream(path, body, { id, signal, onChunk }) {
  const options = { headers: { "X-Request-Id": id }, signal };
  const response = await post(path, { ...body, stream: true, stream_options: { include_usage: true } }, options);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) takeChunk(block, onChunk);
  }
}

function takeChunk(block, onChunk) {
  if (!block.startsWith("data:")) return;
  const data = block.slice(5).trim();
  if (data === "[DONE]") return;
  const chunk = JSON.parse(data);
  if (chunk.error) throw new ApiError(chunk.error.message);
  onChunk(chunk);
}

export { ApiError, chatTokens, control, plan, planOptions, refusal, stream };
