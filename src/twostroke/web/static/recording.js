// A recorded run: from a file that the user opens (JSON lines, as `serve --record` writes them), or from the page itself
// where `twostroke replay --html` put it there.

import { History } from "./history.js";
import { Player } from "./player.js";

class BadRecording extends Error {}

function recordingIn(page) {
  return page.getElementById("recording");
}

/** The events of the element that holds them: a JSON array, or JSON lines, or those packed with gzip in base64. */
async function eventsOf(element) {
  const text = element.textContent.trim();
  if (element.dataset.encoding !== "gzip-base64") return parsed(text);
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return parsed(await new Response(plain).text());
}

function parsed(text) {
  if (!text.startsWith("[")) return linesOf(text);
  try {
    return JSON.parse(text);
  } catch {
    throw new BadRecording("the recorded run in it is not valid JSON");
  }
}

/** A file that was cut off at any byte still plays: its torn last line is left out. */
function linesOf(text) {
  const lines = text.split("\n").filter((line) => line.trim());
  const events = [];
  for (const [index, line] of lines.entries()) {
    try {
      events.push(JSON.parse(line));
    } catch {
      if (index < lines.length - 1) throw new BadRecording(`line ${index + 1} of this file is not an event`);
    }
  }
  return events;
}

/** The events of each run: the engine may have been started again while it was recorded. */
function runsIn(events) {
  if (!Array.isArray(events) || events[0]?.t !== "hello") {
    throw new BadRecording(
      "this is not a recorded run: such a file begins with the event hello (see twostroke serve --record)",
    );
  }
  const runs = [];
  let hasSteps = true;
  for (const event of events) {
    if (event?.t === "hello" && hasSteps) {
      runs.push([]);
      hasSteps = false;
    }
    if (event?.t === "step") hasSteps = true;
    runs.at(-1).push(event);
  }
  return runs;
}

/** A source for the page: the whole history of one run of the record, looked at from its beginning. */
function replayed(events, which = 0) {
  const runs = runsIn(events);
  const history = new History({ bounded: false });
  for (const [index, event] of runs[which].entries()) {
    try {
      history.apply(event);
    } catch {
      throw new BadRecording(`event ${index + 1} of this recorded run is not as twostroke serve --record writes it`);
    }
  }
  history.latest_s = lastMoment(history);
  const player = new Player(history, { isLive: false });
  return { kind: "replay", history, player, feed: null, runs: runs.length, which, choose: (run) => replayed(events, run) };
}

/** `hello` may have been said long before anything happened. */
function lastMoment(history) {
  const ends = [history.steps.at(-1)?.done_s ?? 0, history.maps.at(-1)?.at_s ?? 0];
  for (const request of history.requests.values()) ends.push(request.ended_s ?? request.arrived_s ?? 0);
  return Math.max(...ends);
}

export { BadRecording, eventsOf, linesOf, recordingIn, replayed };
