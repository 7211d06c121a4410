// The page: its head, its tabs, and the view that the address names after `#`.

import { html, useCallback, useEffect, useState } from "./dom.js";
import { Head } from "./head.js";
import { KeyDialog } from "./key_dialog.js";
import { Pulse } from "./pulse.js";
import { Transport } from "./transport.js";
import { KvView } from "./views/kv.js";
import { PlannerView } from "./views/planner.js";
import { PlaygroundView } from "./views/playground.js";
import { ReplayView } from "./views/replay.js";
import { RequestsView } from "./views/requests.js";
import { RooflineView } from "./views/roofline.js";
import { StepsView } from "./views/steps.js";
import { onFrame } from "./frames.js";

const VIEWS = [
  { name: "steps", title: "Steps", view: StepsView, hasMoments: true },
  { name: "kv", title: "KV", view: KvView, hasMoments: true },
  { name: "requests", title: "Requests", view: RequestsView, hasMoments: true },
  { name: "roofline", title: "Roofline", view: RooflineView, hasMoments: true },
  { name: "playground", title: "Playground", view: PlaygroundView, acts: true },
  { name: "planner", title: "Planner", view: PlannerView, asks: true },
  { name: "replay", title: "Replay", view: ReplayView, hasMoments: true },
];

/** `#requests/12` is the view requests, and its part 12. */
function fromAddress() {
  const [name, part = ""] = location.hash.slice(1).split("/");
  return { name: VIEWS.some((view) => view.name === name) ? name : "steps", part };
}

function useAddress() {
  const [address, setAddress] = useState(fromAddress);
  useEffect(() => {
    const changed = () => setAddress(fromAddress());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return address;
}

/** What may act on the server is not there in a recording, and not in a page that is for looking alone: which it is, the
 * server wrote into the page. */
function offered(view, live, mayAct) {
  if (view.acts) return live.kind === "live" && mayAct;
  return view.asks ? live.kind === "live" : true;
}

function App({ source: first }) {
  const address = useAddress();
  const [source, setSource] = useState(first);
  const [, redraw] = useState(0);
  const open = useCallback((next) => {
    setSource(next);
    location.hash = "steps";
  }, []);
  const back = useCallback(() => setSource(first), [first]);

  // `hello` decides what is offered, and it comes late or again.
  useEffect(() => {
    let seen = null;
    const timer = setInterval(() => {
      if (first.history.hello !== seen) {
        seen = first.history.hello;
        redraw((count) => count + 1);
      }
    }, 100);
    return () => clearInterval(timer);
  }, [first]);
  useEffect(() => {
    if (source === first) return undefined;
    return onFrame((elapsed_s) => source.player.advance(elapsed_s));
  }, [source, first]);

  const mayAct = first.kind === "live" && document.documentElement.dataset.page === "full";
  const views = VIEWS.filter((view) => offered(view, first, mayAct));
  const chosen = views.find((view) => view.name === address.name) || views[0];
  useEffect(() => {
    document.title = `${chosen.title} · Twostroke`;
  }, [chosen]);
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the view</a>
    <${Head} source=${source} first=${first} back=${back} />
    <nav class="tabs" aria-label="Views">
      ${views.map(
        (view) => html`<a href="#${view.name}" aria-current=${view === chosen ? "page" : undefined}>${view.title}</a>`,
      )}
    </nav>
    <${Pulse} source=${source} />
    ${chosen.hasMoments && html`<${Transport} source=${source} />`}
    <main id="main" tabindex="-1">
      ${views.map((view) => {
        // The playground stays where it is while others are looked at: its answers go on.
        if (view !== chosen && !view.acts) return null;
        const seen = view.acts ? first : source;
        return html`<section key=${view.name} class="view" hidden=${view !== chosen} aria-label=${view.title}>
          <${view.view} source=${seen} part=${view === chosen ? address.part : ""} open=${open} mayAct=${mayAct} />
        </section>`;
      })}
    </main>
    ${first.kind === "live" && html`<${KeyDialog} feed=${first.feed} />`}
  `;
}

/** The address after # names a view, so the link must not change it. */
function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

export { App };
