// Sends prompts from this page and follows their answers. The text stays text: nothing here or in the views makes HTML
// of it. Several prompts go in one call: a browser opens six connections to a server at most, and one of them watches.

import { chatTokens, stream } from "./api.js";
import { remember } from "./own_texts.js";

let sent = 0;

function newRun(prompt, id) {
  return {
    id,
    prompt,
    text: "",
    pieces: [],
    done: false,
    trouble: "",
    usage: null,
    timing: null,
    reason: null,
    began_ms: performance.now(),
    first_ms: null,
    last_ms: null,
    revision: 0, // changes whenever something else does
    finished: null,
  };
}

function newId(history) {
  sent += 1;
  return `${history.hello?.own_prefix || "page-"}${Date.now().toString(36)}-${sent}`;
}

function drawing({ maxTokens, temperature, topP, seed, speculation }) {
  const body = { max_tokens: maxTokens, temperature };
  if (topP !== undefined) body.top_p = topP;
  if (seed !== undefined && seed !== null) body.seed = seed;
  if (speculation) body.speculation = speculation;
  return body;
}

/** One answer to a conversation; `prompt` is a conversation of one message. The run fills as the answer comes. */
function sendChat(history, options) {
  const messages = options.messages || [{ role: "user", content: options.prompt }];
  const id = newId(history);
  const run = newRun(messages.at(-1).content, id);
  const body = { model: history.hello?.model, messages, ...drawing(options) };
  follow(
    [run],
    stream("/v1/chat/completions", body, { id, signal: options.signal, onChunk: (chunk) => take([run], chunk) }),
  );
  return run;
}

/** Several prompts at once, each a conversation of one message and a request of its own to the engine. */
function sendPrompts(history, prompts, options) {
  const id = newId(history);
  const runs = prompts.map((prompt) => newRun(prompt, id));
  follow(runs, streamTogether(history.hello?.model, runs, options));
  return runs;
}

/** The call that takes several prompts knows no chat: the server's template is applied before, and ids are sent. */
async function streamTogether(model, runs, options) {
  const { signal } = options;
  const asMessages = ({ prompt }) => [{ role: "user", content: prompt }];
  const prompt = await Promise.all(runs.map((run) => chatTokens(model, asMessages(run), signal)));
  for (const run of runs) run.began_ms = performance.now();
  const body = { model, prompt, ...drawing(options) };
  await stream("/v1/completions", body, { id: runs[0].id, signal, onChunk: (chunk) => take(runs, chunk) });
}

function take(runs, chunk) {
  for (const choice of chunk.choices || []) {
    const run = runs[choice.index];
    const piece = choice.text ?? choice.delta?.content ?? choice.delta?.reasoning_content;
    if (piece) takePiece(run, piece);
    if (choice.timing) run.timing = choice.timing;
    if (choice.finish_reason) Object.assign(run, { reason: choice.finish_reason, revision: run.revision + 1 });
  }
  if (runs.length > 1) return; // what follows is of all of them together
  if (chunk.usage) runs[0].usage = chunk.usage;
  if (chunk.timing) runs[0].timing = chunk.timing;
}

function takePiece(run, piece) {
  run.last_ms = performance.now() - run.began_ms;
  run.first_ms ??= run.last_ms;
  run.text += piece;
  run.pieces.push({ text: piece, at_ms: run.last_ms });
  run.revision += 1;
}

function follow(runs, streamed) {
  remember(runs);
  const finished = streamed
    .catch((error) => {
      for (const run of runs) {
        if (error.name === "AbortError") run.reason = "stopped";
        else run.trouble = error.message;
      }
    })
    .then(() => {
      for (const run of runs) Object.assign(run, { done: true, revision: run.revision + 1 });
    });
  for (const run of runs) run.finished = finished.then(() => run);
}

export { sendChat, sendPrompts };
