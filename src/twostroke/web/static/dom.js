// The one place that knows which library renders: views import `html` and hooks from here.

import { h, render } from "./vendor/preact.js";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-hooks.js";
import htm from "./vendor/htm.js";

const html = htm.bind(h);

/** Renders the caller again at most `perSecond` times a second, and only when `revision()` has changed. */
function useRevision(revision, perSecond = 5) {
  const [, redraw] = useState(0);
  const latest = useRef(revision);
  latest.current = revision;
  const drawn = useRef(null);
  drawn.current = revision(); // while rendering: what changes before the effect runs is not missed
  useEffect(() => {
    const timer = setInterval(() => {
      if (latest.current() !== drawn.current) redraw((count) => count + 1);
    }, 1000 / perSecond);
    return () => clearInterval(timer);
  }, [perSecond]);
}

export { h, html, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useRevision, useState };
