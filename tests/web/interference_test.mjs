// What others' prompts take of a request that still runs, worked out by hand; run by node.

import assert from "node:assert/strict";
import test from "node:test";

const static_ = new URL("../../src/twostroke/web/static/", import.meta.url);
const { History } = await import(new URL("history.js", static_));
const { requestAt } = await import(new URL("request_state.js", static_));
const { partsOf } = await import(new URL("phase_bar.js", static_));

const HELLO = { t: "hello", now_s: 100, model: "m", groups: [{ blocks: 8 }], block_size: 16 };
const [STREAM, LONG] = [1, 2];
const slot = [STREAM, 20, 0, 0];

/** Steps without a pause between them, from second 101 on: each is its seconds, its chunks, its slots, and more. */
function run(...steps) {
  const history = new History();
  history.apply(HELLO);
  history.apply({ t: "arrived", r: STREAM, id: "a", at_s: 100, prompt_tokens: 16, max_tokens: 99, sample: 0 });
  history.apply({ t: "admitted", r: STREAM, at_s: 101, cached_tokens: 0, tiers: {}, break: null });
  let began_s = 101;
  steps.forEach(([compute_s, chunks, slots, more = {}], id) => {
    const done_s = began_s + compute_s;
    history.apply({ t: "step", id, began_s, done_s, compute_s, chunks, slots, preempted: [], ...more });
    began_s = done_s;
  });
  return history;
}

const whole = [0.5, [[STREAM, 0, 16, 16]], []];
const plain = [0.1, [], [slot]];
const mixed = (compute_s, more) => [compute_s, [[LONG, 0, 64, 128]], [slot], more];

function stateOf(history, at_s = history.latest_s) {
  return requestAt(history.requests.get(STREAM), at_s, history);
}

function near(found, wanted) {
  assert.ok(Math.abs(found - wanted) < 1e-9, `${found} is not ${wanted}`);
}

test("between its tokens: what steps with chunks took longer than those without", () => {
  const history = run(whole, plain, mixed(0.4), mixed(0.5), [0.2, [], [slot]]);
  const state = stateOf(history);
  assert.equal(state.state, "writing");
  near(state.interference_s, 0.9 - 2 * 0.15);
  assert.equal(state.prefillInterference_s, 0);
  near(partsOf(state).decode_s, 1.2 - 0.6);
  near(stateOf(history, 101.6).interference_s, 0);
  near(stateOf(history, 102).interference_s, 0.4 - 0.1);
});

test("what came after its latest token is not its own yet", () => {
  near(stateOf(run(whole, plain, mixed(0.4), [0.7, [[LONG, 64, 64, 128]], []])).interference_s, 0.3);
});

test("where no step was without chunks, the cost model tells the chunks' part", () => {
  near(stateOf(run(whole, mixed(0.4, { split: [0.3, 0.1] }), mixed(0.4, { split: [0.2, 0.2] }))).interference_s, 0.5);
});

test("steps faster than those without chunks took nothing", () => {
  assert.equal(stateOf(run(whole, plain, mixed(0.05))).interference_s, 0);
});

test("in its prefill: steps without a chunk of its own, and what shared a step with one", () => {
  const others = [0.3, [[LONG, 0, 64, 64]], []];
  const shared = [0.4, [[STREAM, 0, 8, 16], [LONG, 0, 8, 8]], [], { chunk_shares: [0.75, 0.6] }]; // prettier-ignore
  const rest = [0.2, [[STREAM, 8, 8, 16]], []];
  const history = run(others, shared, rest, plain);
  near(stateOf(history, 101.2).interference_s, 0);
  near(stateOf(history, 101.3).interference_s, 0.3);
  near(stateOf(history, 101.5).interference_s, 0.3);
  assert.equal(stateOf(history, 101.8).state, "reading");
  near(stateOf(history, 101.8).interference_s, 0.3 + 0.1);
  const state = stateOf(history);
  near(state.interference_s, 0.4);
  near(partsOf(state).prefill_s, 0.5);
  delete shared[3].chunk_shares;
  near(stateOf(run(others, shared, rest, plain)).interference_s, 0.3 + 0.2);
});

test("steps while it was preempted are not its own", () => {
  const gone = [0.4, [[LONG, 0, 64, 64]], [], { preempted: [STREAM] }];
  const back = [0.4, [[STREAM, 0, 17, 17]], []];
  const history = run(whole, plain, mixed(0.3), gone, back, plain, plain);
  const present = 1 - 0.8 / 1.4;
  near(stateOf(history).interference_s, (1.1 - 3 * 0.1) * present);
});

test("one whose beginning was not seen says nothing, nor does one that waits", () => {
  const history = new History();
  history.apply(HELLO);
  const step = { t: "step", id: 0, compute_s: 0.1, chunks: [], preempted: [] };
  for (const began_s of [101, 102]) history.apply({ ...step, began_s, done_s: began_s + 0.1, slots: [slot] });
  assert.equal(stateOf(history).interference_s, null);
  near(partsOf(stateOf(history)).decode_s, 1);
  history.apply({ t: "arrived", r: LONG, id: "b", at_s: 102, prompt_tokens: 16, max_tokens: 9, sample: 0 });
  assert.equal(requestAt(history.requests.get(LONG), 102.1, history).interference_s, null);
});

test("the end's own figure replaces it", () => {
  const history = run(whole, plain, mixed(0.4));
  const [ended_s, figures] = [history.latest_s, { interference_s: 0.31, prefill_interference_s: 0.01 }];
  history.apply({ t: "ended", r: STREAM, at_s: ended_s + 0.1, output_tokens: 3, token_times_s: [], ...figures });
  near(stateOf(history, ended_s).interference_s, 0.3);
  assert.equal(stateOf(history).interference_s, 0.31);
});
