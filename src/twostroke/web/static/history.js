// What the events of a run say, kept by time: steps, requests and block maps of the last minutes, each bounded.
// Knows the events; knows nothing of the network, of drawing, or of which moment is being looked at.

import { BANDS, bandsOf, touchedOf } from "./block_bands.js";
import { NO_STEPS, chunkShare, totalsAfter } from "./interference.js";
import { newRequest } from "./request_state.js";

const MAX_STEPS = 40000;
const MAX_WORK = 1000000; // chunks and slots of all steps together: a step of 256 streams is as large as 256 of one
const MAX_MAPS = 4000;
const MAX_RUNS = 400000; // of all maps together: some tens of MB, however finely the blocks are divided
const MAX_REQUESTS = 400;
const SILENT_S = 300; // where events were missed, the end of one that was silent for so long was among them
const MAX_TOKEN_TIMES = 20000;
const TRIM_SHARE = 1.25; // arrays are cut only when they are this much too long

class History {
  constructor({ bounded = true } = {}) {
    this.bounded = bounded;
    this.revision = 0;
    this.restart(null);
  }

  restart(hello) {
    this.hello = hello;
    this.steps = [];
    this.firstStep = 0; // the number of steps that were cut off at the front
    this.work = 0;
    this.maps = [];
    this.mapRuns = 0;
    this.requests = new Map();
    this.calls = new Map(); // by id: how many requests came of it so far
    this.control = { paused: false, stepping: false };
    this.engineState = hello?.state ?? null; // starting, ready, restarting, stopped
    this.latest_s = hello ? hello.now_s : 0;
    this.clockOffset_s = hello ? hello.now_s - performance.now() / 1000 : 0;
    this.touched = {}; // of each band of each group: how many blocks from the first on were ever in use
    this.draftsSeen = false;
    this.skipped = 0; // events that this viewer was too slow for
    this.revision += 1;
  }

  get isEmpty() {
    return this.steps.length === 0 && this.requests.size === 0;
  }

  get oldest_s() {
    if (this.steps.length) return this.steps[0].began_s;
    const first = this.requests.values().next().value;
    return first ? first.arrived_s : this.latest_s;
  }

  apply(event) {
    const handler = Object.hasOwn(HANDLERS, event.t) ? HANDLERS[event.t] : null;
    if (!handler) return; // a newer server may say more
    handler(this, event);
    this.revision += 1;
  }

  request(number) {
    let request = this.requests.get(number);
    if (!request) {
      request = newRequest(number);
      this.requests.set(number, request);
      if (this.bounded && this.requests.size > MAX_REQUESTS) this.forgetOldest();
    }
    return request;
  }

  forgetOldest() {
    for (const [number, request] of this.requests) {
      if (request.ended || (this.skipped > 0 && this.latest_s - lastSign_s(request) > SILENT_S)) {
        this.requests.delete(number);
        this.calls.delete(request.id);
        return;
      }
    }
  }

  /** The moment that it is: of a live engine its clock goes on while nothing happens. */
  now_s() {
    return this.bounded && this.hello
      ? Math.max(this.latest_s, performance.now() / 1000 + this.clockOffset_s)
      : this.latest_s;
  }

  seen(at_s) {
    if (at_s > this.latest_s) this.latest_s = at_s;
  }

  /** How many of the kept steps were done by then. */
  stepsUntil(at_s) {
    return upperBound(this.steps, at_s, "done_s");
  }

  /** The last that was done by then; null: none that is kept. */
  stepBefore(at_s) {
    return this.steps[this.stepsUntil(at_s) - 1] ?? null;
  }

  mapAt(at_s) {
    const index = upperBound(this.maps, at_s, "at_s");
    return index ? this.maps[index - 1] : null;
  }
}

/** The first index whose field is later than `at_s`, in an array sorted by it. */
function upperBound(rows, at_s, field) {
  let low = 0;
  let high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][field] <= at_s) low = middle + 1;
    else high = middle;
  }
  return low;
}

function trimmed(rows, limit) {
  return rows.length > limit * TRIM_SHARE ? rows.length - limit : 0;
}

const HANDLERS = {
  hello(history, event) {
    history.restart(event);
  },

  arrived(history, event) {
    const request = history.request(event.r);
    if (request.id === null) {
      request.place = history.calls.get(event.id) || 0;
      history.calls.set(event.id, request.place + 1);
    }
    Object.assign(request, {
      id: event.id,
      arrived_s: event.at_s,
      promptTokens: event.prompt_tokens,
      maxTokens: event.max_tokens,
      level: event.level,
      sample: event.sample,
    });
    history.seen(event.at_s);
  },

  admitted(history, event) {
    const request = history.request(event.r);
    if (request.admitted_s === null) request.admitted_s = event.at_s;
    request.cachedTokens = event.cached_tokens;
    request.tiers = event.tiers || {};
    request.prefixBreak = event.break || null;
    history.seen(event.at_s);
  },

  step(history, event) {
    event.totals = totalsAfter(history.steps.at(-1)?.totals ?? NO_STEPS, event);
    history.steps.push(event);
    history.work += workOf(event);
    if (history.bounded) forgetSteps(history);
    for (const [place, [number, start, count, total]] of event.chunks.entries()) {
      const request = history.request(number);
      const share = chunkShare(event, place);
      request.chunks.push({ began_s: event.began_s, done_s: event.done_s, start, count, total, share });
      if (start + count < total) continue;
      if (!request.tokenTimes.length) request.totalsAtFirst = event.totals;
      addTokens(request, event.done_s, 1);
    }
    for (const [number, , drafts, held] of event.slots) {
      const request = history.request(number);
      request.drafts += drafts;
      request.held += Math.max(held, 0);
      if (drafts) history.draftsSeen = true;
      addTokens(request, event.done_s, 1 + held); // held is -1 where its request had ended: no token came of it
    }
    for (const number of event.preempted || []) history.request(number).preemptedTimes.push(event.began_s);
    history.seen(event.done_s);
  },

  kv(history, event) {
    event.usedShare = usedShare(event.groups);
    history.maps.push(event);
    history.mapRuns += runsOf(event);
    if (history.bounded) forgetMaps(history);
    event.groups.forEach((_, group) => {
      for (const band of bandsOf(event, group)) {
        const name = `${band} ${group}`;
        history.touched[name] = Math.max(history.touched[name] || 0, touchedOf(BANDS[band].runsOf(event, group)));
      }
    });
    history.seen(event.at_s);
  },

  ended(history, event) {
    const request = history.request(event.r);
    request.ended = event;
    request.ended_s = event.at_s;
    if (event.token_times_s && event.token_times_s.length) request.tokenTimes = event.token_times_s;
    history.seen(event.at_s);
  },

  control(history, event) {
    history.control = event;
  },

  state(history, event) {
    history.engineState = event.state;
  },

  skipped(history, event) {
    history.skipped += event.count;
  },
};

const workOf = ({ chunks, slots }) => chunks.length + slots.length;

/** The oldest first, some at a time; the latest stays, whatever its size. */
function forgetSteps(history) {
  const { steps } = history;
  let cut = trimmed(steps, MAX_STEPS);
  if (!cut && history.work <= MAX_WORK * TRIM_SHARE) return;
  for (const step of steps.slice(0, cut)) history.work -= workOf(step);
  while (cut < steps.length - 1 && history.work > MAX_WORK) {
    history.work -= workOf(steps[cut]);
    cut += 1;
  }
  steps.splice(0, cut);
  history.firstStep += cut;
}

function lastSign_s(request) {
  const { arrived_s, admitted_s, chunks, tokenTimes } = request;
  return Math.max(arrived_s ?? 0, admitted_s ?? 0, chunks.at(-1)?.done_s ?? 0, tokenTimes.at(-1) ?? 0);
}

const runsOf = ({ groups }) => groups.reduce((total, { runs, host }) => total + runs.length + (host?.length || 0), 0);

/** The oldest first; the latest stays, whatever its size. */
function forgetMaps(history) {
  const { maps } = history;
  let cut = trimmed(maps, MAX_MAPS);
  let left = history.mapRuns;
  for (const map of maps.slice(0, cut)) left -= runsOf(map);
  if (left > MAX_RUNS * TRIM_SHARE) {
    while (cut < maps.length - 1 && left > MAX_RUNS) {
      left -= runsOf(maps[cut]);
      cut += 1;
    }
  }
  if (cut) maps.splice(0, cut);
  history.mapRuns = left;
}

/** Of the fullest group: it is the one that new requests wait for. */
function usedShare(groups) {
  let fullest = 0;
  for (const { runs } of groups) {
    let used = 0;
    let all = 0;
    for (const [, blocks, state] of runs) {
      all += blocks;
      if (state === "used" || state === "shared") used += blocks;
    }
    if (all) fullest = Math.max(fullest, used / all);
  }
  return fullest;
}

function addTokens(request, at_s, count) {
  if (request.ended || request.tokenTimes.length > MAX_TOKEN_TIMES) return; // its end told them all
  for (let index = 0; index < count; index += 1) request.tokenTimes.push(at_s);
}

export { History, upperBound };
