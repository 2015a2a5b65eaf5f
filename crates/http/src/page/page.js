// The live parts of the page: each element with data-live names a stream of events, whose HTML is made, and escaped, by the
// gateway. An event "set" replaces what an element holds, "add" puts something before it; "end" says why there is no more.
"use strict";

const MOST_ROWS = 200;

function follow(box) {
  const status = box.querySelector("[data-status]");
  const say = (text) => { if (status) status.textContent = text; };
  let source = null;
  const parts = (event) => {
    const cut = event.data.indexOf("\n");
    return [document.getElementById(event.data.slice(0, cut)), event.data.slice(cut + 1)];
  };
  const stop = () => {
    if (source) source.close();
    source = null;
  };
  const start = () => {
    if (source) return;
    say("connecting");
    source = new EventSource(box.dataset.live);
    source.addEventListener("open", () => say("live"));
    source.addEventListener("set", (event) => {
      const [element, html] = parts(event);
      if (element) element.innerHTML = html;
    });
    source.addEventListener("add", (event) => {
      const [element, html] = parts(event);
      if (!element) return;
      element.insertAdjacentHTML("afterbegin", html);
      while (element.children.length > MOST_ROWS) element.lastElementChild.remove();
    });
    source.addEventListener("end", (event) => {
      stop();
      say("ended: " + event.data);
    });
    source.addEventListener("error", () => {
      const over = source && source.readyState === EventSource.CLOSED;
      say(over ? "not live: too many look, or the login is over; reload the page" : "reconnecting");
    });
  };
  // Nobody looks at a hidden page, so nothing is sent to it.
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  if (!document.hidden) start();
}

for (const box of document.querySelectorAll("[data-live]")) follow(box);
