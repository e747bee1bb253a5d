// Browsers start no worker from a page that was opened from disk. The search then runs in a hidden frame: same messages,
// another thread less. mkdocs-material would fetch such a script from elsewhere, unless one has this name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow, script = inside.document.createElement("script");
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => script.addEventListener("load", () => resolve(inside)));
      script.src = new URL(url, location);
      inside.document.head.append(script);
    }
    async postMessage(data) {
      (await this.ready).dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
