// The classic situations, each caused by real requests, with one sentence on what to look at.

import { QUESTIONS, copyPrompt, fresh, longPrompt, story } from "./sample_texts.js";
import { sendChat, sendPrompts } from "./sending.js";

const LONG_TOKENS = 1600;
const SHARED_TOKENS = 800;
const [COPIED, COPIED_TOKENS] = [7, 100];

/** What fits in this model's context with room for an answer. */
function fitting(history, tokens) {
  const most = history.hello?.max_context;
  return most ? Math.min(tokens, Math.floor(most * 0.55)) : tokens;
}

function firstPiece(run) {
  return new Promise((resolve) => {
    const timer = setInterval(() => {
      if (run.first_ms === null && !run.done) return;
      clearInterval(timer);
      resolve();
    }, 20);
  });
}

/** A question whose answer goes on for a while. */
const atLength = (question) => `${question} Explain it in detail, in several paragraphs.`;

/** `add(name, options)` sends a chat, shows its row, and gives back the run; `addAll` several prompts at once. */
const SITUATIONS = [
  {
    name: "long",
    title: "A long prompt arrives amid streams",
    look:
      "Look at the columns: the long prompt is cut into hatched chunks, and the other streams' tokens go on between them, " +
      "a little slower.",
    async cause({ history, add, addAll }) {
      const streams = addAll("stream", QUESTIONS.slice(0, 4).map(atLength), { maxTokens: 160 });
      await Promise.all(streams.map(firstPiece));
      add("the long prompt", { prompt: longPrompt(fresh(), fitting(history, LONG_TOKENS)), maxTokens: 16 });
    },
  },
  {
    name: "prefix",
    title: "The same prefix again",
    look: "Look at TTFT: the second request finds its prompt's blocks in the cache and starts almost at once.",
    async cause({ history, add }) {
      const prompt = `${fresh()}. ${story(fresh(), fitting(history, SHARED_TOKENS))}\n\nWho is named first?`;
      await add("first time", { prompt, maxTokens: 16 }).finished;
      await add("again", { prompt, maxTokens: 16 }).finished;
    },
  },
  {
    name: "burst",
    title: "A burst of ten",
    look: "Look at TTFT from the first row to the last, and at how ten streams share each column: a step grows by less than ten times.",
    async cause({ addAll }) {
      const prompts = QUESTIONS.map(
        (question, index) => `${fresh()}. ${story(fresh(), 40 * (index % 4))}\n\n${atLength(question)}`,
      );
      addAll("request", prompts, { maxTokens: 48 });
    },
  },
  {
    name: "speculation",
    title: "Speculation off, then on",
    look: "Look at TPOT of the two rows, and at the strip below the columns: accepted drafts go up, rejected ones down.",
    needsDrafts: true,
    async cause({ add }) {
      const prompt = copyPrompt(COPIED, COPIED_TOKENS);
      await add("off", { prompt, maxTokens: 160, speculation: "off" }).finished;
      await add("on", { prompt, maxTokens: 160, speculation: "auto" }).finished;
    },
  },
];

/** Runs one; `onRun(name, run)` for each request it sends. */
function cause(situation, history, signal, onRun) {
  const add = (name, options) => {
    const run = sendChat(history, { temperature: 0, signal, ...options });
    onRun(name, run);
    return run;
  };
  const addAll = (name, prompts, options) => {
    const runs = sendPrompts(history, prompts, { temperature: 0, signal, ...options });
    runs.forEach((run, index) => onRun(`${name} ${index + 1}`, run));
    return runs;
  };
  return situation.cause({ history, add, addAll });
}

export { SITUATIONS, cause };
