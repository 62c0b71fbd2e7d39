// The server that the page shows, and the model that its chat talks to.

import { request } from "/live/api.js";

export class Servers {
  // `select` is hidden unless there is a choice. Calls `onChange` when another server is chosen.
  constructor(select, onChange) {
    this.select = select;
    this.listed = [];
    this.listing = null;
    select.addEventListener("change", onChange);
  }

  // Asks the gateway for its servers, until it has answered once.
  async list() {
    this.listing ??= request("/live/servers").then((response) => response.json());
    try {
      this.show((await this.listing).servers);
    } catch (error) {
      this.listing = null;
      throw error;
    }
  }

  show(servers) {
    if (this.listed.length) return;
    this.listed = servers;
    for (const { model, server } of servers) this.select.add(new Option(`${model}, server ${server + 1}`));
    this.select.hidden = servers.length < 2;
  }

  eventsPath() {
    if (this.listed.length < 2) return "/live/events";
    return `/live/events?${new URLSearchParams(this.listed[this.select.selectedIndex])}`;
  }

  async model() {
    await this.list();
    return this.listed[this.select.selectedIndex].model;
  }
}
