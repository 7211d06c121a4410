// A line of figures over every view: what runs, how fast each phase goes, how full the KV cache is.

import { html, useEffect, useRef, useRevision, useState } from "./dom.js";
import { chunkTokens, slotTokens } from "./step_words.js";
import { count, percent, plural, rate } from "./units.js";

const WINDOW_S = 2;
const SPEECH_MS = 5000;

/** What was so in the two seconds before a moment. */
function pulseAt(history, at_s) {
  const end = history.stepsUntil(at_s);
  const now = { running: 0, waiting: 0, prefillRate: 0, decodeRate: 0, used: null, hitRate: null };
  const last = history.steps[end - 1];
  const isFresh = last && at_s - last.done_s < WINDOW_S;
  if (isFresh) {
    now.running = last.running ?? last.slots.length + last.chunks.length;
    now.waiting = last.waiting ?? 0;
    let read = 0;
    let written = 0;
    let began_s = last.began_s;
    for (let index = end - 1; index >= 0 && history.steps[index].done_s > at_s - WINDOW_S; index -= 1) {
      read += chunkTokens(history.steps[index]);
      written += slotTokens(history.steps[index]);
      began_s = history.steps[index].began_s;
    }
    const span_s = Math.max(last.done_s - began_s, 1e-3);
    now.prefillRate = read / span_s;
    now.decodeRate = written / span_s;
  }
  const map = history.mapAt(at_s);
  if (map) Object.assign(now, { used: map.usedShare, hitRate: map.hit_rate });
  return now;
}

function Pulse({ source }) {
  const { history, player } = source;
  useRevision(() => JSON.stringify(pulseAt(history, player.cursor_s())), 4);
  const now = pulseAt(history, player.cursor_s());
  return html`<dl class="pulse">
    <div><dt>running</dt><dd>${count(now.running)}</dd></div>
    <div><dt>waiting</dt><dd>${count(now.waiting)}</dd></div>
    <div class="of-prefill"><dt>prefill</dt><dd>${rate(now.prefillRate, "tok/s")}</dd></div>
    <div class="of-decode"><dt>decode</dt><dd>${rate(now.decodeRate, "tok/s")}</dd></div>
    <div><dt>KV in use</dt><dd>${percent(now.used)}</dd></div>
    <div><dt>prefix hits</dt><dd>${percent(now.hitRate)}</dd></div>
    <${Spoken} now=${now} isLive=${player.mode === "live"} />
  </dl>`;
}

/** For those who listen: a sentence when something changed, and not more often than every few seconds. */
function Spoken({ now, isLive }) {
  const [sentence, setSentence] = useState("");
  const last = useRef({ words: "", at_ms: -Infinity });
  const words = `${plural(now.running, "request")} running, ${count(now.waiting)} waiting`;
  useEffect(() => {
    const at_ms = performance.now();
    if (!isLive || words === last.current.words || at_ms - last.current.at_ms < SPEECH_MS) return;
    last.current = { words, at_ms };
    setSentence(words);
  });
  return html`<div class="unseen"><dt>now</dt><dd aria-live="polite">${sentence}</dd></div>`;
}

export { Pulse, pulseAt };
