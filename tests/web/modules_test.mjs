// The page's modules that draw nothing, run by node: history, player, a request at a moment, words and units.

import assert from "node:assert/strict";
import test from "node:test";

const static_ = new URL("../../src/twostroke/web/static/", import.meta.url);
const { History, upperBound } = await import(new URL("history.js", static_));
const { BANDS, bandsOf, sizeOf, totalsOf, touchedOf } = await import(new URL("block_bands.js", static_));
const { Player } = await import(new URL("player.js", static_));
const { keptWords, promiseWords, requestAt } = await import(new URL("request_state.js", static_));
const { linesOf, replayed } = await import(new URL("recording.js", static_));
const { prefillShare, stepSentence } = await import(new URL("step_words.js", static_));
const { partsOf } = await import(new URL("phase_bar.js", static_));
const { bytes, clock, percent, seconds, tokens } = await import(new URL("units.js", static_));

const HELLO = { t: "hello", now_s: 100, model: "m", groups: [{ blocks: 8 }], block_size: 16 };

function step(id, began_s, chunks, slots, more = {}) {
  return {
    t: "step",
    id,
    began_s,
    done_s: began_s + 0.01,
    compute_s: 0.01,
    predicted_s: 0.008,
    chunks,
    slots,
    preempted: [],
    waiting: 0,
    running: 1,
    ...more,
  };
}

function run() {
  return [
    HELLO,
    { t: "arrived", r: 3, id: "a", at_s: 100, prompt_tokens: 40, max_tokens: 4, level: "default", sample: 0 },
    { t: "admitted", r: 3, at_s: 100.5, cached_tokens: 16, tiers: {}, break: null },
    step(0, 100.5, [[3, 16, 24, 40]], []),
    step(1, 100.6, [], [[3, 41, 4, 2]]),
    step(2, 100.7, [], [[3, 44, 0, -1]]),
    {
      t: "kv",
      at_s: 100.7,
      groups: [
        {
          runs: [
            [0, 3, "used", 3],
            [3, 5, "free", -1],
          ],
        },
      ],
      hit_rate: 0.4,
      tiers: [],
    },
    {
      t: "ended",
      r: 3,
      at_s: 100.8,
      reason: "stop",
      prompt_tokens: 40,
      output_tokens: 4,
      queue_s: 0.5,
      prefill_s: 0.01,
      interference_s: 0,
      decode_s: 0.1,
      ttft_s: 0.51,
      tpot_s: 0.03,
      cached_tokens: 16,
      token_times_s: [],
    },
  ];
}

function filled(events = run()) {
  const history = new History();
  for (const event of events) history.apply(event);
  return history;
}

test("a request at each moment: not there, waiting, reading, writing, done", () => {
  const history = filled();
  const at = (at_s) => requestAt(history.requests.get(3), at_s, history);
  assert.equal(at(99), null);
  assert.equal(at(100.2).state, "waiting");
  assert.equal(at(100.505).state, "reading");
  const writing = at(100.75);
  assert.equal(writing.state, "writing");
  assert.equal(writing.tokens, 4, "one of the chunk, three of a slot with two drafts held, none of a wasted slot");
  assert.equal(at(101).state, "ended");
});

test("a promise has its limit and says whether it was kept; what was not promised is not there", () => {
  const events = run();
  Object.assign(events.at(-1), { promised_ttft_s: 0.5, promised_itl_s: null, kept_ttft: false, kept_itl: null });
  const history = filled(events);
  const [promise, ...others] = requestAt(history.requests.get(3), 101, history).promises;
  assert.equal(promiseWords(promise), "TTFT up to 500 ms was promised");
  assert.equal(keptWords(promise), "TTFT ✗ broken");
  assert.equal(others.length, 0);
});

test("a step that comes after the end of its request adds no token", () => {
  const events = run();
  events.at(-1).token_times_s = [100.51, 100.61, 100.61, 100.61];
  const history = filled(events);
  history.apply(step(3, 100.8, [], [[3, 45, 0, 0]]));
  assert.equal(history.requests.get(3).tokenTimes.length, 4);
});

test("accepted and offered drafts are counted, a wasted slot takes none away", () => {
  const request = filled().requests.get(3);
  assert.equal(request.drafts, 4);
  assert.equal(request.held, 2);
});

test("a new hello begins anew", () => {
  const history = filled();
  history.apply({ ...HELLO, now_s: 5 });
  assert.equal(history.steps.length + history.requests.size + history.maps.length, 0);
});

test("history is bounded, and numbers of steps stay what they were", () => {
  const history = filled([HELLO]);
  for (let id = 0; id < 60000; id += 1) history.apply(step(id, 101 + id * 0.01, [], [[id % 900, 10, 0, 0]]));
  assert.ok(history.steps.length <= 50000);
  assert.equal(history.steps[0].id, history.firstStep);
});

test("history is bounded by what its steps hold, too", () => {
  const history = filled([HELLO]);
  const slots = Array.from({ length: 500 }, (_, number) => [number, 10, 0, 0]);
  for (let id = 0; id < 4000; id += 1) history.apply(step(id, 101 + id * 0.01, [], slots));
  assert.ok(history.steps.length >= 2000 && history.steps.length <= 2500);
  assert.equal(history.work, history.steps.length * 500);
  assert.equal(history.steps[0].id, history.firstStep);
  assert.equal(history.steps.at(-1).id, 3999);
});

test("requests whose end was missed do not stay for ever, and one that goes on does", () => {
  const history = filled([HELLO]);
  const arrived = (r, at_s) => ({ t: "arrived", r, id: `call ${r}`, at_s, prompt_tokens: 4, sample: 0 });
  history.apply({ t: "skipped", count: 7 });
  history.apply(arrived(0, 100));
  for (let r = 1; r <= 1000; r += 1) {
    history.apply(arrived(r, 100 + r));
    history.apply(step(r, 100 + r, [], [[0, 10, 0, 0]]));
  }
  assert.ok(history.requests.size <= 402);
  assert.ok(history.requests.has(0) && history.requests.has(1000));
  assert.equal(history.requests.has(1), false);
});

test("a map has a band for each tier that there is", () => {
  const runs = [
    [0, 3, "used", 3],
    [3, 5, "free", -1],
  ];
  assert.deepEqual(bandsOf({ groups: [{ runs }], tiers: [] }, 0), ["device"], "also of a record that knew no bands");
  const host = [
    [0, 2, "kept", -1],
    [2, 1, "moving", -1],
    [3, 4, "written", -1],
    [7, 9, "free", -1],
  ];
  const map = { t: "kv", at_s: 102, groups: [{ runs, host }], tiers: [{ name: "host" }, { name: "disk", blocks: 12 }] };
  assert.deepEqual(bandsOf(map, 0), ["device", "host", "disk"]);
  assert.equal(sizeOf(BANDS.host.runsOf(map, 0)), 16);
  assert.equal(touchedOf(host), 7);
  assert.deepEqual(totalsOf(host), { kept: 2, moving: 1, written: 4, free: 9 });
  assert.deepEqual(BANDS.disk.runsOf(map, 0), [[0, 12, "disk", -1]]);
  const history = filled([HELLO, map, { ...map, at_s: 103, groups: [{ runs, host: [[0, 16, "free", -1]] }] }]);
  assert.equal(history.touched["host 0"], 7, "what was ever in use stays in sight");
  assert.equal(history.mapRuns, 6 + 3);
});

test("block maps are bounded by what they hold, and the latest stays", () => {
  const history = filled([HELLO]);
  const runs = Array.from({ length: 9000 }, (_, first) => [first, 1, first % 2 ? "free" : "used", 1]);
  for (let at_s = 101; at_s < 301; at_s += 1) history.apply({ t: "kv", at_s, groups: [{ runs }] });
  assert.ok(history.maps.length >= 40 && history.maps.length * runs.length <= 500000);
  assert.equal(history.mapRuns, history.maps.length * runs.length);
  assert.equal(history.mapAt(1000).at_s, 300);
  const finest = Array.from({ length: 600000 }, (_, first) => [first, 1, "used", 1]);
  history.apply({ t: "kv", at_s: 302, groups: [{ runs: finest }] });
  assert.equal(history.maps.length, 1);
});

test("the engine's state is the latest that was said", () => {
  const history = filled([{ ...HELLO, state: "ready" }]);
  assert.equal(history.engineState, "ready");
  history.apply({ t: "state", state: "restarting" });
  assert.equal(history.engineState, "restarting");
  history.apply({ ...HELLO, state: "ready" });
  assert.equal(history.engineState, "ready");
});

test("requests are bounded, and none that still runs is forgotten", () => {
  const history = filled([HELLO]);
  for (let r = 0; r < 1000; r += 1) {
    history.apply({ t: "arrived", r, id: `i${r}`, at_s: 100 + r, prompt_tokens: 1, sample: 0 });
    if (r) history.apply({ t: "ended", r, at_s: 100.5 + r, token_times_s: [] });
  }
  assert.ok(history.requests.size <= 401);
  assert.ok(history.requests.has(0));
  assert.ok(history.calls.size <= 401);
});

test("requests of one call know their places", () => {
  const history = filled([HELLO]);
  for (const r of [7, 8]) history.apply({ t: "arrived", r, id: "same", at_s: 100, prompt_tokens: 1, sample: 0 });
  assert.deepEqual(
    [7, 8].map((r) => history.requests.get(r).place),
    [0, 1],
  );
});

test("an unknown event is left alone", () => {
  const history = filled();
  const { revision } = history;
  history.apply({ t: "something-new" });
  history.apply({ t: "constructor" });
  history.apply({ t: [] });
  assert.equal(history.revision, revision);
});

test("a player holds, scrubs, plays slowly and comes back", () => {
  const history = filled();
  const player = new Player(history);
  assert.equal(player.mode, "live");
  player.seek(100.6);
  assert.equal(player.mode, "held");
  player.play(0.25);
  player.advance(0.2);
  assert.ok(Math.abs(player.cursor_s() - 100.65) < 1e-9);
  player.nudge(-1);
  assert.ok(Math.abs(player.cursor_s() - 100.51) < 1e-9, "the step before");
  player.goLive();
  assert.equal(player.mode, "live");
});

test("a replay plays to its end, waits through no long pause, and begins again", () => {
  const events = [...run(), step(3, 200, [], [[3, 44, 0, 0]])];
  const { history, player } = replayed(events);
  player.play(1);
  for (let frame = 0; frame < 200 && player.mode === "playing"; frame += 1) player.advance(0.016);
  assert.equal(player.mode, "held");
  assert.equal(player.cursor_s(), history.latest_s);
  player.play(1);
  assert.equal(player.cursor_s(), history.oldest_s);
});

test("a torn record plays, a strange file is refused with a sentence", () => {
  const text = run()
    .map((event) => JSON.stringify(event))
    .join("\n");
  assert.equal(linesOf(text.slice(0, -20)).length, run().length - 1);
  assert.throws(() => linesOf("{}\nnot an event\n{}"), /line 2/);
  assert.throws(() => replayed([{ t: "step" }]), /not a recorded run/);
});

test("a record with a restarted engine holds two runs, and each plays", () => {
  const events = [...run(), { ...HELLO, now_s: 5 }, { ...HELLO, now_s: 6 }, step(0, 7, [], [[1, 5, 0, 0]])];
  const first = replayed(events);
  assert.equal(first.runs, 2);
  assert.equal(first.history.steps.length, 3);
  const second = first.choose(1);
  assert.equal(second.which, 1);
  assert.equal(second.history.steps.length, 1);
  assert.equal(replayed(run()).runs, 1);
});

test("a record of wrong shapes is refused with a sentence", () => {
  for (const wrong of [step(0, 1, null, []), step(0, 1, [1], []), { t: "kv", at_s: 1 }, null]) {
    assert.throws(() => replayed([HELLO, wrong]), /event 2 of this recorded run/);
  }
  for (const wrong of [[], [null], {}, null, [1]]) assert.throws(() => replayed(wrong), /not a recorded run/);
});

test("a mixed step is split by what the cost model says, or by tokens", () => {
  const mixed = step(
    0,
    0,
    [[1, 0, 30, 30]],
    [
      [2, 5, 0, 0],
      [3, 5, 8, 1],
    ],
  );
  assert.equal(prefillShare(mixed), 30 / 40);
  assert.equal(prefillShare({ ...mixed, split: [3, 1] }), 0.75);
  assert.match(
    stepSentence(mixed),
    /10 ms measured, 8 ms predicted, prefill of 30 tokens in 1 chunk, decode of 2 streams, 3 tokens, 1 of 8 drafts accepted/,
  );
});

test("a phase bar adds up", () => {
  const parts = partsOf({ queue_s: 1, prefill_s: 2, interference_s: 1.5, prefillInterference_s: 0.5, decode_s: 4 });
  assert.equal(parts.queue_s + parts.prefill_s + parts.interference_s + parts.decode_s, 7);
});

test("numbers have units", () => {
  assert.equal(seconds(0.0123), "12.3 ms");
  assert.equal(seconds(null), "–");
  assert.equal(seconds(0.00045), "450 µs");
  assert.equal(bytes(16060522496), "16.1 GB");
  assert.equal(percent(0.034), "3.4%");
  assert.equal(tokens(1), "1 token");
  assert.equal(clock(65.25), "1:05.3");
  assert.equal(upperBound([{ a: 1 }, { a: 2 }], 1, "a"), 1);
});
