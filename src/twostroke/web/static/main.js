// Begins: a page that watches a server, or one file with a recording in it that needs none.

import { App } from "./app.js";
import { html, render } from "./dom.js";
import { Feed } from "./feed.js";
import { onFrame } from "./frames.js";
import { History } from "./history.js";
import { Player } from "./player.js";
import { eventsOf, recordingIn, replayed } from "./recording.js";
import { applySavedTheme } from "./theme_switch.js";

async function begin() {
  applySavedTheme();
  const place = document.getElementById("page");
  const embedded = recordingIn(document);
  const source = embedded ? await replaySource(embedded) : liveSource();
  onFrame((elapsed_s) => source.player.advance(elapsed_s));
  place.textContent = "";
  render(html`<${App} source=${source} />`, place);
}

function liveSource() {
  const history = new History();
  const feed = new Feed(history);
  feed.run();
  return { kind: "live", history, player: new Player(history), feed };
}

async function replaySource(element) {
  const source = replayed(await eventsOf(element));
  source.player.play(1);
  return source;
}

/** A page that cannot begin says why, instead of loading for ever. */
function giveUp(error) {
  const place = document.getElementById("page");
  place.textContent = `This page cannot be shown: ${error.message}`;
  place.setAttribute("role", "alert");
}

begin().catch(giveUp);
