// Browsers start no Worker from a page that was opened as a file. Then the search runs in a frame without a window.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      const source = JSON.stringify(String(url)).replace(/</g, "\\u003c");
      this.frame.srcdoc = `<script>
        postMessage = message => parent.dispatchEvent(new MessageEvent("from-search", { data: message }));
        importScripts = (...urls) => Promise.all(urls.map(load));
        function load(url) {
          return new Promise((done, failed) => {
            const script = Object.assign(document.createElement("script"), { src: url, onload: done, onerror: failed });
            document.head.append(script);
          });
        }
        load(${source}).then(() => parent.dispatchEvent(new Event("search-is-ready")));
      <\/script>`;
      addEventListener("from-search", (event) => {
        const message = new MessageEvent("message", { data: event.data });
        this.onmessage?.(message);
        this.dispatchEvent(message);
      });
      addEventListener("search-is-ready", () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((message) => this.postMessage(message));
      });
      document.body ? document.body.append(this.frame) : addEventListener("DOMContentLoaded", () => document.body.append(this.frame));
    }

    postMessage(message) {
      if (this.waiting) this.waiting.push(message);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: message }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
